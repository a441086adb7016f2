//! The model: a perceptron 64-128-10 with ReLU and cross-entropy. One replica lives on each device.

use crate::{
    data::{CLASSES, Images, PIXELS},
    rng::Rng,
};
use gpu_pool::{Device, DeviceBuffer, Event, Group, Matrix, ReduceOp, Result, Shard, gradients::GradientExchange};
use gpu_pool_train::{Activation, prelude::*};
use std::ops::Range;

/// Neurons of the hidden layer.
pub const HIDDEN: usize = 128;

// All parameters lie in one buffer. Their gradients lie in the buckets of an exchange, under these numbers.
const W1: Range<usize> = 0..PIXELS * HIDDEN;
const B1: Range<usize> = W1.end..W1.end + HIDDEN;
const W2: Range<usize> = B1.end..B1.end + HIDDEN * CLASSES;
const B2: Range<usize> = W2.end..W2.end + CLASSES;
/// Parameters of the model.
pub const PARAMETERS: usize = B2.end;
/// In the order of the forward pass.
const LAYOUT: [Range<usize>; 4] = [W1, B1, W2, B2];
const DW1: usize = 0;
const DB1: usize = 1;
const DW2: usize = 2;
const DB2: usize = 3;

/// Initial weights: uniform (He, 2015) from a fixed seed; biases 0.
pub fn initial_weights(seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    let mut weights = vec![0.0; PARAMETERS];
    for (layer, inputs) in [(W1, PIXELS), (W2, HIDDEN)] {
        let limit = (6.0 / inputs as f32).sqrt();
        weights[layer].iter_mut().for_each(|w| *w = rng.symmetric(limit));
    }
    weights
}

/// The state of a device from scope to scope.
pub struct Replica {
    weights: DeviceBuffer<f32>,
    gradients: GradientExchange,
    /// The cross-entropy of every row of this device's shards in the current epoch.
    losses: DeviceBuffer<f32>,
    rows_done: usize,
    held_out: (DeviceBuffer<f32>, Vec<i32>),
}

/// Events of a step, recorded on the device.
pub struct StepTimes {
    /// The shard is on the device.
    pub uploaded: Event,
    /// This device's gradients are computed; some of them are being exchanged already.
    pub computed: Event,
    /// The gradients are exchanged.
    pub exchanged: Event,
    /// The weights are updated.
    pub updated: Event,
}

/// Uninitialised memory for an operation that writes all of it.
fn room(dev: &Device, len: usize) -> Result<DeviceBuffer<f32>> {
    // SAFETY: every caller passes it first to a product with beta = 0, which writes each element.
    unsafe { dev.uninit(len) }
}

/// The hidden layer and the logits.
pub fn forward(
    dev: &Device,
    weights: &DeviceBuffer<f32>,
    x: &DeviceBuffer<f32>,
    rows: usize,
) -> Result<(DeviceBuffer<f32>, DeviceBuffer<f32>)> {
    let (w1, w2) = (weights.slice(W1), weights.slice(W2));
    let mut h = room(dev, rows * HIDDEN)?;
    dev.gemm(1.0, Matrix::new(x, rows, PIXELS)?, Matrix::new(&w1, PIXELS, HIDDEN)?, 0.0, &mut h)?;
    dev.activation_in_place(Activation::Relu.biased(&weights.slice(B1)), &mut h)?;

    let mut logits = room(dev, rows * CLASSES)?;
    dev.gemm(1.0, Matrix::new(&h, rows, HIDDEN)?, Matrix::new(&w2, HIDDEN, CLASSES)?, 0.0, &mut logits)?;
    dev.activation_in_place(Activation::Identity.biased(&weights.slice(B2)), &mut logits)?;
    Ok((h, logits))
}

impl Replica {
    /// Makes a replica: equal weights on all devices of the world, this device's shard of the held-out images, and room
    /// for `rows` losses.
    pub fn new(world: &Group<'_>, shard: &Shard, weights: &[f32], held_out: &Images, rows: usize) -> Result<Replica> {
        let dev = world.device();
        // Each device scales by the rows of the whole batch, so the sum is the mean over rows, not over devices. One
        // bucket per layer, which is much too small: so there is something to overlap.
        let exchange = GradientExchange::builder().reduce(ReduceOp::Sum).first_bucket_bytes(4 << 10);
        Ok(Replica {
            weights: dev.upload(weights)?,
            gradients: exchange.build_in(world, &LAYOUT.map(|range| range.len()))?,
            losses: dev.zeros(rows)?,
            rows_done: 0,
            held_out: (dev.upload(shard.rows(&held_out.pixels, PIXELS))?, shard.of(&held_out.labels).to_vec()),
        })
    }

