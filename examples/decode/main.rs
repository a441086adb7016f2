//! Writes words with a model of Llama's shape whose layers are divided among all GPUs.
//!
//! ```sh
//! cargo run --release --example decode
//! cargo run --release --example decode -- --batch 8 --words 128 --devices 2
//! ```
//!
//! On GPUs the model has the shapes of Llama 3 8B with 8 layers, in bf16; its random weights are made on the GPUs.
//! Without GPUs a small model in f32 runs on software GPUs, in less than a second. `model` has the model, and
//! `decode.cu` the kernels.

#[allow(dead_code, reason = "the bench goes on with other prompts")]
mod model;

use anyhow::{Result, ensure};
use clap::Parser;
use gpu_pool::GpuPool;
use half::bf16;
use model::{
    Config, Decoder, LLAMA, Model, SMALL,
    kernels::{LONGEST, MODULE, Number},
};
use std::time::Instant;

/// Words before the clock runs, behind the prompt.
const WARM_UP: usize = 8;

/// Writes words with a model that all GPUs have a part of
#[derive(Debug, Parser)]
struct Options {
    /// Sequences that are written together
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Words to write for each
    #[arg(long, value_name = "N", default_value_t = 128)]
    words: usize,
    /// Words of each prompt
    #[arg(long, value_name = "N", default_value_t = 12)]
    prompt: usize,
    /// The first N devices [default: all GPUs, or all software GPUs]
    #[arg(long, value_name = "N")]
    devices: Option<usize>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.batch > 0 && options.prompt > 0 && options.words > 0, "at least one word of one sequence");
    ensure!(options.prompt + WARM_UP + options.words < LONGEST, "a sequence has less than {LONGEST} words");
    let start = Instant::now();
    let mut builder = GpuPool::builder().module(&MODULE);
    if let Some(count) = options.devices {
        builder = builder.devices(&Vec::from_iter(0..count));
    }
    let pool = builder.build()?;
    let gpu = pool.run(|dev, _| Ok(dev.info().compute_capability != (0, 0)))?[0];
    if gpu { write::<bf16>(&pool, &LLAMA, &options, start) } else { write::<f32>(&pool, &SMALL, &options, start) }
}

fn write<T: Number>(pool: &GpuPool, config: &Config, options: &Options, start: Instant) -> Result<()> {
    let (prompts, before) = (config.prompts(options.batch, options.prompt), options.prompt + WARM_UP);
    let longest = before + options.words + 1;
    let mut decoders = pool.per_device(|dev, shard| {
        let mut decoder = Decoder::<T>::new(dev, Model::new(dev, &shard, config)?, &prompts, longest)?;
        decoder.advance(dev, options.prompt)?;
        dev.synchronize()?;
        Ok(decoder)
    })?;
    println!("the first word after {:.2} s", start.elapsed().as_secs_f64());

    let found = decoders.run(|dev, _, decoder| {
        decoder.advance(dev, WARM_UP)?;
        dev.synchronize()?;
        let start = Instant::now();
        decoder.advance(dev, options.words)?;
        dev.synchronize()?;
        Ok((start.elapsed(), decoder.words(dev)?, decoder.graph()))
    })?;
    ensure!(found.iter().all(|(_, words, _)| *words == found[0].1), "the devices have other words");
    let (took, words, (operations, parts)) = &found[0];
    let rate = (options.batch * options.words) as f64 / took.as_secs_f64();
    println!("{} devices, {operations} operations a step, in {parts} parts", pool.device_count());
    println!("{:?} ..", &words[0][options.prompt..][..options.words.min(12)]);
    println!("{rate:.0} words/s, {:.0} of each of {} sequences", rate / options.batch as f64, options.batch);
    Ok(())
}
