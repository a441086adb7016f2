use super::*;
use std::mem::{offset_of, size_of};

/// The layout in `cuda.h`.
#[test]
fn as_the_driver_lays_it_out() {
    assert_eq!((offset_of!(Config, block), offset_of!(Config, shared_bytes)), (12, 24));
    assert_eq!((offset_of!(Config, stream), offset_of!(Config, attributes)), (32, 40));
    assert_eq!((offset_of!(Config, count), size_of::<Config>()), (48, 56));
    assert_eq!((offset_of!(Attribute, value), size_of::<Attribute>()), (8, 72));
}

/// A kernel without the instruction would race with all earlier work.
#[test]
fn only_code_that_has_the_instruction() {
    assert!(waits((9, 0), 90));
    assert!(waits((12, 0), 120));
    assert!(!waits((9, 0), 75), "PTX of the crate, compiled by the driver");
    assert!(!waits((10, 0), 75));
    assert!(!waits((8, 0), 80));
    assert!(!waits((9, 0), 0), "unknown");
}

/// The driver must report the target of the loaded code correctly. Otherwise chains of collectives would be slow
/// without notice, or race.
#[test]
fn the_driver_tells_code_that_waits() {
    let Ok(gpu) = CudaGpu::open(0) else { return println!("skipped: no CUDA device") };
    let stream = gpu.stream_create(0).unwrap();
    let image = crate::kernel::builtin::PUSH.image;
    let only_ptx = crate::driver::ModuleImage { cubins: &[], ..image };
    for (image, waits) in [(image, gpu.info.compute_capability == (9, 0)), (only_ptx, false)] {
        let module = gpu.module_load(&image).unwrap();
        let f = gpu.function(module, "push_f32").unwrap();
        assert_eq!(gpu.early(f, stream).is_some(), waits && gpu.optional.launch_ex.is_some());
        // SAFETY: nothing was launched.
        unsafe { gpu.module_unload(module) }.unwrap();
    }
    // SAFETY: nothing was submitted to it.
    unsafe { gpu.stream_destroy(stream) }.unwrap();
}

#[test]
fn graphs_need_a_newer_driver() {
    assert!(possible(12020, false) && possible(12030, true) && possible(13000, true));
    assert!(!possible(12020, true));
}
