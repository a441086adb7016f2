//! D2L, "Automatic Parallelism", the figure: a perceptron of two layers is trained on a CPU and two GPUs.
//!
//! `cargo run --release --example perceptron`. It uses the first two GPUs, else two software GPUs. Each GPU computes
//! the gradients of half of the batch. The CPU sums them, updates the weights, and sends them back. The program says
//! what each task reads and writes. The order follows from it: the weights of layer 2 are updated while the GPUs
//! compute the gradients of layer 1.

use anyhow::{Result, ensure};
use gpu_pool::{
    GpuPool, Matrix,
    tasks::{TaskTrace, Value},
};
use gpu_pool_train::{Activation, prelude::*};
use std::io::{Write, stdout};

const ROWS: usize = 64;
const INPUTS: usize = 8;
const HIDDEN: usize = 16;
const RATE: f32 = 0.05;

/// Numbers from -1 to 1.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let hash = |i: u32| (i + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 8;
    (0..len as u32).map(|i| hash(i) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// `w -= RATE / ROWS * (a + b)`
fn update(w: &mut [f32], a: &[f32], b: &[f32]) -> gpu_pool::Result<()> {
    w.iter_mut().zip(a.iter().zip(b)).for_each(|(w, (a, b))| *w -= RATE / ROWS as f32 * (a + b));
    Ok(())
}

fn main() -> Result<()> {
    run(&GpuPool::builder().devices(&[0, 1]).build()?, &mut stdout(), 30)
}

/// Trains, prints the losses, and compares them with those of a plain loop.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), steps: usize) -> Result<()> {
    let (batch, target, rows, trace) = (numbers(ROWS * INPUTS, 1), numbers(ROWS, 2), ROWS / 2, TaskTrace::new());
    let losses = pool.tasks(|t| {
        t.trace(&trace);
        let mut w1 = t.cpu().run((), |()| Ok(numbers(INPUTS * HIDDEN, 3)));
        let mut w2 = t.cpu().run((), |()| Ok(numbers(HIDDEN, 4)));
        let mut losses: Vec<Value<f32>> = Vec::new();
        for _ in 0..steps {
            let gradients = [0, 1].map(|i| {
                let gpu = t.gpu(i);
                let (x, y) = (&batch[i * rows * INPUTS..][..rows * INPUTS], &target[i * rows..][..rows]);
                let (w1, w2) = (gpu.named("w1").upload(&w1), gpu.named("w2").upload(&w2));
                let x = gpu.named("x").run((), move |dev, ()| dev.upload(x));
                let h = gpu.named("hidden").run((&x, &w1), move |dev, (x, w)| {
                    let mut h = dev.matmul(Matrix::new(x, rows, INPUTS)?, Matrix::new(w, INPUTS, HIDDEN)?)?;
                    dev.activation_in_place(Activation::Relu, &mut h)?;
                    Ok(h)
                });
                // The gradient of half the squared error: the output minus the target.
                let dy = gpu.named("error").run((&h, &w2), move |dev, (h, w)| {
                    let mut dy = dev.upload(y)?;
                    dev.gemm(1.0, Matrix::new(h, rows, HIDDEN)?, Matrix::new(w, HIDDEN, 1)?, -1.0, &mut dy)?;
                    Ok(dy)
                });
                let dw2 = gpu.named("gradient 2").run((&h, &dy), move |dev, (h, dy)| {
                    dev.matmul(Matrix::new(h, rows, HIDDEN)?.t(), Matrix::new(dy, rows, 1)?)
                });
                let dw2 = gpu.download(&dw2);
                let dw1 = gpu.named("gradient 1").run((&x, &h, &dy, &w2), move |dev, (x, h, dy, w)| {
                    let mut dh = dev.matmul(Matrix::new(dy, rows, 1)?, Matrix::new(w, 1, HIDDEN)?)?;
                    dev.activation_backward_in_place(Activation::Relu, &mut dh, h)?;
                    dev.matmul(Matrix::new(x, rows, INPUTS)?.t(), Matrix::new(&dh, rows, HIDDEN)?)
                });
                (gpu.download(&dw1), dw2, gpu.download(&dy))
            });
            let [(a1, a2, a), (b1, b2, b)] = &gradients;
            let cpu = t.cpu().named("update");
            let _ = cpu.run((&mut w2, a2, b2), |(w, a, b)| update(w, a.as_slice()?, b.as_slice()?));
            let _ = cpu.run((&mut w1, a1, b1), |(w, a, b)| update(w, a.as_slice()?, b.as_slice()?));
            losses.push(t.cpu().named("loss").run((a, b), |(a, b)| {
                let errors = a.as_slice()?.iter().chain(b.as_slice()?);
                Ok(errors.map(|error| error * error / 2.0).sum::<f32>() / ROWS as f32)
            }));
        }
        losses.iter().map(|loss| t.get(loss)).collect::<gpu_pool::Result<Vec<_>>>()
    })?;
    for (step, loss) in losses.iter().enumerate().step_by(10) {
        writeln!(out, "step {step}: loss {loss:.4}")?;
    }
    writeln!(out, "{} tasks", trace.len())?;
    check(&losses)
}

/// Compares the losses with a plain loop.
pub fn check(losses: &[f32]) -> Result<()> {
    let (x, target) = (numbers(ROWS * INPUTS, 1), numbers(ROWS, 2));
    let (mut w1, mut w2) = (numbers(INPUTS * HIDDEN, 3), numbers(HIDDEN, 4));
    for (step, found) in losses.iter().enumerate() {
        let (mut d1, mut d2, mut loss) = (vec![0.0; INPUTS * HIDDEN], vec![0.0; HIDDEN], 0.0);
        for (x, target) in x.chunks(INPUTS).zip(&target) {
            let sum = |j: usize| (0..INPUTS).map(|i| x[i] * w1[i * HIDDEN + j]).sum::<f32>();
            let h: Vec<f32> = (0..HIDDEN).map(|j| sum(j).max(0.0)).collect();
            let dy = (0..HIDDEN).map(|j| h[j] * w2[j]).sum::<f32>() - target;
            loss += dy * dy / 2.0 / ROWS as f32;
            for j in 0..HIDDEN {
                d2[j] += h[j] * dy;
                (0..INPUTS).filter(|_| h[j] > 0.0).for_each(|i| d1[i * HIDDEN + j] += x[i] * dy * w2[j]);
            }
        }
        ensure!((found - loss).abs() < 1e-4, "step {step}: the loss is {found} instead of {loss}");
        update(&mut w1, &d1, &vec![0.0; d1.len()])?;
        update(&mut w2, &d2, &vec![0.0; d2.len()])?;
    }
    Ok(())
}
