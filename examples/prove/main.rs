//! Commitments to polynomials, the job that a prover gives a GPU most: many, of different sizes, from several threads.
//!
//! ```sh
//! cargo run --release --example prove
//! cargo run --release --example prove -- --jobs 64 --devices 2 --threads 8 --picture gpus.svg
//! ```
//!
//! A job evaluates a polynomial of 2^16 to 2^22 coefficients over the Goldilocks field at all roots of unity, and
//! hashes the values to a Merkle tree. It goes to a GPU that is free and has the memory for it, through the queue of
//! `pool.jobs()`. Without GPUs it runs on software GPUs (about 10 s on two cores). The parts:
//!
//! * `prover`: the field, the transform and the tree: kernels in CUDA C++ (`prove.cu`), and their Rust halves
//! * `reference`: the same by other crates, with which every result is compared
//! * `picture`: the GPUs' work over time

mod picture;
mod prover;
mod reference;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gpu_pool::{Device, Event, GpuPool, PinnedBuffer};
use indicatif::{ProgressBar, ProgressStyle};
use prover::{MODULE, Prover};
use rayon::prelude::*;
use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

/// How many sizes there are.
const SIZES: usize = 7;

/// Commits to polynomials on all GPUs, and compares the results with other crates'.
#[derive(Debug, Parser)]
struct Options {
    /// Polynomials
    #[arg(long, value_name = "N", default_value_t = 21)]
    jobs: usize,
    /// The largest of them have 2^K coefficients, the smallest 2^(K - 6)
    #[arg(long, value_name = "K", default_value_t = 22, value_parser = clap::value_parser!(u32).range(8..=24))]
    most: u32,
    /// The first N devices [default: all GPUs, or 4 software GPUs]
    #[arg(long, value_name = "N")]
    devices: Option<usize>,
    /// Threads that submit jobs
    #[arg(long, value_name = "N", default_value_t = 4)]
    threads: usize,
    /// Leaves out the comparison, which takes longer than the jobs
    #[arg(long)]
    no_check: bool,
    /// Draws the GPUs' work over time
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
}

/// The state of a device from job to job.
struct State {
    prover: Prover,
    first: Event,
}

/// The result of a job. It has not waited for the device: so the closure of the next job can run beside its work.
struct Left {
    device: usize,
    first: Event,
    begin: Event,
    end: Event,
    root: PinnedBuffer<u32>,
}

/// A job that is done. Times are since the device's first work, by its clock.
struct Done {
    job: Job,
    device: usize,
    begin: Duration,
    end: Duration,
    root: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Job {
    number: usize,
    log_n: u32,
}

impl Job {
    /// Sizes are uneven: one is 64 times the other.
    fn new(number: usize, most: u32) -> Job {
        Job { number, log_n: most - (number % SIZES) as u32 }
    }

    /// Other coefficients for each job (SplitMix64). Not all of them are canonical.
    fn polynomial(self) -> Vec<u64> {
        let coefficient = |i: u64| {
            let x = (i + ((self.number as u64) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ x >> 31
        };
        (0..1 << self.log_n).map(coefficient).collect()
    }

    fn run(dev: &Device, state: &State, coefficients: &[u64]) -> gpu_pool::Result<Left> {
        let begin = dev.record_timed()?;
        let root = state.prover.commit(dev, dev.upload(coefficients)?)?;
        Ok(Left { device: dev.index(), first: state.first.clone(), begin, end: dev.record_timed()?, root })
    }
}

impl Done {
    fn new(job: Job, left: &Left) -> gpu_pool::Result<Done> {
        let Left { device, first, begin, end, root } = left;
        let (begin, end) = (begin.elapsed_since(first)?, end.elapsed_since(first)?);
        Ok(Done { job, device: *device, begin, end, root: root.as_slice()?.to_vec() })
    }
}

fn bar(what: &'static str, length: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix} {bar:40} {pos}/{len}  {elapsed}")?;
    Ok(ProgressBar::new(length as u64).with_style(style).with_prefix(what))
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.jobs > 0 && options.threads > 0, "at least one job and one thread are needed");
    let mut builder = GpuPool::builder().module(&MODULE);
    if let Some(count) = options.devices {
        builder = builder.devices(&Vec::from_iter(0..count));
    }
    let pool = builder.build()?;
    let (devices, name) = (pool.device_count(), &pool.report().devices[0].name);
    println!("{} jobs from {} threads on {devices} x {name}", options.jobs, options.threads);

    let start = Instant::now();
    let done = commit(&pool, &options)?;
    let seconds = start.elapsed().as_secs_f64();
    let elements: usize = done.iter().map(|done| 1 << done.job.log_n).sum();
    println!("{elements} elements in {seconds:.2} s, {:.1} million/s", 1e-6 * elements as f64 / seconds);
    if let Some(path) = &options.picture {
        picture::draw(path, &done, devices).with_context(|| format!("cannot draw {}", path.display()))?;
        println!("picture in {}", path.display());
    }
    if !options.no_check {
        let bar = bar("comparing", done.len())?;
        done.par_iter().try_for_each(|Done { job, root, .. }| {
            ensure!(**root == reference::commit(&job.polynomial()), "job {} has a wrong root", job.number);
            bar.inc(1);
            Ok(())
        })?;
        bar.finish_and_clear();
        println!("all roots are those of winter-math and sha2");
    }
    pool.close().context("the devices did not end well")
}

/// Several threads submit jobs, and wait for their results.
fn commit(pool: &GpuPool, options: &Options) -> Result<Vec<Done>> {
    let bar = bar("jobs", options.jobs)?;
    let progress = bar.clone();
    let jobs = pool
        .jobs_with(|dev| Ok(State { prover: Prover::new(dev)?, first: dev.record_timed()? }))
        .queue(2 * options.threads)
        .on_progress(move |now| progress.set_position(now.done))
        .build()?;
    let submit = |job: Job| {
        let coefficients = job.polynomial();
        let work = jobs.with(move |dev, state| Job::run(dev, state, &coefficients));
        let (name, bytes) = (format!("commit {}", job.number), Prover::bytes(job.log_n) as u64);
        // Waits while the queue is full, so few polynomials are in memory.
        Ok((job, jobs.job().name(name).memory(bytes).submit(work)?))
    };
    let own = |thread| {
        let own = (thread..options.jobs).step_by(options.threads).map(|number| Job::new(number, options.most));
        let handles = own.map(submit).collect::<gpu_pool::Result<Vec<_>>>()?;
        handles.into_iter().map(|(job, handle)| Done::new(job, &handle.wait()?)).collect::<gpu_pool::Result<Vec<_>>>()
    };
    let done = thread::scope(|scope| {
        let own = &own;
        let threads: Vec<_> = (0..options.threads).map(|thread| scope.spawn(move || own(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<gpu_pool::Result<Vec<_>>>()
    })?;
    bar.finish_and_clear();
    for (i, device) in jobs.stats().devices.iter().enumerate() {
        println!("device {i}: {} jobs, busy {:.0} %", device.ended, 100.0 * device.busy);
    }
    jobs.close()?;
    Ok(done.into_iter().flatten().collect())
}
