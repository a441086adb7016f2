//! D2L, "Automatic Parallelism": a series of 50 matrix products on one device, on the other, and on both in parallel.
//!
//! `cargo run --release --example two_series`. It uses the first two GPUs with matrices of 4000 x 4000, else two
//! software GPUs with matrices of 500 x 500. The two series do not depend on each other. So they run in parallel,
//! and nothing in the program says so. (Software GPUs share the CPU: both in parallel take as long as one after the
//! other.)

use anyhow::{Result, ensure};
use gpu_pool::{
    Device, DeviceBuffer, GpuPool, Matrix,
    tasks::{Tasks, Value},
};
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
    let pool = GpuPool::builder().devices(&[0, 1]).build()?;
    let is_software = pool.report().devices[0].compute_capability == (0, 0);
    run(&pool, &mut stdout(), if is_software { 500 } else { 4000 }, 50)
}

/// Series of `count` products of `n` x `n` matrices.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), n: usize, count: usize) -> Result<()> {
    let (x, alone, at_once) = pool.tasks(|t| {
        let x: [_; 2] = [0, 1].map(|i| {
            t.gpu(i).run((), move |dev, ()| {
                let mut x = dev.zeros::<f32>(n * n)?;
                dev.uniform(&mut x, 0.0..1.0, i as u64, 0)?;
                Ok(x)
            })
        });
        let series = |i: usize| -> Vec<_> {
            (0..count).map(|_| t.gpu(i).run((&x[i],), move |dev, (x,)| product(dev, x, n))).collect()
        };
        let mut benchmark = |what: &str, devices: &[usize]| -> gpu_pool::Result<Vec<_>> {
            let start = Instant::now();
            let results: Vec<_> = devices.iter().map(|&i| series(i)).collect();
            results.iter().try_for_each(|results| synchronize(t, results))?;
            let _ = writeln!(out, "{what}: {:.4} sec", start.elapsed().as_secs_f64());
            devices.iter().zip(&results).map(|(&i, y)| t.get(&t.gpu(i).run((&y[count - 1],), download))).collect()
        };
        [0, 1].iter().try_for_each(|&i| synchronize(t, &series(i)))?; // The devices warm up.
        let alone = [benchmark("GPU1 time", &[0])?, benchmark("GPU2 time", &[1])?].concat();
        let at_once = benchmark("GPU1 & GPU2", &[0, 1])?;
        let x = [0, 1].map(|i| t.gpu(i).run((&x[i],), download));
        Ok(([t.get(&x[0])?, t.get(&x[1])?], alone, at_once))
    })?;
    (0..2).try_for_each(|i| check(&x[i], n, &alone[i], &at_once[i]))
}

fn download(dev: &Device, (x,): (&DeviceBuffer<f32>,)) -> gpu_pool::Result<Vec<f32>> {
    dev.download(x)
}

/// Waits until the devices have computed these.
fn synchronize(t: &Tasks<'_, '_>, results: &[Value<DeviceBuffer<f32>>]) -> gpu_pool::Result<()> {
    results.iter().try_for_each(|result| t.read(result, |_| ()))
}

/// Compares the products of both runs, and one row with a plain loop.
pub fn check(x: &[f32], n: usize, alone: &[f32], at_once: &[f32]) -> Result<()> {
    ensure!(alone == at_once, "two series at once give other products than one");
    for j in 0..n {
        let expected: f64 = (0..n).map(|k| f64::from(x[k]) * f64::from(x[k * n + j])).sum();
        ensure!((f64::from(alone[j]) - expected).abs() < 1e-4 * expected, "{} instead of {expected}", alone[j]);
    }
    Ok(())
}
