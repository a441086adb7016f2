//! The CUDA Handbook, 9.4: one device produces, another consumes, and an event is between them.
//!
//! `cargo run --release --example producer_consumer`. It uses the first two GPUs, else two software GPUs. The producer
//! records an event after its work. The consumer's stream waits for the event, on the device. No CPU thread waits for
//! a device. (The library would order the accesses to `x` without the event, too: memory knows its last writer.)

use anyhow::{Result, ensure};
use gpu_pool::{DeviceBuffer, Event, GpuPool};
use std::io::{Write, stdout};

fn main() -> Result<()> {
    run(&GpuPool::builder().devices(&[0, 1]).build()?, &mut stdout(), 100, 1 << 16)
}

/// `rounds` buffers of `len` elements.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), rounds: usize, len: usize) -> Result<()> {
    let found = pool.on(&[0, 1]).run(|dev, _| {
        let mut sums = dev.zeros::<f32>(rounds)?;
        for round in 0..rounds {
            if dev.rank() == 0 {
                let mut x = dev.zeros::<f32>(len)?;
                dev.fill(&mut x, round as f32)?;
                let produced = dev.record()?;
                dev.give((x, produced), 1, 0)?;
            } else {
                let (x, produced) = dev.take::<(DeviceBuffer<f32>, Event)>(0, 0)?;
                dev.wait(&produced)?;
                let sum = dev.sum(&x.copy_to(dev)?)?;
                dev.copy(&sum, &mut sums.slice_mut(round..round + 1))?;
            }
        }
        dev.download(&sums)
    })?;
    check(&found[1], len)?;
    writeln!(out, "device 1 consumed {rounds} buffers of device 0")?;
    Ok(())
}

/// Compares the sums with the expected ones.
pub fn check(sums: &[f32], len: usize) -> Result<()> {
    for (round, sum) in sums.iter().enumerate() {
        let expected = (round * len) as f32;
        ensure!((sum - expected).abs() <= 1e-6 * expected, "round {round}: {sum} instead of {expected}");
    }
    Ok(())
}
