//! CUDA.jl, "Multiple GPUs", scenarios 1 to 3: a worker for each device; a task on each device; and many threads.
//!
//! `cargo run --release --example thread_per_device`. It uses all GPUs, else four software GPUs. The text advises
//! against the purpose of this crate: each device has a thread, which owns its context and its memory pool.

use anyhow::{Context, Result, ensure};
use gpu_pool::GpuPool;
use std::{
    io::{Write, stdout},
    thread,
};

fn main() -> Result<()> {
    run(&GpuPool::builder().build()?, &mut stdout(), 1_000_000)
}

/// Sums of `len` numbers in three ways.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), len: usize) -> Result<()> {
    // Scenario 1: a worker for each device, here a thread. Memory belongs to the device that it was allocated on.
    let names: Vec<String> = pool.report().devices.into_iter().map(|info| info.name).collect();
    let mut state = pool.per_device(|dev, shard| {
        let x = dev.upload(&(0..len).map(|i| (i % 7) as f32).collect::<Vec<_>>()[shard.range(len)])?;
        assert_eq!(x.device(), dev.index());
        Ok(x)
    })?;
    for (device, name) in names.iter().enumerate() {
        writeln!(out, "Worker {device} uses {name} {device}")?;
    }
    let expected = (0..len).map(|i| (i % 7) as f64).sum::<f64>();
    let total = |sums: Vec<f32>| sums.into_iter().map(f64::from).sum::<f64>();
    let sums = state.run(|dev, _, x| Ok(dev.download(&dev.sum(&*x)?)?[0]))?;
    check("one program on all devices", total(sums), expected, out)?;

    // Scenario 2: other work on each device, without a "current device".
    let sums = pool.tasks(|t| {
        let sums: Vec<_> = (0..t.device_count())
            .map(|device| {
                t.gpu(device).run((), move |dev, ()| {
                    let mut x = dev.zeros::<f32>(1000 * (device + 1))?;
                    dev.fill(&mut x, 1.0)?;
                    Ok(dev.download(&dev.sum(&x)?)?[0])
                })
            })
            .collect();
        sums.iter().map(|sum| t.get(sum)).collect::<gpu_pool::Result<Vec<_>>>()
    })?;
    let n = pool.device_count();
    check("a task on each device", total(sums), (1000 * n * (n + 1) / 2) as f64, out)?;

    // Scenario 3: several threads of the program use all devices at the same time.
    let state = &state;
    let sums = thread::scope(|scope| {
        let sum = move || pool.run(|dev, _| Ok(dev.download(&dev.sum(&*state.borrow(dev)?)?)?[0]));
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(sum)).collect();
        threads.into_iter().map(|thread| thread.join().ok().context("a thread panicked")?.map_err(Into::into)).collect()
    });
    let sums: Result<Vec<Vec<f32>>> = sums;
    check("four threads", total(sums?.concat()), 4.0 * expected, out)
}

/// Compares a sum with the expected one, and prints it.
pub fn check(what: &str, sum: f64, expected: f64, out: &mut (dyn Write + Send)) -> Result<()> {
    ensure!((sum - expected).abs() <= 1e-6 * expected, "{what}: {sum} instead of {expected}");
    writeln!(out, "{what}: {sum}")?;
    Ok(())
}
