//! What the benches need to know of the machine's GPUs, and data to send to them.

use gpu_pool::GpuPool;

/// How many GPUs there are; 0 where only software GPUs are to be had.
pub fn count() -> usize {
    #[cfg(feature = "cuda")]
    if std::env::var("GPU_POOL_BACKEND").map_or(true, |backend| !backend.starts_with("host")) {
        return gpu_pool::driver::cuda::device_count().unwrap_or(0);
    }
    0
}

/// A pool of the first `devices` GPUs, or of as many software GPUs where `software`.
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

/// Noise, since zeros can be faster than data. xorshift64*, different for each seed.
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
