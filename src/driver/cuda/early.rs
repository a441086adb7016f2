//! Kernels that come early: put on the device while the kernel before them on the stream ends, and waiting there until
//! that one has completed. What is gained is the microsecond between one kernel's end and the next one's start.
//!
//! CUDA calls it *programmatic dependent launch*
//! ([guide](https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html)).
//! It is the kernel that waits, by an instruction that compute capability 9.0 brought: a kernel without it would be a
//! data race with all that was before it. [`Launch::early`](crate::driver::Launch::early) says that the source has it;
//! whether the code that was loaded has it is asked here, since the crate's PTX, for older GPUs, has not. After
//! anything but a kernel the attribute has no effect.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUstream};

use super::{CudaGpu, module::function, stream::stream};
use crate::driver::{LaunchDims, RawFunction, RawStream};

/// As 10 * major + minor: what code was compiled for, when its instructions wait.
const WAITS: i32 = 90;

/// CUDA 12.3, where edges of graphs can say that a kernel comes early
/// ([edge data](https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/cuda-graphs.html)).
const IN_GRAPHS: i32 = 12030;

/// `cuLaunchKernelEx` (11.8). It returns a plain integer.
pub(super) type LaunchEx = unsafe extern "C" fn(*const Config, CUfunction, *mut *mut c_void, *mut *mut c_void) -> i32;

/// `CUlaunchConfig`. cudarc has it only where it was built for CUDA 11.8 or later.
#[repr(C)]
pub(super) struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: CUstream,
    attributes: *const Attribute,
    count: u32,
}

/// `CUlaunchAttribute`: a value has 64 bytes, of which an integer takes the first four.
#[repr(C, align(8))]
struct Attribute {
    id: u32,
    pad: u32,
    value: [i32; 16],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: 1 to come early.
const SERIALIZATION: u32 = 6;

/// Whether a kernel waits by itself, by what its code was compiled *for*: the JIT makes code for 9.0 of PTX for 7.5,
/// too.
fn waits(compute_capability: (u32, u32), compiled_for: i32) -> bool {
    compute_capability >= (9, 0) && compiled_for >= WAITS
}

/// Whether the driver can launch, or capture, a kernel that waits so that it comes early.
fn possible(driver: i32, capturing: bool) -> bool {
    !capturing || driver >= IN_GRAPHS
}

impl CudaGpu {
    /// Notes whether a kernel that was just found waits.
    pub(super) fn note_waiting(&self, f: CUfunction) {
        let mut compiled_for = 0;
        let what = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: a kernel of this device, whose context is current; the pointer is to a live integer.
        let asked = self.check(unsafe { sys::cuFuncGetAttribute(&mut compiled_for, what, f) });
        let handle = f.expose_provenance() as u64;
        let mut waiting = self.waiting.lock();
        match asked.is_ok() && waits(self.info.compute_capability, compiled_for) {
            true => waiting.insert(handle),
            // It may have been the handle of a kernel that went with its module.
            false => waiting.remove(&handle),
        };
    }

    /// What launches a kernel of which it is said that it may come early; `None` where it cannot.
    pub(super) fn early(&self, f: RawFunction, s: RawStream) -> Option<LaunchEx> {
        let launch = self.optional.launch_ex?;
        let can = possible(self.optional.version, self.is_capturing(s)) && self.waiting.lock().contains(&f.0);
        can.then_some(launch)
    }
}

/// The driver's code.
///
/// # Safety
/// As for `cuLaunchKernel`; and the kernel waits for the one before it before it touches memory.
pub(super) unsafe fn launch(
    launch: LaunchEx,
    f: RawFunction,
    dims: LaunchDims,
    s: RawStream,
    args: *mut *mut c_void,
) -> i32 {
    let mut early = Attribute { id: SERIALIZATION, pad: 0, value: [0; 16] };
    early.value[0] = 1;
    let config = Config {
        grid: dims.grid.into(),
        block: dims.block.into(),
        shared_bytes: dims.shared_bytes,
        stream: stream(s),
        attributes: &early,
        count: 1,
    };
    // SAFETY: the symbol's own type; the structures are laid out as the driver's, and live across the call; the rest is
    // the caller's promise.
    unsafe { launch(&config, function(f), args, ptr::null_mut()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// By `cuda.h`.
    #[test]
    fn as_the_driver_lays_it_out() {
        assert_eq!((offset_of!(Config, block), offset_of!(Config, shared_bytes)), (12, 24));
        assert_eq!((offset_of!(Config, stream), offset_of!(Config, attributes)), (32, 40));
        assert_eq!((offset_of!(Config, count), size_of::<Config>()), (48, 56));
        assert_eq!((offset_of!(Attribute, value), size_of::<Attribute>()), (8, 72));
    }

    /// A kernel without the instruction would race with all that was before it.
    #[test]
    fn only_code_that_has_the_instruction() {
        assert!(waits((9, 0), 90));
        assert!(waits((12, 0), 120));
        assert!(!waits((9, 0), 75), "PTX of the crate, compiled by the driver");
        assert!(!waits((10, 0), 75));
        assert!(!waits((8, 0), 80));
        assert!(!waits((9, 0), 0), "unknown");
    }

    /// What the driver says of the code that it has loaded; or chains of collectives would silently be as slow as
    /// before, or race.
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
}
