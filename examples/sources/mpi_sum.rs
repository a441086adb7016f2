//! NVIDIA's course, "CUDA-aware MPI", with a process for each device as there: the results are summed on the CPU; then
//! the library gets the device's memory as it is.
//!
//! `mpirun -np 2 target/release/examples/mpi_sum` (feature `mpi`), or with torchrun or srun: process `p` of a machine
//! uses its device `p`. `cargo run --release --example mpi_sum` starts two processes of its own: under mpirun if it is
//! there and the feature is on, else by hand; on two GPUs, else on software GPUs.

use anyhow::{Result, bail, ensure};
use gpu_pool::{Builder, GpuPool, ReduceOp, collective::ReduceOrder};
use gpu_pool_cluster::{Cluster, prelude::*};
use std::{
    env,
    io::{Write, stdout},
    net::TcpListener,
    process::{Command, Stdio},
};

/// How many numbers each process squares.
const LEN: usize = 1_000_000;

fn main() -> Result<()> {
    if let Some(cluster) = Cluster::launched()? {
        return work(GpuPool::builder(), cluster, &mut stdout(), LEN);
    }
    let program = env::current_exe()?;
    // One GPU is not enough for two processes.
    let software = GpuPool::builder().build()?.device_count() < 2;
    let environment = software.then_some(("GPU_POOL_BACKEND", "host:2"));
    let found = cfg!(feature = "mpi") && Command::new("mpirun").arg("--version").output().is_ok();
    let processes = match found {
        true => vec![by_mpi(&program)],
        false => by_hand(|| Command::new(&program))?,
    };
    run(processes, |process| process.envs(environment), &mut stdout())
}

/// Two processes under mpirun, also as root and on fewer cores than processes.
fn by_mpi(program: &std::path::Path) -> Command {
    let mut process = Command::new("mpirun");
    process.args(["-np", "2"]).arg(program);
    process.envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")));
    process
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    process
}

/// Two processes that find each other by `GPU_POOL_*`.
pub fn by_hand(start: impl Fn() -> Command) -> Result<Vec<Command>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let process = |rank: &str| {
        let mut process = start();
        process.env("GPU_POOL_RANK", rank).env("GPU_POOL_SIZE", "2");
        process.env("GPU_POOL_LOCAL_RANK", rank).env("GPU_POOL_LOCAL_SIZE", "2");
        process.env("GPU_POOL_MASTER", "127.0.0.1").env("GPU_POOL_PORT", &port);
        process
    };
    Ok(["0", "1"].map(process).into())
}

/// Starts the processes, with the variables of `set`, and prints their output.
pub fn run(processes: Vec<Command>, set: impl Fn(&mut Command) -> &mut Command, out: &mut dyn Write) -> Result<()> {
    let mut running = Vec::new();
    for mut process in processes {
        set(&mut process);
        running.push(process.stdout(Stdio::piped()).spawn()?);
    }
    let ended: Vec<_> = running.into_iter().map(|process| process.wait_with_output()).collect::<Result<_, _>>()?;
    for process in ended {
        out.write_all(&process.stdout)?;
        ensure!(process.status.success(), "a process has failed: {}", process.status);
    }
    Ok(())
}

/// One process: the mean of the squares of all processes' numbers, in both ways.
pub fn work(builder: Builder, cluster: Cluster, out: &mut dyn Write, len: usize) -> Result<()> {
    let (rank, size, device) = (cluster.rank(), cluster.size(), [cluster.local_rank()]);
    let pool = builder.devices(&device).reduce_order(ReduceOrder::Rank).cluster(cluster).build()?;
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        let from = world.rank() * len;
        let x = dev.upload(&(from..from + len).map(uniform).collect::<Vec<_>>())?;
        let mut sum = dev.dot(&x, &x)?; // the result of this process, on its device
        let all = world.exchange_serde(&dev.download(&sum)?[0])?; // MPI: to the CPU, and from there to all
        world.all_reduce(&mut sum, ReduceOp::Sum)?; // CUDA-aware MPI: the device's memory is given as it is
        Ok((all.into_iter().reduce(|sum, one| sum + one), dev.download(&sum)?[0]))
    })?;
    let [(Some(on_cpu), on_devices)] = found[..] else { bail!("no device") };
    check(on_cpu, on_devices, size * len)?;
    let mean = |sum: f32| sum / (size * len) as f32;
    writeln!(out, "process {rank}: {:.5} on the CPU, {:.5} on devices", mean(on_cpu), mean(on_devices))?;
    Ok(pool.close()?)
}

/// Numbers from 0 to 1, evenly: multiples of the golden ratio.
fn uniform(i: usize) -> f32 {
    (i as f64 * 0.618_033_988_749_895).fract() as f32
}

/// Both sums have the same bits, and the mean of squares is near to 1/3.
pub fn check(on_cpu: f32, on_devices: f32, count: usize) -> Result<()> {
    ensure!(on_cpu.to_bits() == on_devices.to_bits(), "{on_devices} on devices, {on_cpu} on the CPU");
    let mean = on_cpu / count as f32;
    ensure!((mean - 1.0 / 3.0).abs() < 0.01, "the mean of squares is {mean}");
    Ok(())
}