    /// One step of stochastic gradient descent on this device's shard of a batch of `batch` rows. Does not wait.
    pub fn step(&mut self, dev: &Device, pixels: &[f32], labels: &[i32], batch: usize, lr: f32) -> Result<StepTimes> {
        let x = dev.upload(pixels)?;
        let labels = dev.upload(labels)?;
        let uploaded = dev.record_timed()?;
        if labels.is_empty() {
            // The last batch may have fewer rows than there are devices: then this device has no gradient.
            self.gradients.nothing();
        } else {
            self.gradients(dev, &x, &labels, batch)?;
        }
        let computed = dev.record_timed()?;
        self.gradients.finish(dev)?;
        let exchanged = dev.record_timed()?;
        for (gradient, range) in LAYOUT.into_iter().enumerate() {
            dev.axpy(-lr, &self.gradients.grad(gradient)?, &mut self.weights.slice_mut(range))?;
        }
        Ok(StepTimes { uploaded, computed, exchanged, updated: dev.record_timed()? })
    }

    /// Forward and backward pass. Appends the losses of the rows. The exchange of the second layer's gradients begins
    /// before the first layer's are computed.
    fn gradients(
        &mut self,
        dev: &Device,
        x: &DeviceBuffer<f32>,
        labels: &DeviceBuffer<i32>,
        batch: usize,
    ) -> Result<()> {
        let rows = labels.len();
        let (h, logits) = forward(dev, &self.weights, x, rows)?;
        let (losses, dlogits) = dev.cross_entropy(&logits, labels, 1.0 / batch as f32)?;
        dev.copy(&losses, &mut self.losses.slice_mut(self.rows_done..self.rows_done + rows))?;
        self.rows_done += rows;

        let (xm, hm) = (Matrix::new(x, rows, PIXELS)?, Matrix::new(&h, rows, HIDDEN)?);
        let dlm = Matrix::new(&dlogits, rows, CLASSES)?;
        dev.column_sum_into(&dlogits, &mut self.gradients.grad_mut(DB2)?)?;
        self.gradients.ready(dev, DB2)?;
        dev.gemm(1.0, hm.t(), dlm, 0.0, &mut self.gradients.grad_mut(DW2)?)?;
        self.gradients.ready(dev, DW2)?;

        let mut dh = room(dev, rows * HIDDEN)?;
        let w2 = self.weights.slice(W2);
        dev.gemm(1.0, dlm, Matrix::new(&w2, HIDDEN, CLASSES)?.t(), 0.0, &mut dh)?;
        dev.activation_backward_in_place(Activation::Relu, &mut dh, &h)?;
        dev.column_sum_into(&dh, &mut self.gradients.grad_mut(DB1)?)?;
        self.gradients.ready(dev, DB1)?;
        dev.gemm(1.0, xm.t(), Matrix::new(&dh, rows, HIDDEN)?, 0.0, &mut self.gradients.grad_mut(DW1)?)?;
        self.gradients.ready(dev, DW1)
    }

    /// Number of this device's held-out images that it classifies correctly. Waits.
    pub fn correct(&self, dev: &Device) -> Result<usize> {
        let (x, labels) = &self.held_out;
        let rows = labels.len();
        if rows == 0 {
            return Ok(0);
        }
        let (_, logits) = forward(dev, &self.weights, x, rows)?;
        let best = dev.download(&dev.argmax(&logits, CLASSES)?)?;
        Ok(best.iter().zip(labels).filter(|(best, label)| **best as i32 == **label).count())
    }

    /// The losses of the rows since the last call. Waits.
    pub fn take_losses(&mut self, dev: &Device) -> Result<Vec<f32>> {
        let rows = std::mem::take(&mut self.rows_done);
        dev.download(&self.losses.slice(..rows))
    }

    /// The weights, on the host. Waits.
    pub fn weights(&self, dev: &Device) -> Result<Vec<f32>> {
        dev.download(&self.weights)
    }
}
