//! D2L, "Automatic Parallelism": results are copied to the CPU while the next ones are computed.
//!
//! `cargo run --release --example copy_while_computing`. It uses the first GPU with matrices of 4000 x 4000, else a
//! software GPU with matrices of 500 x 500. A copy waits, on the device, for the products before it, and runs beside
//! the next one, since it is on a stream of its own.

use anyhow::{Result, ensure};
use gpu_pool::{Device, DeviceBuffer, GpuPool, Matrix, PinnedBuffer};
use gpu_pool_train::prelude::*;
use std::{
    io::{Write, stdout},
    time::Instant,
};

fn product(dev: &Device, x: &DeviceBuffer<f32>, n: usize) -> gpu_pool::Result<DeviceBuffer<f32>> {
    let x = Matrix::new(x, n, n)?;
    dev.matmul(x, x)
}

fn main() -> Result<()> {
    let pool = GpuPool::builder().devices(&[0]).build()?;
    let is_software = pool.report().devices[0].compute_capability == (0, 0);
    run(&pool, &mut stdout(), if is_software { 500 } else { 4000 }, 50)
}

/// `count` products of `n` x `n` matrices.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), n: usize, count: usize) -> Result<()> {
    let mut overlapped = (0..count).map(|_| pool.pinned::<f32>(n * n)).collect::<Result<Vec<_>, _>>()?;
    let (times, y_cpu) = pool
        .on(&[0])
        .with(vec![&mut overlapped])
        .run(|dev, _, overlapped| {
            let mut x = dev.zeros::<f32>(n * n)?;
            dev.uniform(&mut x, 0.0..1.0, 1, 0)?;
            (0..count).try_for_each(|_| product(dev, &x, n).map(drop))?; // The device warms up.
            dev.synchronize()?;

            let start = Instant::now();
            let y = (0..count).map(|_| product(dev, &x, n)).collect::<gpu_pool::Result<Vec<_>>>()?;
            dev.synchronize()?;
            let computed = start.elapsed();

            let start = Instant::now();
            let y_cpu = y.iter().map(|y| dev.download(y)).collect::<gpu_pool::Result<Vec<_>>>()?;
            let copied = start.elapsed();
            drop(y);

            let (start, side, mut y) = (Instant::now(), dev.stream()?, Vec::new());
            for y_cpu in overlapped.iter_mut() {
                // A copy waits for all products that were submitted before it. So it is submitted behind its own.
                y.push(product(dev, &x, n)?);
                dev.on(&side).download_pinned(&y[y.len() - 1], y_cpu)?;
            }
            dev.on(&side).synchronize()?;
            Ok(([computed, copied, start.elapsed()], y_cpu))
        })?
        .remove(0);
    for (what, time) in ["Run on GPU1", "Copy to CPU", "Run on GPU1 and copy to CPU"].iter().zip(times) {
        writeln!(out, "{what}: {:.4} sec", time.as_secs_f64())?;
    }
    check(&y_cpu, &overlapped)
}

/// Compares the results of both ways.
pub fn check(copied: &[Vec<f32>], overlapped: &[PinnedBuffer<f32>]) -> Result<()> {
    ensure!(copied.len() == overlapped.len() && copied.iter().flatten().any(|y| *y != 0.0), "results are missing");
    for (i, (copied, overlapped)) in copied.iter().zip(overlapped).enumerate() {
        ensure!(copied == overlapped.as_slice()?, "result {i} was copied before it was computed");
    }
    Ok(())
}
