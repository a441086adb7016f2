//! CUDA.jl, "Multiple GPUs", scenario 1: a process for each device; and, missing there, a buffer that goes
//! from process to process without a copy through the CPU.
//!
//! `cargo run --release --example process_per_gpu`. It starts two workers of its own, on two GPUs, or on the only one
//! there is, else on software GPUs. Each worker lends its numbers to the other one, which sums them where they are.
//! Under mpirun, torchrun or srun on one machine the launcher's processes are the workers: each uses its own device,
//! and sums the numbers of the next one.

use anyhow::{Context, Result, ensure};
use gpu_pool::{Builder, GpuPool};
use gpu_pool_cluster::{Cluster, Imported, IpcBuffer, prelude::*};
use std::{
    env,
    io::{BufRead, BufReader, Write, stdin, stdout},
    process::{Command, Stdio},
    time::Duration,
};

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [worker, device, peer, len] = &args[..] {
        let devices = [device.parse()?, peer.parse()?];
        return work(GpuPool::builder(), worker, devices, len.parse()?, &mut stdin().lock(), &mut stdout());
    }
    if let Some(cluster) = Cluster::launched()? {
        return together(GpuPool::builder, cluster, &mut stdout(), 1_000_000);
    }
    let program = env::current_exe()?;
    let start = |args: &[String]| {
        let mut worker = Command::new(&program);
        worker.args(args);
        worker
    };
    run(GpuPool::builder().build()?, start, &mut stdout(), 1_000_000)
}

/// Starts two workers with `start`, which gets their arguments, and passes on their messages to each other.
pub fn run(pool: GpuPool, start: impl Fn(&[String]) -> Command, out: &mut dyn Write, len: usize) -> Result<()> {
    let device = |worker: usize| (worker % pool.device_count()).to_string();
    let mut workers = Vec::new();
    for worker in 0..2 {
        let args = [worker.to_string(), device(worker), device(1 - worker), len.to_string()];
        let mut process = start(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (to, from) = process.stdin.take().zip(process.stdout.take()).context("no pipes")?;
        workers.push((process, to, BufReader::new(from)));
    }
    let mut heard = Vec::new();
    for (_, _, from) in &mut workers {
        writeln!(out, "{}", hear(from, "told ")?)?;
        heard.push((hear(from, "sum ")?, hear(from, "ipc ")?));
    }
    for ((_, to, _), (_, ipc)) in workers.iter_mut().zip(heard.iter().rev()) {
        writeln!(to, "{ipc}")?;
    }
    for (worker, (_, _, from)) in workers.iter_mut().enumerate() {
        let sum = hear(from, "peer ")?;
        check(worker, &sum, &heard[1 - worker].0, len)?;
        writeln!(out, "Worker {worker} sums what worker {} has: {sum}", 1 - worker)?;
    }
    for (mut process, ..) in workers {
        ensure!(process.wait()?.success(), "a worker has failed");
    }
    Ok(())
}

/// The workers are the processes of a launcher: they tell each other by the cluster.
pub fn together(builder: impl Fn() -> Builder, cluster: Cluster, out: &mut dyn Write, len: usize) -> Result<()> {
    let (worker, count) = (cluster.local_rank(), cluster.size());
    let here = cluster.local_size();
    ensure!(count > 1 && here == count, "this is for processes of one machine: of {count} it has {here}");
    let next = (worker + 1) % count;
    let agreement = builder().devices(&[worker]).cluster(cluster).build()?;
    let mut expected = String::new();
    let sum = lend(builder(), [worker, next], worker as u64, len, |name, sum, ipc| {
        let loan = (worker, sum.to_string(), ipc);
        let told = first(agreement.run(|dev, _| dev.world()?.exchange_serde(&loan))?)?;
        writeln!(out, "Worker {worker} uses {name} {worker}")?;
        let (_, sum, ipc) = told.into_iter().find(|(worker, ..)| *worker == next).context("no next worker")?;
        expected = sum;
        Ok(ipc)
    })?;
    check(worker, &sum.to_string(), &expected, len)?;
    writeln!(out, "Worker {worker} sums what worker {next} has: {sum}")?;
    Ok(agreement.close()?)
}

/// A worker of [`run`].
pub fn work(
    builder: Builder,
    worker: &str,
    devices: [usize; 2],
    len: usize,
    from: &mut dyn BufRead,
    to: &mut dyn Write,
) -> Result<()> {
    let sum = lend(builder, devices, worker.parse()?, len, |name, sum, ipc| {
        let ipc = serde_json::to_string(&ipc)?;
        writeln!(to, "told Worker {worker} uses {name} {}\nsum {sum}\nipc {ipc}", devices[0])?;
        let mut line = String::new();
        from.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    })?;
    Ok(writeln!(to, "peer {sum}")?)
}

/// Fills memory of the first device and lends it to another worker. Returns the sum of the other's loan,
/// which lies on the second device. `swap` gets the device's name, the sum and the loan, and brings the other's.
fn lend(
    builder: Builder,
    [own, peer]: [usize; 2],
    seed: u64,
    len: usize,
    swap: impl FnOnce(&str, f32, IpcBuffer) -> Result<IpcBuffer>,
) -> Result<f32> {
    let mut devices = vec![own, peer];
    devices.dedup();
    let pool = builder.devices(&devices).build()?;
    let (x, name, total) = first(pool.on(&[0]).run(|dev, _| {
        let mut x = dev.exportable::<f32>(len)?;
        dev.upload_into(&(0..len).map(|i| uniform(seed, i)).collect::<Vec<_>>(), &mut x)?;
        let total = dev.download(&dev.sum(&x)?)?[0];
        Ok((x, dev.name().to_owned(), total))
    })?)?;
    let ipc = swap(&name, total, x.export()?)?;
    let total = first(pool.on(&[pool.device_count() - 1]).run(|dev, _| {
        let x: Imported<f32> = dev.import(&ipc)?;
        let total = dev.download(&dev.sum(&x)?)?[0];
        x.release(dev)?;
        Ok(total)
    })?)?;
    // The other one may still be reading.
    pool.on(&[0]).run(|dev, _| dev.wait_released(&x, Duration::from_secs(60)))?;
    Ok(total)
}

/// Numbers from 0 to 1, evenly: multiples of the golden ratio, from a place that the seed gives.
fn uniform(seed: u64, i: usize) -> f32 {
    ((seed as f64).sqrt() + i as f64 * 0.618_033_988_749_895).fract() as f32
}

fn first<T>(results: Vec<T>) -> Result<T> {
    results.into_iter().next().context("no device")
}

/// The rest of the next line with this begin.
fn hear(from: &mut impl BufRead, begin: &str) -> Result<String> {
    for line in from.lines() {
        if let Some((_, said)) = line?.split_once(begin) {
            return Ok(said.to_owned());
        }
    }
    anyhow::bail!("a worker has ended")
}

/// Both processes have the same sum of the same memory, about half of the number of numbers.
pub fn check(worker: usize, sum: &str, expected: &str, len: usize) -> Result<()> {
    ensure!(sum == expected, "worker {worker} sees {sum}, and its peer {expected}");
    let mean = sum.parse::<f64>()? / len as f64;
    ensure!((mean - 0.5).abs() < 0.02, "the mean is {mean}");
    Ok(())
}
