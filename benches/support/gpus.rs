//! The machine's GPUs, as the benches need them, and test data.

use gpu_pool::{Device, GpuPool, Result};
use std::time::Instant;

/// Number of GPUs; 0 with software GPUs only.
pub fn count() -> usize {
    #[cfg(feature = "cuda")]
    if std::env::var("GPU_POOL_BACKEND").map_or(true, |backend| !backend.starts_with("host")) {
        return gpu_pool::driver::cuda::device_count().unwrap_or(0);
    }
    0
}

/// A pool of the first `devices` GPUs, or of as many software GPUs if `software`.
pub fn pool(software: bool, devices: usize) -> GpuPool {
    let builder = GpuPool::builder();
    let builder = match software {
        true => builder.host(devices),
        false => builder.cuda().devices(&(0..devices).collect::<Vec<_>>()),
    };
    builder.build().expect("the devices can be opened")
}

/// The counts out of 1, 2, 4, 8 that `most` devices allow.
pub fn powers(most: usize) -> impl Iterator<Item = usize> {
    [1, 2, 4, 8].into_iter().filter(move |&n| n <= most)
}

/// Noise, since zeros can be faster than other data. xorshift64*, different for each seed.
pub fn noise(len: usize, seed: u64) -> Vec<u32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        (x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    };
    (0..len).map(|_| next()).collect()
}

/// Microseconds per call of `once` on the host, over `rounds` calls after a warm-up, without the wait for the device.
pub fn micros_per_call(dev: &Device, rounds: usize, mut once: impl FnMut() -> Result<()>) -> Result<f64> {
    (0..rounds / 10 + 1).try_for_each(|_| once())?;
    dev.synchronize()?;
    let clock = Instant::now();
    for _ in 0..rounds {
        once()?;
    }
    Ok(clock.elapsed().as_secs_f64() * 1e6 / rounds as f64)
}
