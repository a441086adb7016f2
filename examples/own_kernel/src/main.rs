//! Smooths a signal on all GPUs, each its part, or on software GPUs.

use gpu_pool::GpuPool;
use own_kernel::{MODULE, smooth};

fn main() -> gpu_pool::Result<()> {
    let signal: Vec<f32> = (0..1000).map(|i| (i % 2) as f32).collect();
    let pool = GpuPool::builder().module(&MODULE).build()?;
    let parts = pool.run(|dev, shard| {
        let x = dev.upload(shard.of(&signal))?;
        dev.download(&smooth(dev, &x)?)
    })?;
    for (device, part) in parts.iter().enumerate() {
        println!("device {device}: {} elements: {:?} ..", part.len(), &part[..4]);
    }
    Ok(())
}
