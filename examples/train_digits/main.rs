//! Trains a perceptron on handwritten digits, data parallel on all devices of a pool.
//!
//! ```sh
//! cargo run --release --example train_digits
//! cargo run --release --example train_digits -- --backend host --devices 8 --check --plot loss.png
//! ```
//!
//! Every batch is sharded over the devices. Each device has a replica of the model in a `PerDevice` and computes the
//! gradients of its rows. It exchanges them in buckets during the backward pass, weighted by rows, since the last batch
//! is uneven. Then all devices take the same step, so the replicas stay equal bit for bit. The parts:
//!
//! * `data`: the digits, read and split; `rng`: the seeded generator for everything random
//! * `model`: a replica; `train`: the loop
//! * `report`, `plot`: output for the user

mod data;
mod model;
mod plot;
mod report;
mod rng;
mod train;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use data::Digits;
use gpu_pool::GpuPool;
use std::{
    io::{Write, stdout},
    path::PathBuf,
    process::ExitCode,
};
use train::{Outcome, Settings};

/// The accuracy on held-out images that `--check` demands.
const ACCURACY: f64 = 0.97;

/// Trains a 64-128-10 perceptron on handwritten digits, data parallel on all devices.
#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct Options {
    /// Number of devices: the first N GPUs, or N software GPUs [default: all GPUs, or 4 software GPUs]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    devices: Option<usize>,
    /// What to train on; auto takes GPUs where there are some
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    backend: Kind,
    /// Passes over the training data
    #[arg(long, value_name = "N", default_value_t = 60, allow_negative_numbers = true)]
    epochs: usize,
    /// Rows of a batch, over all devices
    #[arg(long, value_name = "ROWS", default_value_t = 100, allow_negative_numbers = true)]
    batch: usize,
    /// Learning rate
    #[arg(long, value_name = "RATE", default_value_t = 0.2, allow_negative_numbers = true)]
    lr: f32,
    /// CSV file, gzipped or not, of 64 pixels (0 to 16) and a label (0 to 9) [default: the digits that come along]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Draws the loss curve to FILE.svg or FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Verifies equal bits on all devices, trains again and compares the bits, demands an accuracy of 0.97
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Auto,
    Cuda,
    Host,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is gone, too, nothing can be done.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let Options { epochs, batch, lr, .. } = *options;
    ensure!(options.devices != Some(0), "--devices 0: at least one device is needed");
    ensure!(epochs > 0, "--epochs 0: at least one epoch is needed");
    ensure!(batch > 0, "--batch 0: a batch has at least one row");
    ensure!(lr.is_finite() && lr > 0.0, "--lr {lr}: the learning rate must be a positive number");
    options.plot.as_deref().map(plot::check).transpose()?;

    let data = Digits::load(options.data.as_deref())?;
    let enough_rows = |devices: usize| {
        ensure!(devices <= data.train.len(), "{devices} devices are more than the {} training rows", data.train.len());
        ensure!(devices <= batch, "{devices} devices are more than the {batch} rows of a batch: each should get a row");
        Ok(())
    };
    options.devices.map(enough_rows).transpose()?;
    let pool = build(options)?;
    enough_rows(pool.devices())?;

    let set = Settings { epochs, batch, lr };
    let mut out = stdout();
    writeln!(
        out,
        "{} training rows, {} held out; {} parameters; {} x {}",
        data.train.len(),
        data.held_out.len(),
        model::PARAMETERS,
        pool.devices(),
        pool.report().devices[0].name
    )?;
    let outcome = shown(&pool, &data, set, "training")?;
    pool.close().context("the devices did not end well")?;

    writeln!(out, "{}", report::table(&outcome))?;
    let (seconds, rate) = (outcome.elapsed.as_secs_f64(), outcome.rows_per_second());
    let plural = if epochs == 1 { "epoch" } else { "epochs" };
    writeln!(out, "{epochs} {plural} in {seconds:.2} s, {rate:.0} rows/s")?;
    writeln!(out, "loss {:.4}, held-out accuracy {:.4}", outcome.loss, outcome.accuracy())?;
    writeln!(out, "weights {:016x}", report::hash(&outcome.weights[0]))?;
    if let Some(path) = &options.plot {
        plot::draw(path, &outcome).with_context(|| format!("cannot draw {}", path.display()))?;
        writeln!(out, "loss curve in {}", path.display())?;
    }
    if options.check { check(options, &data, set, &outcome) } else { Ok(()) }
}

/// Trains with a progress bar.
fn shown(pool: &GpuPool, data: &Digits, set: Settings, what: &'static str) -> Result<Outcome> {
    let bar = report::bar(set.epochs, what);
    let outcome = train::train(pool, data, set, |now| report::advance(&bar, now));
    bar.finish_and_clear();
    outcome
}

/// The pool that the options ask for; without options, the library's default and its environment variables decide.
fn build(options: &Options) -> Result<GpuPool> {
    let builder = GpuPool::builder();
    let first = |count: usize| (0..count).collect::<Vec<_>>();
    let pool = match (options.backend, options.devices) {
        (Kind::Auto, None) => builder.build(),
        (Kind::Cuda, None) => builder.cuda().build(),
        (Kind::Host, None) => builder.host(4).build(),
        (Kind::Cuda, Some(n)) => builder.cuda().devices(&first(n)).build(),
        (Kind::Auto, Some(n)) if gpus() => builder.cuda().devices(&first(n)).build(),
        (Kind::Auto | Kind::Host, Some(n)) => builder.host(n).devices(&first(n)).build(),
    };
    pool.context("cannot open the devices")
}

/// Whether there are GPUs, and the environment does not choose software GPUs.
fn gpus() -> bool {
    let software = std::env::var("GPU_POOL_BACKEND").is_ok_and(|backend| backend.trim().starts_with("host"));
    #[cfg(feature = "cuda")]
    let there = gpu_pool::driver::cuda::device_count().is_ok_and(|count| count > 0);
    #[cfg(not(feature = "cuda"))]
    let there = false;
    there && !software
}

/// Checks what the example promises: equal replicas, equal runs, and a model that has learned.
fn check(options: &Options, data: &Digits, set: Settings, outcome: &Outcome) -> Result<()> {
    let mut out = stdout();
    let (first, others) = outcome.weights.split_first().context("no device has weights")?;
    let hash = report::hash(first);
    for (device, weights) in (1..).zip(others) {
        if !report::same_bits(first, weights) {
            bail!(
                "check: device {device} has other weights ({:016x}) than device 0 ({hash:016x})",
                report::hash(weights)
            );
        }
    }
    let devices = outcome.weights.len();
    let plural = if devices == 1 { "device" } else { "devices" };
    writeln!(out, "check: weights are bitwise equal on {devices} {plural} (hash {hash:016x})")?;

    let again = shown(&build(options)?, data, set, "again")?;
    let equal = again.weights.len() == devices && again.weights.iter().all(|w| report::same_bits(w, first));
    let curve = again.step_losses.iter().map(|x| x.to_bits()).eq(outcome.step_losses.iter().map(|x| x.to_bits()));
    ensure!(
        equal,
        "check: the same run gave other weights ({:016x} after {hash:016x})",
        report::hash(&again.weights[0])
    );
    ensure!(curve, "check: the same run gave the same weights, but another loss curve");
    writeln!(out, "check: the same run gave the same bits again")?;

    let accuracy = outcome.accuracy();
    ensure!(accuracy >= ACCURACY, "check: held-out accuracy {accuracy:.4} is below {ACCURACY}");
    writeln!(out, "check: held-out accuracy {accuracy:.4} is at least {ACCURACY}")?;
    Ok(())
}
