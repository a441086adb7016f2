//! Model parallel: the first layer of a network lives on device 0, the second on device 1.
//!
//! `cargo run --release --example model_parallel`. It uses the first two GPUs, else two software GPUs, and trains on
//! handwritten digits. Device 0 gives its activations to device 1, which gives their gradient back. One device works
//! while the other waits: `examples/pipeline.rs` cuts the batch into pieces, so that both work.

use anyhow::{Result, ensure};
use gpu_pool::{Device, DeviceBuffer as Buffer, GpuPool, Matrix};
use gpu_pool_train::{Activation, prelude::*};
use std::{
    io::{Write, read_to_string, stdout},
    sync::Arc,
};

const PIXELS: usize = 64;
const HIDDEN: usize = 128;
const CLASSES: usize = 10;
const BATCH: usize = 100;
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

fn weights(dev: &Device, len: usize, seed: u64) -> gpu_pool::Result<Buffer<f32>> {
    let mut w = dev.zeros(len)?;
    dev.normal(&mut w, 0.0, 0.1, seed, 0)?;
    Ok(w)
}

/// The first half: `relu(x w)`.
fn forward(dev: &Device, w: &Buffer<f32>, x: &Buffer<f32>) -> gpu_pool::Result<Buffer<f32>> {
    let rows = x.len() / PIXELS;
    let mut h = dev.matmul(Matrix::new(x, rows, PIXELS)?, Matrix::new(w, PIXELS, HIDDEN)?)?;
    dev.activation_in_place(Activation::Relu, &mut h)?;
    Ok(h)
}

/// The second half, forward and backward: the sum of the losses, and the gradient of `h`.
fn loss(
    dev: &Device,
    w: &mut Buffer<f32>,
    h: &Buffer<f32>,
    labels: &[u32],
) -> gpu_pool::Result<(Buffer<f32>, Buffer<f32>)> {
    let rows = labels.len();
    let h = Matrix::new(h, rows, HIDDEN)?;
    let y = dev.matmul(h, Matrix::new(&*w, HIDDEN, CLASSES)?)?;
    let (losses, dy) = dev.cross_entropy(&y, &dev.upload(labels)?, 1.0 / rows as f32)?;
    let dy = Matrix::new(&dy, rows, CLASSES)?;
    let dh = dev.matmul(dy, Matrix::new(&*w, HIDDEN, CLASSES)?.t())?;
    dev.gemm(-RATE, h.t(), dy, 1.0, w)?;
    Ok((dev.sum(&losses)?, dh))
}

/// The first half backward.
fn backward(
    dev: &Device,
    w: &mut Buffer<f32>,
    x: &Buffer<f32>,
    h: &Buffer<f32>,
    mut dh: Buffer<f32>,
) -> gpu_pool::Result<()> {
    let rows = x.len() / PIXELS;
    dev.activation_backward_in_place(Activation::Relu, &mut dh, h)?;
    dev.gemm(-RATE, Matrix::new(x, rows, PIXELS)?.t(), Matrix::new(&dh, rows, HIDDEN)?, 1.0, w)
}

fn main() -> Result<()> {
    run(&GpuPool::builder().devices(&[0, 1]).build()?, &mut stdout(), 10)
}

/// Trains on two devices, prints the loss of each epoch, and compares it with a training on one device.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), epochs: usize) -> Result<()> {
    let (pixels, labels) = digits()?;
    let batches = || (0..epochs).flat_map(|_| pixels.chunks(BATCH * PIXELS).zip(labels.chunks(BATCH)));
    let both = pool.on(&[0, 1]).run(|dev, _| {
        let mut losses = Vec::new();
        if dev.rank() == 0 {
            let mut w = weights(dev, PIXELS * HIDDEN, 1)?;
            for (x, _) in batches() {
                let x = dev.upload(x)?;
                let h = Arc::new(forward(dev, &w, &x)?);
                dev.give(h.clone(), 1, 0)?;
                let dh = dev.take::<Buffer<f32>>(1, 0)?.copy_to(dev)?;
                backward(dev, &mut w, &x, &h, dh)?;
            }
        } else {
            let mut w = weights(dev, HIDDEN * CLASSES, 2)?;
            for (_, labels) in batches() {
                let h = dev.take::<Arc<Buffer<f32>>>(0, 0)?.copy_to(dev)?;
                let (sum, dh) = loss(dev, &mut w, &h, labels)?;
                dev.give(dh, 0, 0)?;
                losses.push(sum);
            }
        }
        losses.iter().map(|sum| Ok(dev.download(sum)?[0])).collect::<gpu_pool::Result<Vec<f32>>>()
    })?;
    for (epoch, sums) in both[1].chunks(labels.len().div_ceil(BATCH)).enumerate() {
        writeln!(out, "epoch {}: loss {:.4}", epoch + 1, sums.iter().sum::<f32>() / labels.len() as f32)?;
    }
    let one = pool.on(&[0]).run(|dev, _| {
        let mut w = (weights(dev, PIXELS * HIDDEN, 1)?, weights(dev, HIDDEN * CLASSES, 2)?);
        let mut losses = Vec::new();
        for (x, labels) in batches() {
            let x = dev.upload(x)?;
            let h = forward(dev, &w.0, &x)?;
            let (sum, dh) = loss(dev, &mut w.1, &h, labels)?;
            backward(dev, &mut w.0, &x, &h, dh)?;
            losses.push(dev.download(&sum)?[0]);
        }
        Ok(losses)
    })?;
    check(&both[1], &one[0])?;
    writeln!(out, "the losses equal those of one device, bit for bit")?;
    Ok(())
}

/// The losses are the same bits, and fall.
pub fn check(two: &[f32], one: &[f32]) -> Result<()> {
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    ensure!(bits(two) == bits(one), "the losses differ from those of one device");
    let last = one.len() - 2; // The last batch may be smaller.
    ensure!(one[last] < one[0] / 2.0, "the loss does not fall: {} and {}", one[0], one[last]);
    Ok(())
}
