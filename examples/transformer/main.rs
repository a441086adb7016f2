//! A transformer block on four software GPUs: `cargo run --example transformer`.
//!
//! Two devices are one model (tensor parallel: heads, columns, rows and the vocabulary are divided; norms and residuals
//! are sequence parallel), and two models are replicas (data parallel: each has a sequence of its own, and the mean of
//! their gradients is taken). It learns two sequences of words by heart. `block.rs` has the block.
mod block;

use block::{Block, TOKENS};
use gpu_pool::GpuPool;

/// The sequences, one for each replica, with the word behind the last one.
const TEXTS: [[u32; TOKENS + 1]; 2] = [[3, 0, 10, 7, 3, 5, 1], [2, 1, 4, 8, 6, 9, 0]];

/// Numbers between -0.5 and 0.5.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

fn main() -> gpu_pool::Result<()> {
    let pool = GpuPool::builder().host(4).build()?;
    // Devices 0 and 1 are a model, 2 and 3 the other one; 0 and 2 have the same parts, and so have 1 and 3.
    let mut blocks = pool.per_device(|dev, _| {
        let first = dev.index() / 2 * 2;
        Block::new(&dev.group(&[first, first + 1])?, &block::weights())
    })?;
    for step in 1..=60 {
        let losses = blocks.run(|dev, _, block| {
            let (replica, part) = (dev.index() / 2, dev.index() % 2);
            let (model, replicas) = (dev.group(&[2 * replica, 2 * replica + 1])?, dev.group(&[part, part + 2])?);
            let (input, labels) = (TEXTS[replica].first_chunk().unwrap(), TEXTS[replica].last_chunk().unwrap());
            let loss = block.step(&model, input, labels)?;
            block.descend(&replicas, 0.3)?;
            dev.download(&loss)
        })?;
        if step % 10 == 0 || step == 1 {
            let mean = |loss: &[f64]| loss.iter().sum::<f64>() / TOKENS as f64;
            println!("step {step}: losses {:.3} and {:.3}", mean(&losses[0]), mean(&losses[2]));
        }
    }
    Ok(())
}
