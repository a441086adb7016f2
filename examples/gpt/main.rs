//! Trains a GPT-2, data parallel on all devices: `cargo run --release --example gpt`.
//!
//! On GPUs it has the shape of GPT-2 small (124 million parameters), in bf16, with copies of the parameters in f32 for
//! the optimizer; on software GPUs it is a small one, in f32. It learns the bytes of the Apache licence, which this
//! repository has.
//!
//! * `model`: the forward and the backward pass; `attention`: that of attention, by products of matrices
//! * `kernels`, `gpt.cu`: the few operations that the crate does not have
//! * `train`: replicas, gradients and the optimizer

mod attention;
mod kernels;
mod model;
mod train;

use gpu_pool::{GpuPool, Result, half::bf16};
use gpu_pool_train::{Optimizer, Parameter};
use kernels::Number;
use model::{GPT2, SMALL, Shape};
use std::time::Instant;
use train::Training;

const TEXT: &[u8] = include_bytes!("../../LICENSE-APACHE");

fn main() -> Result<()> {
    let pool = train::pool(GpuPool::builder())?;
    let gpus = pool.run(|dev, _| Ok(dev.info().compute_capability != (0, 0)))?[0];
    if gpus { learn::<bf16>(&pool, GPT2, 8, (6e-4, 60)) } else { learn::<f32>(&pool, SMALL, 2, (3e-3, 40)) }
}

/// Trains with `sequences` sequences for each device.
fn learn<T: Number + Parameter>(
    pool: &GpuPool,
    shape: Shape,
    sequences: usize,
    (rate, steps): (f64, usize),
) -> Result<()> {
    let sequences = sequences * pool.device_count();
    let optimizer = Optimizer::adam_w(rate).clip(1.0).warm_up(10);
    let mut training = Training::<T>::new(pool, shape, optimizer, sequences)?;
    let parameters: usize = shape.sizes().iter().sum();
    println!(
        "{parameters} parameters; {sequences} sequences of {} words on {} devices",
        shape.context,
        pool.device_count()
    );
    let (mut start, mut first) = (Instant::now(), f64::NAN);
    for step in 0..steps {
        training.load(&text(shape.context + 1, sequences, step))?;
        training.step()?;
        if step == 0 || (step + 1) % 10 == 0 {
            let loss = training.loss()?;
            if step == 0 {
                first = loss;
                start = Instant::now();
            }
            println!("step {:3}: loss {loss:.3}", step + 1);
        }
    }
    let words = ((steps - 1) * sequences * shape.context) as f64;
    println!("{:.0} words/s", words / start.elapsed().as_secs_f64());
    let last = training.loss()?;
    assert!(last < first - 0.5, "the loss fell from {first} to {last}");
    training.verify()
}

/// Sequences of so many bytes, from all over the text. (Byte `i` is word `i`.)
fn text(len: usize, sequences: usize, step: usize) -> Vec<u32> {
    let starts = (0..sequences).map(|sequence| (step * sequences + sequence) * 7919 % (TEXT.len() - len));
    starts.flat_map(|start| TEXT[start..start + len].iter().map(|&byte| byte.into())).collect()
}
