//! A kernel in CUDA C++ and the same in Rust, and a safe function that launches it.

use gpu_pool::{Device, DeviceBuffer, LaunchDims, Module, Result, kernel};

/// `kernels/smooth.cu`, compiled by `nvcc -ptx`. Give it to the builder of the pool.
pub static MODULE: Module = Module::ptx(include_str!("../kernels/ptx/smooth.ptx"));

kernel! {
    /// The signature is that of the CUDA function: a slice is a pointer there. The block is the Rust half: it computes
    /// the whole launch on a software GPU.
    pub static SMOOTH: "smooth" in MODULE, fn(x: &[f32], y: &mut [f32], n: u64) |_| {
        let n = n as usize;
        for i in 0..n {
            let (left, right) = (x[i.saturating_sub(1)], x[(i + 1).min(n - 1)]);
            y[i] = 0.25 * left + 0.5 * x[i] + 0.25 * right;
        }
    }
}

/// The smoothed elements of `x`, in a new buffer. Asynchronous, as all operations of a device.
#[track_caller]
pub fn smooth(dev: &Device, x: &DeviceBuffer<f32>) -> Result<DeviceBuffer<f32>> {
    let n = x.len();
    let mut y = dev.zeros(n)?;
    // SAFETY: both halves fit the signature. They read x[..n] and write y[..n], and both buffers have n elements.
    unsafe { dev.launch(&SMOOTH, LaunchDims::cover(n), (x, &mut y, n as u64))? };
    Ok(y)
}
