//! Trains a perceptron on handwritten digits, data parallel on all devices of a pool.
//!
//! ```sh
//! cargo run --release --example train_digits
//! cargo run --release --example train_digits -- --backend host --devices 8 --check --plot loss.png
//! mpirun -np 2 target/release/examples/train_digits --backend host --devices 2 --check
//! torchrun --no-python --nproc-per-node 2 target/release/examples/train_digits --check
//! ```
//!
//! Started by a launcher, the processes train one model on the devices of all: on GPUs, each takes the one of its local
//! rank. Rank 0 prints.
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
use gpu_pool_cluster::{Cluster, prelude::*};
use std::{
    io::{self, Write},
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
    /// Number of devices of a process: the first N GPUs (the next N for the next process of a machine), or N software
    /// GPUs [default: all GPUs, one GPU for each process of several on a machine, or 4 software GPUs]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    devices: Option<usize>,
    /// Devices to train on; auto takes GPUs where there are some
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
    // `GPU_POOL_CHECK` and `GPU_POOL_FAULTS` may ask for them.
    gpu_pool_lab::install();
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
    let cluster = Cluster::launched()?;
    let prints = cluster.as_ref().is_none_or(|cluster| cluster.rank() == 0);
    let mut out: Box<dyn Write> = if prints { Box::new(io::stdout()) } else { Box::new(io::sink()) };
    let pool = build(options, cluster)?;
    let devices = pool.run(|dev, _| Ok(dev.world()?.count())).context("the processes do not find each other")?[0];
    enough_rows(devices)?;

    let set = Settings { epochs, batch, lr };
    let run = |what| {
        let bar = report::bar(epochs, what, prints);
        let outcome = train::train(&pool, &data, set, |now| report::advance(&bar, now));
        bar.finish_and_clear();
        outcome
    };
    writeln!(
        out,
        "{} training rows, {} held out; {} parameters; {} x {}",
        data.train.len(),
        data.held_out.len(),
        model::PARAMETERS,
        devices,
        pool.report().devices[0].name
    )?;
    let outcome = run("training")?;

    writeln!(out, "{}", report::table(&outcome))?;
    let (seconds, rate) = (outcome.elapsed.as_secs_f64(), outcome.rows_per_second());
    let plural = if epochs == 1 { "epoch" } else { "epochs" };
    writeln!(out, "{epochs} {plural} in {seconds:.2} s, {rate:.0} rows/s")?;
    writeln!(out, "loss {:.4}, held-out accuracy {:.4}", outcome.loss, outcome.accuracy())?;
    writeln!(out, "weights {:016x}", report::hash(&outcome.weights[0]))?;
    if let Some(path) = options.plot.as_ref().filter(|_| prints) {
        plot::draw(path, &outcome).with_context(|| format!("cannot draw {}", path.display()))?;
        writeln!(out, "loss curve in {}", path.display())?;
    }
    if options.check {
        check(&mut *out, &outcome, || run("again"))?;
    }
    pool.close().context("the devices did not end well")
}

/// The pool that the options ask for; without options, the library's default and its environment variables decide.
fn build(options: &Options, cluster: Option<Cluster>) -> Result<GpuPool> {
    let mut builder = GpuPool::builder();
    // Several processes of one machine share its GPUs out.
    let (mut devices, mut before) = (options.devices, 0);
    if let Some(cluster) = cluster {
        if cluster.local_size() > 1 && options.backend != Kind::Host && gpus() {
            devices.get_or_insert(1);
            before = cluster.local_rank();
        }
        builder = builder.cluster(cluster);
    }
    let ordinals = |n: usize| (before * n..(before + 1) * n).collect::<Vec<_>>();
    let pool = match (options.backend, devices) {
        (Kind::Auto, None) => builder.build(),
        (Kind::Cuda, None) => builder.cuda().build(),
        (Kind::Host, None) => builder.host(4).build(),
        (Kind::Cuda, Some(n)) => builder.cuda().devices(&ordinals(n)).build(),
        (Kind::Auto, Some(n)) if gpus() => builder.cuda().devices(&ordinals(n)).build(),
        (Kind::Auto | Kind::Host, Some(n)) => builder.host(n).devices(&ordinals(n)).build(),
    };
    pool.context("cannot open the devices")
}

/// Whether there are GPUs, and the environment does not choose software GPUs.
fn gpus() -> bool {
    let software = std::env::var("GPU_POOL_BACKEND").is_ok_and(|backend| backend.trim().starts_with("host"));
    #[cfg(feature = "cuda")]
    let there = gpu_pool::extend::driver::cuda::device_count().is_ok_and(|count| count > 0);
    #[cfg(not(feature = "cuda"))]
    let there = false;
    there && !software
}

/// Checks the promises of the example: equal replicas, equal runs, and a model that has learned.
fn check(out: &mut dyn Write, outcome: &Outcome, again: impl FnOnce() -> Result<Outcome>) -> Result<()> {
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

    let again = again()?;
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
