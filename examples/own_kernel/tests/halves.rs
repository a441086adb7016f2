//! The kernel's halves: the Rust half against numbers, the device code against the Rust half.

use gpu_pool::{GpuPool, LaunchDims, Module};
use gpu_pool_lab::twins;
use own_kernel::{MODULE, SMOOTH, smooth};

#[test]
fn the_rust_half_is_right() -> gpu_pool::Result<()> {
    let pool = GpuPool::builder().host(1).module(&MODULE).build()?;
    let smoothed = pool.run(|dev, _| dev.download(&smooth(dev, &dev.upload(&[4.0, 0.0, 0.0, 8.0])?)?))?;
    assert_eq!(smoothed, [[3.0, 1.0, 2.0, 6.0]]);
    Ok(())
}

/// Without a GPU it prints "skipped: no CUDA device".
#[test]
fn the_device_code_agrees_with_the_rust_half() {
    for n in [1, 2, 255, 10_000] {
        let x: Vec<f32> = (0..n).map(|i| (i * 7919 % 1000) as f32 / 8.0).collect();
        // SAFETY: both halves fit the signature, and x and y have n elements.
        unsafe { twins(&SMOOTH, LaunchDims::cover(n), (x, vec![0.0f32; n], n as u64), 1e-6) }
    }
}

#[test]
fn the_source_compiles() -> gpu_pool::Result<()> {
    static SOURCE: Module = Module::cuda(include_str!("../kernels/smooth.cu"));
    if !SOURCE.check()? {
        println!("skipped: no NVRTC");
    }
    Ok(())
}
