use super::*;
use gpu_pool::{Module, kernel};
use std::sync::atomic::{AtomicU32, Ordering};

static MODULE: Module = Module::ptx("");
static CALLS: AtomicU32 = AtomicU32::new(0);
kernel! {
    /// Each call adds the number of calls before it, so that two runs differ; but not to `same`.
    static UNSTEADY: "unsteady" in MODULE,
        fn(x: &[f32], same: &mut [u32], y: &mut [f32], z: &mut [u16], scale: f32) |_| {
        let calls = CALLS.fetch_add(1, Ordering::Relaxed);
        same.fill(7);
        for (y, x) in y.iter_mut().zip(x) { *y += scale * x * (1.0 + calls as f32) }
        z[1] += calls as u16;
    }
}

#[test]
fn a_difference_names_its_place_and_both_values() {
    let pool = || GpuPool::builder().host(1).module(&MODULE).build().unwrap();
    let (gpu, host) = (pool(), pool());
    let difference = |scale: f32, tolerance| {
        CALLS.store(0, Ordering::Relaxed);
        let inputs = (vec![0.0f32, 1.0], vec![0u32; 2], vec![f32::NAN, 8.0], vec![3u16; 2], scale);
        // SAFETY: the kernel has no device code, and its Rust half stays within its slices.
        unsafe { compare(&gpu, &host, &UNSTEADY, LaunchDims::cover(2), inputs, tolerance) }.unwrap().unwrap()
    };
    assert_eq!(difference(1.0, 0.0), "parameter 2, element 1: 9.0 on the GPU, 10.0 in Rust");
    assert_eq!(difference(1.0, 0.09), "parameter 2, element 1: 9.0 on the GPU, 10.0 in Rust");
    let rest = "parameter 3, element 1: bytes [03, 00] on the GPU, bytes [04, 00] in Rust";
    assert_eq!(difference(1.0, 0.11), rest);
    assert_eq!(difference(0.0, 0.0), rest);
}

#[test]
fn signs_of_zero_and_nan() {
    let differ = |a: f32, b: f32, tolerance| Left::of(&[a]).differs(&Left::of(&[b]), tolerance).is_some();
    assert!(!differ(f32::NAN, -f32::NAN, 0.0) && differ(f32::NAN, 1.0, 1.0));
    assert!(differ(0.0, -0.0, 0.0) && !differ(0.0, -0.0, 1e-9));
    assert!(!differ(f32::INFINITY, f32::INFINITY, 0.0) && differ(f32::INFINITY, f32::MAX, 1e-3));
    assert!(differ(f32::INFINITY, f32::NEG_INFINITY, 1e-3));
}
