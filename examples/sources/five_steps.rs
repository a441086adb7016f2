//! D2L's data parallel in five steps with the sum on the CPU; then with `all_reduce`, which gives the same bits.
//!
//! `cargo run --release --example five_steps`. It uses the first two GPUs, else two software GPUs, and trains softmax
//! regression on handwritten digits.

use anyhow::{Result, ensure};
use gpu_pool::{Device, DeviceBuffer as Buffer, GpuPool, Matrix, ReduceOp, collective::ReduceOrder};
use gpu_pool_train::{Activation, prelude::*};
use std::io::{Write, read_to_string, stdout};

const PIXELS: usize = 64;
const CLASSES: usize = 10;
/// Elements of the weights; the bias follows them.
const WEIGHTS: usize = PIXELS * CLASSES;
const PARAMETERS: usize = WEIGHTS + CLASSES;
const BATCH: usize = 100;
/// A power of two: a product with it is exact, so it is no matter whether a device rounds it before it adds.
const RATE: f32 = 0.5;

fn digits() -> Result<(Vec<f32>, Vec<u32>)> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for line in read_to_string(flate2::read::GzDecoder::new(&include_bytes!("../data/digits.csv.gz")[..]))?.lines() {
        let row = line.split(',').map(str::parse).collect::<Result<Vec<f32>, _>>()?;
        pixels.extend(row[..PIXELS].iter().map(|pixel| pixel / 16.0));
        labels.push(row[PIXELS] as u32);
    }
    Ok((pixels, labels))
}

fn logits(dev: &Device, parameters: &Buffer<f32>, x: &Buffer<f32>) -> gpu_pool::Result<Buffer<f32>> {
    let rows = x.len() / PIXELS;
    let w = parameters.slice(..WEIGHTS);
    let mut y = dev.matmul(Matrix::new(x, rows, PIXELS)?, Matrix::new(&w, PIXELS, CLASSES)?)?;
    dev.activation_in_place(Activation::Identity.biased(&parameters.slice(WEIGHTS..)), &mut y)?;
    Ok(y)
}

/// The gradient of the mean loss of `batch` rows, of which this device has some.
fn gradient(
    dev: &Device,
    parameters: &Buffer<f32>,
    (x, labels): (&[f32], &[u32]),
    batch: usize,
) -> gpu_pool::Result<Buffer<f32>> {
    let mut gradient = dev.zeros(PARAMETERS)?;
    if labels.is_empty() {
        return Ok(gradient);
    }
    let (x, rows) = (dev.upload(x)?, labels.len());
    let y = logits(dev, parameters, &x)?;
    let (_, dy) = dev.cross_entropy(&y, &dev.upload(labels)?, 1.0 / batch as f32)?;
    let (mut dw, mut db) = gradient.split_at_mut(WEIGHTS);
    dev.gemm(1.0, Matrix::new(&x, rows, PIXELS)?.t(), Matrix::new(&dy, rows, CLASSES)?, 0.0, &mut dw)?;
    dev.column_sum_into(&dy, &mut db)?;
    Ok(gradient)
}

fn main() -> Result<()> {
    let pool = GpuPool::builder().devices(&[0, 1]).reduce_order(ReduceOrder::Rank).build()?;
    run(&pool, &mut stdout(), 20)
}

/// Trains in both ways. The pool sums by rank.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), epochs: usize) -> Result<()> {
    let (pixels, labels) = digits()?;
    let batches = || (0..epochs).flat_map(|_| pixels.chunks(BATCH * PIXELS).zip(labels.chunks(BATCH)));

    let mut parameters = vec![0.0f32; PARAMETERS];
    for (x, labels) in batches() {
        let gradients = pool.run(|dev, shard| {
            let own = (shard.rows(x, PIXELS), shard.of(labels)); // 1: each device reads a part of the batch
            let parameters = dev.upload(&parameters)?; //           2: and the parameters,
            let g = gradient(dev, &parameters, own, labels.len())?; // 3: computes the gradient of its part,
            dev.download(&g) //                                     4: and passes it to the CPU,
        })?;
        for (i, parameter) in parameters.iter_mut().enumerate() {
            // 5: which sums the gradients and updates the parameters.
            let sum = gradients[1..].iter().fold(gradients[0][i], |sum, gradient| sum + gradient[i]);
            *parameter -= RATE * sum;
        }
    }

    let on_devices = pool.run(|dev, shard| {
        let mut parameters = dev.zeros::<f32>(PARAMETERS)?;
        for (x, labels) in batches() {
            let mut g = gradient(dev, &parameters, (shard.rows(x, PIXELS), shard.of(labels)), labels.len())?;
            dev.all_reduce(&mut g, ReduceOp::Sum)?;
            dev.axpy(-RATE, &g, &mut parameters)?;
        }
        let best = dev.download(&dev.argmax(&logits(dev, &parameters, &dev.upload(&pixels)?)?, CLASSES)?)?;
        Ok((dev.download(&parameters)?, best.iter().zip(&labels).filter(|(best, label)| best == label).count()))
    })?;
    let accuracy = on_devices[0].1 as f32 / labels.len() as f32;
    writeln!(out, "{} devices, {} rows, accuracy {accuracy:.3}", pool.device_count(), labels.len())?;
    ensure!(accuracy > 0.9, "it has learned too little");
    on_devices.iter().try_for_each(|(found, _)| check(&parameters, found))?;
    writeln!(out, "the sum on the CPU and all_reduce give the same bits")?;
    Ok(())
}

/// Compares bits.
pub fn check(on_cpu: &[f32], on_device: &[f32]) -> Result<()> {
    let same = on_cpu.iter().map(|x| x.to_bits()).eq(on_device.iter().map(|x| x.to_bits()));
    ensure!(same, "the sum on the CPU and all_reduce give different parameters");
    Ok(())
}
