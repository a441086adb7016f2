//! A convolution network of candle's that reads handwritten digits, trained on all devices.
//!
//! ```sh
//! cargo run --release --example candle_digits                     # the digits of 8 x 8 pixels in examples/data
//! cargo run --release --example candle_digits -- mnist.csv.gz     # others: pixels and a label in each line
//! ```
//!
//! Without GPUs it runs on software GPUs, whose tensors are candle's CPU tensors.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, DType, Module, Tensor};
use candle_nn::{AdamW, Conv2dConfig, Optimizer, VarBuilder, VarMap, conv2d, linear, loss};
use flate2::read::MultiGzDecoder;
use gpu_pool::{GpuPool, ReduceOp, gradients::GradientExchange};
use gpu_pool_candle::{DataParallel, enter};
use std::{io::Read, time::Instant};

const CLASSES: usize = 10;
const BATCH: usize = 50;
const STEPS: usize = 300;
const RATE: f64 = 3e-3;

/// Images with `side` x `side` pixels from 0 to 1, and their labels.
struct Images {
    side: usize,
    pixels: Vec<f32>,
    labels: Vec<u32>,
}

impl Images {
    fn read(path: &str) -> Result<Images> {
        let file = std::fs::read(path).with_context(|| format!("cannot read {path}"))?;
        let mut text = String::new();
        match file.starts_with(&[0x1f, 0x8b]) {
            true => MultiGzDecoder::new(&file[..]).read_to_string(&mut text),
            false => (&file[..]).read_to_string(&mut text),
        }
        .with_context(|| format!("cannot read {path}"))?;
        let (mut pixels, mut labels, mut columns) = (Vec::new(), Vec::new(), 0);
        for (number, line) in text.lines().filter(|line| !line.is_empty()).enumerate() {
            let line: Result<Vec<u32>, _> = line.split(',').map(|field| field.trim().parse()).collect();
            let mut line = line.with_context(|| format!("{path}: line {} has no whole number", number + 1))?;
            columns = if number == 0 { line.len() } else { columns };
            let label = line.pop().filter(|&label| (label as usize) < CLASSES && line.len() + 1 == columns);
            labels.push(label.with_context(|| format!("{path}: line {} is no image with a label", number + 1))?);
            pixels.extend(line.into_iter().map(|pixel| pixel as f32));
        }
        let side = columns.saturating_sub(1).isqrt();
        ensure!(side >= 4 && side * side + 1 == columns, "{path}: {columns} columns are no square and a label");
        ensure!(labels.len() >= 2 * BATCH, "{path}: {} images are too few", labels.len());
        let brightest = pixels.iter().copied().fold(1.0, f32::max);
        pixels.iter_mut().for_each(|pixel| *pixel /= brightest);
        Ok(Images { side, pixels, labels })
    }

    /// These rows as tensors.
    fn rows(&self, rows: &[usize], device: &candle_core::Device) -> candle_core::Result<(Tensor, Tensor)> {
        let size = self.side * self.side;
        let pixels: Vec<f32> = rows.iter().flat_map(|&row| &self.pixels[row * size..][..size]).copied().collect();
        let labels: Vec<u32> = rows.iter().map(|&row| self.labels[row]).collect();
        let x = Tensor::from_vec(pixels, (rows.len(), 1, self.side, self.side), device)?;
        Ok((x, Tensor::from_vec(labels, rows.len(), device)?))
    }
}

/// Two convolutions and a linear layer.
fn logits(weights: &VarBuilder, x: &Tensor) -> candle_core::Result<Tensor> {
    let second = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
    let first = Conv2dConfig { stride: if x.dim(3)? > 16 { 2 } else { 1 }, ..second };
    let first = conv2d(1, 8, 3, first, weights.pp("first"))?;
    let second = conv2d(8, 16, 3, second, weights.pp("second"))?;
    let x = first.forward(x)?.relu()?.max_pool2d(2)?;
    let x = second.forward(&x)?.relu()?.flatten_from(1)?;
    linear(x.dim(1)?, CLASSES, weights.pp("end"))?.forward(&x)
}

fn main() -> Result<()> {
    let path = std::env::args().nth(1);
    let data = Images::read(
        path.as_deref().unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/digits.csv.gz")),
    )?;
    // The same shuffle everywhere: multiples of a prime that does not divide the number of images.
    let (images, prime) = (data.labels.len(), 7919);
    ensure!(!images.is_multiple_of(prime), "{images} images: take one more or less");
    let order: Vec<usize> = (0..images).map(|i| i * prime % images).collect();
    let (train, held_out) = order.split_at(images * 4 / 5);

    let pool = GpuPool::global()?;
    println!("{images} images of {0} x {0} pixels, {1} devices", data.side, pool.device_count());
    let start = Instant::now();
    let found = pool.try_run(|dev, shard| {
        enter(dev, |device| {
            let weights = VarMap::new();
            let (x, _) = data.rows(&train[..1], device)?;
            logits(&VarBuilder::from_varmap(&weights, DType::F32, device), &x)?; // makes the weights
            let settings = GradientExchange::builder().reduce(ReduceOp::Scaled(1.0));
            let mut replicas = DataParallel::with(dev, &weights, settings)?;
            let mut adam = AdamW::new_lr(weights.all_vars(), RATE)?;
            let (mut losses, mut own_rows) = (Vec::new(), 0);
            for _ in 0..(STEPS * BATCH).div_ceil(train.len()) {
                let mut sum = 0.0;
                for batch in train.chunks(BATCH) {
                    let own = shard.of(batch);
                    own_rows += own.len();
                    if own.is_empty() {
                        adam.step(&replicas.step_without_rows(dev)?)?;
                        continue;
                    }
                    let (x, y) = data.rows(own, device)?;
                    replicas.set_weight(own.len() as f64 / batch.len() as f64)?; // `step` adds means over own rows up
                    let (loss, gradients) =
                        replicas.step(dev, |weights| Ok(loss::cross_entropy(&logits(&weights, &x)?, &y)?))?;
                    adam.step(&gradients)?;
                    sum += loss.to_scalar::<f32>()? * own.len() as f32;
                }
                losses.push(sum / (train.len() as f32 / shard.count() as f32));
            }
            // Each device judges its part of the held-out images.
            let (x, y) = data.rows(shard.of(held_out), device)?;
            let right = match shard.of(held_out) {
                [] => 0.0,
                _ => {
                    let guess =
                        logits(&VarBuilder::from_varmap(&weights, DType::F32, device), &x)?.argmax(D::Minus1)?;
                    guess.eq(&y)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?
                }
            };
            Ok((losses, own_rows, right))
        })
    })?;
    for (device, (losses, rows, _)) in found.iter().enumerate() {
        println!("device {device}: {rows} rows; loss by epoch {losses:.3?}");
    }
    let right = found.iter().map(|(.., right)| right).sum::<f32>() / held_out.len() as f32;
    println!("{:.1} % of {} held-out images are right, after {:.1?}", right * 100.0, held_out.len(), start.elapsed());
    if right < 0.9 {
        bail!("it has not learnt to read");
    }
    Ok(())
}
