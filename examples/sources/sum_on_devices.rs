//! NVIDIA's course, "CUDA-aware MPI": the devices' results are summed on the CPU; then from device to device.
//!
//! `cargo run --release --example sum_on_devices`. It uses all GPUs, else four software GPUs. Each device draws its
//! part of the random numbers; the mean of their squares is about 1/3. A collective takes device memory as it is: there
//! is one address space, and no copy to the CPU.

use anyhow::{Result, ensure};
use gpu_pool::{GpuPool, ReduceOp};
use gpu_pool_train::prelude::*;
use std::io::{Write, stdout};

fn main() -> Result<()> {
    run(&GpuPool::builder().build()?, &mut stdout(), 10_000_000)
}

/// The mean of `len` squares, in both ways.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), len: usize) -> Result<()> {
    let found = pool.run(|dev, shard| {
        let range = shard.range(len);
        let mut x = dev.zeros::<f32>(range.len())?;
        dev.uniform(&mut x, 0.0..1.0, 42, range.start as u64)?;
        let mut sum = dev.dot(&x, &x)?;
        let own = dev.download(&sum)?[0]; // MPI: the result of each device goes to the CPU
        dev.all_reduce(&mut sum, ReduceOp::Sum)?; // CUDA-aware MPI: from device to device
        Ok((own, dev.download(&sum)?[0]))
    })?;
    let on_cpu = found.iter().map(|(own, _)| own).sum::<f32>() / len as f32;
    for (device, (_, sum)) in found.iter().enumerate() {
        writeln!(out, "device {device}: {:.5}", sum / len as f32)?;
        check(on_cpu, sum / len as f32)?;
    }
    writeln!(out, "on the CPU: {on_cpu:.5}")?;
    Ok(())
}

/// Both means agree, and are near to 1/3.
pub fn check(on_cpu: f32, on_devices: f32) -> Result<()> {
    ensure!((on_cpu - on_devices).abs() < 1e-5, "{on_devices} on devices, {on_cpu} on the CPU");
    ensure!((on_cpu - 1.0 / 3.0).abs() < 0.01, "the mean of squares is {on_cpu}");
    Ok(())
}
