//! The machine's GPUs, as the benches need them, and test data.

use gpu_pool::{Builder, Device, GpuPool, Result};
use std::time::Instant;

/// How many devices a bench may open: the GPUs, each of them `GPU_POOL_SHARE` times. With more devices than GPUs a
/// bench can be tried on a small machine; its times mean nothing. 0 with software GPUs only.
pub fn device_count() -> usize {
    let share = std::env::var_os("GPU_POOL_SHARE").filter(|times| !times.is_empty());
    count()
        * share
            .map_or(1, |times| times.to_str().and_then(|times| times.parse().ok()).expect("GPU_POOL_SHARE is a number"))
}

/// Number of GPUs; 0 with software GPUs only.
pub fn count() -> usize {
    #[cfg(feature = "cuda")]
    if std::env::var("GPU_POOL_BACKEND").map_or(true, |backend| !backend.starts_with("host")) {
        return gpu_pool::extend::driver::cuda::device_count().unwrap_or(0);
    }
    0
}

/// The builder of a pool of the first `most` of the [`device_count`], or of as many software GPUs if `software`.
pub fn builder(software: bool, most: usize) -> Builder {
    let builder = GpuPool::builder();
    if software {
        return builder.host(most);
    }
    let ordinals: Vec<usize> = (0..most).map(|i| i % count()).collect();
    // The variable would repeat the list.
    builder.cuda().devices(&ordinals).share_gpus(most > count())
}

/// That pool.
pub fn pool(software: bool, most: usize) -> GpuPool {
    builder(software, most).build().expect("the devices can be opened")
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
