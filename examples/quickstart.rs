//! The smallest complete program: a sum over all devices, and the pool's report about them.
//!
//! `cargo run --release --example quickstart`. It uses GPUs if there are any, else four software GPUs
//! (`GPU_POOL_BACKEND=host:8` for eight).

use gpu_pool::{GpuPool, ReduceOp};

fn main() -> anyhow::Result<()> {
    let batch: Vec<f32> = (0..1_000_000).map(|i| (i % 10) as f32).collect();

    let sums = GpuPool::scope(|dev, shard| {
        let x = dev.upload(shard.of(&batch))?; // this GPU's part of the borrowed batch
        let mut s = dev.sum(&x)?; // one element, on this GPU's stream
        dev.all_reduce(&mut s, ReduceOp::Sum)?; // ring buffers + cross-device events
        Ok((shard.range(batch.len()).len(), dev.download(&s)?[0])) // waits for this stream only
    })?;

    print!("{}", GpuPool::global()?.report());
    for (device, (rows, sum)) in sums.iter().enumerate() {
        println!("device {device} added up {rows} numbers and knows the total: {sum}");
        anyhow::ensure!(*sum == 4_500_000.0, "a wrong sum");
    }
    Ok(())
}
