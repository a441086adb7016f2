//! Training: one scope per epoch, in which every device takes its shard of each batch.

use crate::{
    data::{Digits, PIXELS},
    model::{Replica, StepTimes, initial_weights},
    rng::Rng,
};
use anyhow::{Context, Result, ensure};
use gpu_pool::{GpuPool, Shard};
use gpu_pool_cluster::prelude::*;
use std::{
    ops::Range,
    time::{Duration, Instant},
};

const WEIGHTS_SEED: u64 = 42;
const SHUFFLE_SEED: u64 = 1000;

/// How to train.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub epochs: usize,
    /// Rows of a batch, over all devices.
    pub batch: usize,
    pub lr: f32,
}

/// The work of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceTotals {
    pub name: String,
    pub rows: usize,
    pub compute: Duration,
    pub exchange: Duration,
    /// Bytes.
    pub memory_peak: u64,
}

/// The state of training after an epoch.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Mean cross-entropy of the epoch's rows.
    pub loss: f64,
    /// The fraction of held-out images that are classified correctly.
    pub accuracy: f64,
    pub rows_per_second: f64,
}

/// The result of a training run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Mean cross-entropy of every step's batch.
    pub step_losses: Vec<f64>,
    /// Accuracy after every epoch.
    pub accuracies: Vec<f64>,
    /// The mean loss of the last epoch.
    pub loss: f64,
    /// The weights of every device.
    pub weights: Vec<Vec<f32>>,
    pub devices: Vec<DeviceTotals>,
    pub elapsed: Duration,
}

impl Outcome {
    pub fn accuracy(&self) -> f64 {
        self.accuracies.last().copied().unwrap_or(0.0)
    }

    pub fn rows_per_second(&self) -> f64 {
        let rows: usize = self.devices.iter().map(|device| device.rows).sum();
        rows as f64 / self.elapsed.as_secs_f64()
    }
}

/// One device's part of an epoch.
#[derive(serde::Serialize, serde::Deserialize)]
struct Part {
    device: String,
    /// Sums of the cross-entropy over the device's rows, by step.
    losses: Vec<f64>,
    correct: usize,
    rows: usize,
    compute: Duration,
    exchange: Duration,
    memory_peak: u64,
}

/// The batches of `rows` rows; the last one is the remainder.
fn batches(rows: usize, batch: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(batch).map(move |start| start..start.saturating_add(batch).min(rows))
}

/// Rows of one epoch that a device gets.
fn rows_of(shard: &Shard, rows: usize, batch: usize) -> usize {
    batches(rows, batch).map(|range| shard.range(range.len()).len()).sum()
}

/// Trains on all devices of the pool, and of the pools of the other processes, if there are some: each gets the whole
/// outcome. Every run starts from the same weights and uses the same order.
pub fn train(pool: &GpuPool, data: &Digits, set: Settings, mut tell: impl FnMut(Progress)) -> Result<Outcome> {
    let rows = data.train.len();
    let weights = initial_weights(WEIGHTS_SEED);
    let mut replicas = pool
        .per_device(|dev, _| {
            let world = dev.world()?;
            let shard = world.shard();
            Replica::new(&world, &shard, &weights, &data.held_out, rows_of(&shard, rows, set.batch))
        })
        .context("cannot put the model on the devices")?;

    let mut shuffle = Rng::new(SHUFFLE_SEED);
    let mut order: Vec<usize> = (0..rows).collect();
    let names: Vec<String> = pool.report().devices.into_iter().map(|info| info.name).collect();
    let mut outcome = Outcome::default();
    let start = Instant::now();
    for epoch in 1..=set.epochs {
        shuffle.shuffle(&mut order);
        let images = data.train.pick(&order);
        let parts = replicas
            .run(|dev, own, replica| {
                let world = dev.world()?;
                let shard = world.shard();
                let mut steps = Vec::new();
                for batch in batches(rows, set.batch) {
                    let pixels = shard.rows(&images.pixels[batch.start * PIXELS..batch.end * PIXELS], PIXELS);
                    let labels = shard.of(&images.labels[batch.clone()]);
                    steps.push(replica.step(dev, pixels, labels, batch.len(), set.lr)?);
                }
                // The host waits only here: the steps above are queued while the device works.
                dev.synchronize()?;
                let losses = replica.take_losses(dev)?;
                let correct = replica.correct(dev)?;
                let rows = losses.len();
                let (compute, exchange) = times(&steps)?;
                let losses = by_step(&losses, batches(images.len(), set.batch).map(|b| shard.range(b.len()).len()));
                let (device, memory_peak) = (names[own.index()].clone(), dev.stats().peak);
                world.exchange_serde(&Part { device, losses, correct, rows, compute, exchange, memory_peak })
            })
            .with_context(|| format!("epoch {epoch} failed"))?;

        // Each device has the parts of all.
        let progress = gather(&mut outcome, &parts[0], data, set.batch);
        outcome.elapsed = start.elapsed();
        ensure!(
            progress.0.is_finite(),
            "the loss became {} in epoch {epoch}: training diverged, try a smaller --lr than {}",
            progress.0,
            set.lr
        );
        let (loss, accuracy) = progress;
        tell(Progress { loss, accuracy, rows_per_second: outcome.rows_per_second() });
    }
    let weights = replicas.run(|dev, _, replica| dev.world()?.exchange_serde(&replica.weights(dev)?));
    outcome.weights = weights.context("cannot read the weights back")?.swap_remove(0);
    Ok(outcome)
}

/// Adds the devices' parts of an epoch to the outcome; returns its mean loss and the accuracy after it.
fn gather(outcome: &mut Outcome, parts: &[Part], data: &Digits, batch: usize) -> (f64, f64) {
    let mut total = 0.0;
    for (step, range) in batches(data.train.len(), batch).enumerate() {
        // In device order, so that the curve is the same in every run, too.
        let sum: f64 = parts.iter().map(|part| part.losses[step]).sum();
        outcome.step_losses.push(sum / range.len() as f64);
        total += sum;
    }
    outcome.devices.resize_with(parts.len(), DeviceTotals::default);
    for (device, part) in outcome.devices.iter_mut().zip(parts) {
        device.name.clone_from(&part.device);
        device.rows += part.rows;
        device.compute += part.compute;
        device.exchange += part.exchange;
        device.memory_peak = part.memory_peak;
    }
    let correct: usize = parts.iter().map(|part| part.correct).sum();
    let accuracy = correct as f64 / data.held_out.len() as f64;
    outcome.accuracies.push(accuracy);
    outcome.loss = total / data.train.len() as f64;
    (outcome.loss, accuracy)
}

/// Sums of consecutive pieces of `losses`.
fn by_step(mut losses: &[f32], lengths: impl Iterator<Item = usize>) -> Vec<f64> {
    lengths
        .map(|len| {
            let (step, rest) = losses.split_at(len);
            losses = rest;
            step.iter().copied().map(f64::from).sum()
        })
        .collect()
}

/// The time in forward, backward and update, and the exposed time of the exchange (which includes waiting for the
/// slowest device).
fn times(steps: &[StepTimes]) -> gpu_pool::Result<(Duration, Duration)> {
    let (mut compute, mut exchange) = (Duration::ZERO, Duration::ZERO);
    for step in steps {
        compute += step.computed.elapsed_since(&step.uploaded)? + step.updated.elapsed_since(&step.exchanged)?;
        exchange += step.exchanged.elapsed_since(&step.computed)?;
    }
    Ok((compute, exchange))
}
