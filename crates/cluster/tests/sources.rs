//! The programs of `examples/sources` with several processes: each prints the lines of its source, and notices a wrong
//! result. On software GPUs, with the race checker. Sizes are small, for debug builds.
#![cfg(target_os = "linux")]

use gpu_pool::{Builder, GpuPool};
use gpu_pool_cluster::Cluster;
use gpu_pool_lab::{Check, prelude::*};
use std::{env, io, process::Command, time::Duration};

#[path = "../../../examples/sources/mpi_sum.rs"]
#[allow(dead_code, reason = "`main`")]
mod mpi_sum;
#[path = "../../../examples/sources/process_per_gpu.rs"]
#[allow(dead_code, reason = "`main`")]
mod process_per_gpu;

fn devices(count: usize) -> Builder {
    // Longer than any test takes: a hang is told from a slow machine.
    GpuPool::builder().host(count).check(Check::Races).timeout(Duration::from_secs(300))
}

fn pool(count: usize) -> GpuPool {
    devices(count).build().unwrap()
}

fn printed(run: impl FnOnce(&mut Vec<u8>) -> anyhow::Result<()>) -> String {
    let mut out = Vec::new();
    run(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn each_device_has_a_process_of_its_own() {
    // A worker is this program again: it runs the test below.
    let start = |args: &[String]| {
        let mut worker = Command::new(env::current_exe().unwrap());
        worker.args(["a_worker_of_the_test_above", "--exact", "--nocapture"]).env("SOURCES_WORKER", args.join(" "));
        worker
    };
    for count in [1, 2] {
        let text = printed(|out| process_per_gpu::run(pool(count), start, out, 10_000));
        let second = count - 1;
        let begin =
            format!("Worker 0 uses software GPU 0\nWorker 1 uses software GPU {second}\nWorker 0 sums what worker 1");
        assert!(text.starts_with(&begin) && text.lines().count() == 4, "{text}");
    }
    assert!(process_per_gpu::check(0, "5", "5", 10).is_ok());
    assert!(process_per_gpu::check(0, "5", "5.1", 10).is_err());
    assert!(process_per_gpu::check(0, "4", "4", 10).is_err());
    let silent = |_: &[String]| Command::new("true");
    assert!(process_per_gpu::run(pool(1), silent, &mut Vec::new(), 10).is_err());
}

/// The same with the processes of a launcher.
#[test]
fn each_device_has_a_process_of_a_launcher() {
    let start = || {
        let mut process = Command::new(env::current_exe().unwrap());
        process.args(["a_process_of_the_test_above", "--exact", "--nocapture"]);
        process
    };
    let text =
        printed(|out| mpi_sum::run(mpi_sum::by_hand(start)?, |process| process.env("SOURCES_WORKER", "together"), out));
    let said: Vec<_> = text.lines().filter_map(|line| line.split_once("Worker ").map(|(_, said)| said)).collect();
    let [first, one, second, two] = said[..] else { panic!("{text}") };
    assert_eq!([first, second], ["0 uses software GPU 0", "1 uses software GPU 1"]);
    assert!(one.starts_with("0 sums what worker 1 has: ") && two.starts_with("1 sums what worker 0 has: "), "{text}");
}

#[test]
fn a_worker_of_the_test_above() {
    let Ok(args) = env::var("SOURCES_WORKER") else { return };
    let [worker, device, peer, len] = args.split(' ').collect::<Vec<_>>()[..] else { panic!("{args}") };
    let number = |text: &str| text.parse::<usize>().unwrap();
    let (from, to) = (&mut io::stdin().lock(), &mut io::stdout());
    process_per_gpu::work(devices(2), worker, [number(device), number(peer)], number(len), from, to).unwrap();
}

#[test]
fn processes_sum_on_the_cpu_and_on_devices() {
    let start = || {
        let mut process = Command::new(env::current_exe().unwrap());
        process.args(["a_process_of_the_test_above", "--exact", "--nocapture"]);
        process
    };
    let text =
        printed(|out| mpi_sum::run(mpi_sum::by_hand(start)?, |process| process.env("SOURCES_WORKER", "mpi_sum"), out));
    let said: Vec<_> = text.lines().filter_map(|line| line.split_once("process ").map(|(_, said)| said)).collect();
    let [first, second] = said[..] else { panic!("{text}") };
    assert!(first.starts_with("0: 0.3") && first[1..] == second[1..], "{text}");
    assert!(mpi_sum::check(1.0, 1.0, 3).is_ok());
    assert!(mpi_sum::check(1.0, 1.0, 2).is_err());
    assert!(mpi_sum::check(1.0, 1.0 + f32::EPSILON, 3).is_err());
    let failing = vec![Command::new("false")];
    assert!(mpi_sum::run(failing, |process| process, &mut Vec::new()).is_err());
}

#[test]
fn a_process_of_the_test_above() {
    let (cluster, out) = (Cluster::from_env, &mut io::stdout());
    match env::var("SOURCES_WORKER").as_deref() {
        Ok("mpi_sum") => mpi_sum::work(devices(2), cluster().unwrap(), out, 10_000).unwrap(),
        Ok("together") => process_per_gpu::together(|| devices(2), cluster().unwrap(), out, 10_000).unwrap(),
        _ => {}
    }
}
