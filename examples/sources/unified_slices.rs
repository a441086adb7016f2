//! CUDA.jl, "Multiple GPUs", scenario 2: unified memory, of which each device works on its own slice.
//!
//! `cargo run --release --example unified_slices`. It uses all GPUs, else four software GPUs.

use anyhow::{Result, ensure};
use gpu_pool::GpuPool;
use gpu_pool_train::prelude::*;
use std::io::{Write, stdout};

/// Elements of a slice: 3 x 4 matrices, as many as there are devices.
const SLICE: usize = 3 * 4;

fn main() -> Result<()> {
    run(&GpuPool::builder().build()?, &mut stdout())
}

/// `c = a + b`.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send)) -> Result<()> {
    let len = SLICE * pool.device_count();
    let (mut a, mut b, mut c) = (pool.unified::<f32>(len)?, pool.unified::<f32>(len)?, pool.unified::<f32>(len)?);
    for (i, (a, b)) in a.as_mut_slice()?.iter_mut().zip(b.as_mut_slice()?).enumerate() {
        (*a, *b) = ((i * 37 % 101) as f32, (i * 53 % 101) as f32);
    }
    pool.with((a.rows(SLICE), b.rows(SLICE), c.rows_mut(SLICE)))
        .run(|dev, _, (a, b, mut c)| dev.add_into(&a, &b, &mut c))?;
    check(a.as_slice()?, b.as_slice()?, c.as_slice()?)?; // It has waited for all devices.
    writeln!(out, "Test Passed")?;
    Ok(())
}

/// `a + b == c`
pub fn check(a: &[f32], b: &[f32], c: &[f32]) -> Result<()> {
    ensure!(a.iter().zip(b).map(|(a, b)| a + b).eq(c.iter().copied()), "the sum is wrong");
    Ok(())
}
