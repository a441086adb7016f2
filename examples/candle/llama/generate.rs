//! A model of Llama's shape writes on all devices, tensor parallel, in threads of one process.
//!
//! ```sh
//! cargo run --release --example candle_llama                                    # a small model with random weights
//! GPU_POOL_BACKEND=host:3 cargo run --release --example candle_llama
//! ```
//!
//! It writes the weights to a safetensors file, maps the file into memory, and each device reads its own parts. Then
//! one device, and all devices, continue the same words; they must write the same.

#[path = "model.rs"]
mod model;

use anyhow::{Result, ensure};
use candle_core::DType;
use gpu_pool::GpuPool;
use gpu_pool_candle::{Parts, enter};
use model::{Cache, Model, SMALL};
use std::time::Instant;

const LENGTH: usize = 48;

/// The words that these devices write after a prompt; bytes of tensors of a device; and seconds to load and to write.
fn write(pool: &GpuPool, devices: &[usize], parts: &Parts, prompt: &[u32]) -> Result<(Vec<u32>, [f64; 2])> {
    let mut found = pool.on(devices).try_run(|dev, _| {
        enter(dev, |device| {
            let start = Instant::now();
            let model = Model::load(dev, &SMALL, &parts.builder(DType::F32, device))?;
            let (loaded, start) = (start.elapsed(), Instant::now());
            let mut sequence = [(prompt.to_vec(), Cache::default())];
            let mut words = Vec::new();
            while words.len() < LENGTH {
                let next = model.step(&mut sequence, device)?[0];
                words.push(next);
                sequence[0].0 = vec![next];
            }
            Ok((words, [loaded.as_secs_f64(), start.elapsed().as_secs_f64()]))
        })
    })?;
    ensure!(found.iter().all(|(words, _)| *words == found[0].0), "the devices disagree");
    Ok(found.swap_remove(0))
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    SMALL.write(&file)?;
    // SAFETY: only this program knows the file.
    let parts = unsafe { Parts::mapped(&[&file])? };
    let pool = GpuPool::global()?;
    let all: Vec<usize> = (0..pool.device_count()).collect();
    let prompt = [1, 2, 3, 5, 8, 13, 21];
    let (alone, [loaded, wrote]) = write(pool, &[0], &parts, &prompt)?;
    println!("1 device:  loaded in {loaded:.3} s, {:.1} words/s: {alone:?}", LENGTH as f64 / wrote);
    let (together, [loaded, wrote]) = write(pool, &all, &parts, &prompt)?;
    println!("{} devices: loaded in {loaded:.3} s, {:.1} words/s", all.len(), LENGTH as f64 / wrote);
    ensure!(alone == together, "{} devices write {together:?}", all.len());
    println!("the same words");
    Ok(())
}
