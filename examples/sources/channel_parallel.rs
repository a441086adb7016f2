//! D2L's channel parallel: data parallel and model parallel at the same time, on a grid of 2 x 2 devices.
//!
//! `cargo run --release --example channel_parallel`. It uses the first four GPUs, else four software GPUs. Each row of
//! the grid has a replica of the model: one half on each of its devices, as in `model_parallel.rs`. Each column has the
//! same half, whose gradients are summed, as in `data_parallel.rs`.

use anyhow::{Result, ensure};
use gpu_pool::{DeviceBuffer as Buffer, GpuPool, Matrix};
use gpu_pool_train::{DataParallel, Model, Optimizer};
use std::io::{Write, stdout};

const ROWS: usize = 90;
const INPUTS: usize = 8;
const HIDDEN: usize = 16;
const OUTPUTS: usize = 2;

/// The first or the second half of `x w1 w2`.
struct Half(Buffer<f32>);

impl Model for Half {
    fn parameters(&mut self) -> Vec<&mut Buffer<f32>> {
        vec![&mut self.0]
    }
}

/// Numbers from -1 to 1.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let hash = |i: u32| (i + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 8;
    (0..len as u32).map(|i| hash(i) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn main() -> Result<()> {
    let grid = GpuPool::builder().devices(&[0, 1, 2, 3]).build()?;
    run(&grid, &GpuPool::builder().devices(&[0, 1]).build()?, &mut stdout(), 50)
}

/// Trains on a grid of two columns, and on one row of it; prints the losses.
pub fn run(grid: &GpuPool, row: &GpuPool, out: &mut (dyn Write + Send), steps: usize) -> Result<()> {
    let (found, expected) = (train(grid, steps)?, train(row, steps)?);
    for (step, loss) in found.iter().enumerate().step_by(10) {
        writeln!(out, "step {step}: loss {loss:.4}")?;
    }
    check(&found, &expected)?;
    writeln!(out, "{} devices learn as {} do", grid.device_count(), row.device_count())?;
    Ok(())
}

/// The losses of a training with two devices for each replica.
fn train(pool: &GpuPool, steps: usize) -> gpu_pool::Result<Vec<f32>> {
    let (x, target) = (numbers(ROWS * INPUTS, 1), numbers(ROWS * OUTPUTS, 2));
    let replicas = pool.device_count() / 2;
    let column = |rank: usize| (0..replicas).map(|replica| 2 * replica + rank % 2).collect::<Vec<_>>();
    let mut model = DataParallel::new_in(
        pool,
        |dev| dev.group(&column(dev.rank())),
        Optimizer::sgd(0.2),
        |dev| match dev.rank() % 2 {
            0 => Ok(Half(dev.upload(&numbers(INPUTS * HIDDEN, 3))?)),
            _ => Ok(Half(dev.upload(&numbers(HIDDEN * OUTPUTS, 4))?)),
        },
    )?;
    let step = |_| {
        let losses = model.step(ROWS, |dev, shard, Half(w), gradients| {
            let rows = shard.range(ROWS).len(); // of this replica
            if dev.rank() % 2 == 0 {
                let (x, partner) = (dev.upload(shard.rows(&x, INPUTS))?, dev.rank() + 1);
                let x = Matrix::new(&x, rows, INPUTS)?;
                dev.give(dev.matmul(x, Matrix::new(w, INPUTS, HIDDEN)?)?, partner, 0)?;
                let dh = dev.take::<Buffer<f32>>(partner, 0)?.copy_to(dev)?;
                gradients.write(0, |dw| dev.gemm(1.0, x.t(), Matrix::new(&dh, rows, HIDDEN)?, 0.0, dw))?;
                return Ok(0.0);
            }
            let partner = dev.rank() - 1;
            let h = dev.take::<Buffer<f32>>(partner, 0)?.copy_to(dev)?;
            let (h, w) = (Matrix::new(&h, rows, HIDDEN)?, Matrix::new(w, HIDDEN, OUTPUTS)?);
            // The gradient of half the squared error: the output minus the target.
            let (mut dy, mut dh) = (dev.upload(shard.rows(&target, OUTPUTS))?, dev.zeros(rows * HIDDEN)?);
            dev.gemm(1.0, h, w, -1.0, &mut dy)?;
            let (loss, dy) = (dev.dot(&dy, &dy)?, Matrix::new(&dy, rows, OUTPUTS)?);
            dev.gemm(gradients.scale, dy, w.t(), 0.0, &mut dh)?;
            dev.give(dh, partner, 0)?;
            let scale = gradients.scale;
            gradients.write(0, |dw| dev.gemm(scale, h.t(), dy, 0.0, dw))?;
            Ok(dev.download(&loss)?[0] / (2 * ROWS) as f32)
        })?;
        Ok(losses.iter().sum())
    };
    (0..steps).map(step).collect()
}

/// Both learn alike: the order of sums differs, and so the last bits. The loss falls.
pub fn check(found: &[f32], expected: &[f32]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} and {} steps", found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        ensure!((found - expected).abs() < 1e-3 * expected, "step {step}: {found} instead of {expected}");
    }
    ensure!(found[found.len() - 1] < 0.5 * found[0], "the loss does not fall: {found:?}");
    Ok(())
}
