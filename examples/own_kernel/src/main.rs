//! Smooths a signal on all GPUs, each its part, or on software GPUs.

use gpu_pool::GpuPool;
use own_kernel::{MODULE, smooth};

fn main() -> gpu_pool::Result<()> {
    let signal: Vec<f32> = (0..1000).map(|i| (i % 2) as f32).collect();
    let pool = GpuPool::builder().module(&MODULE).build()?;
    let parts = pool.run(|dev, shard| {
        let own = shard.range(signal.len());
        // Its part, and a neighbour on each side.
        let with = own.start.saturating_sub(1)..(own.end + 1).min(signal.len());
        let y = dev.download(&smooth(dev, &dev.upload(&signal[with.clone()])?)?)?;
        Ok(y[own.start - with.start..][..own.len()].to_vec())
    })?;
    for (device, part) in parts.iter().enumerate() {
        println!("device {device}: {} elements: {:?} ..", part.len(), &part[..4]);
    }
    Ok(())
}
