//! Measures what a trace of a pool ([`GpuPool::record_trace`]) costs, and how fast it is written.
//!
//! * `<gpu or software>/step/<devices>/<batch>`: microseconds per training step of the perceptron of `overlap`, with a
//!   trace and without, in turns. The batch makes a step of about a millisecond on GPUs. Target: at most 3 % more, so a
//!   ratio of 0.97. The note `records` is the number of slices of a step.
//! * `software/events/<threads>`: millions of events per second that the writer puts into the file, of 10 million, of
//!   which device threads make more than it can take. The notes: the fraction that was dropped, and the growth of the
//!   process's memory in MB. Target: 1.

#[path = "support/perceptron.rs"]
mod perceptron;
mod support;

use std::{cell::RefCell, fs, path::PathBuf, time::Instant};

use gpu_pool::PerDevice;
use perceptron::Replica;
use support::{Bench, MICROSECONDS, MOPS, Side, gpus};

/// Microseconds per step, over `steps` in a row.
fn time(model: &mut PerDevice<Replica>, steps: usize) -> f64 {
    let times = model.run(|dev, _, replica| {
        dev.synchronize()?;
        dev.barrier()?;
        let clock = Instant::now();
        (0..steps).try_for_each(|_| replica.step(dev))?;
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6)
    });
    times.expect("steps").into_iter().fold(0.0, f64::max) / steps as f64
}

fn file() -> PathBuf {
    std::env::temp_dir().join(format!("gpu-pool-bench-{}.json", std::process::id()))
}

fn slices() -> f64 {
    let text = fs::read(file()).expect("the trace");
    text.split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"{\"ph\":\"X\"")).count() as f64
}

fn steps(bench: &mut Bench, devices: usize, software: bool) {
    let batches: &[usize] = if software { &[64] } else { &[1024, 8192] };
    for &batch in batches {
        let case = format!("{}/step/{devices}/{batch}", if software { "software" } else { "gpu" });
        if !bench.wants(&case) {
            continue;
        }
        let pool = gpus::pool(software, devices);
        let mut model = pool.per_device(|dev, _| Replica::new(&dev.world()?, batch)).expect("memory for it");
        time(&mut model, 3);
        let model = RefCell::new(model);
        let steps = if software { bench.size(10, 2) } else { bench.size(500, 50) };
        let traced = || pool.record_trace(file(), || time(&mut model.borrow_mut(), steps)).expect("a trace");
        traced();
        bench.note("records", slices() / (steps * devices) as f64);
        let off = Side::new("without", || time(&mut model.borrow_mut(), steps));
        bench.compare(&case, MICROSECONDS, Side::new("with a trace", traced), vec![off]);
    }
}

/// The memory that the process has, in MB.
fn resident() -> f64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<f64>().ok());
    pages.map_or(0.0, |pages| pages * 4096.0 / 1e6)
}

fn events(bench: &mut Bench, threads: usize) {
    let case = format!("software/events/{threads}");
    if !bench.wants(&case) {
        return;
    }
    let (pool, most) = (gpus::pool(true, threads), bench.size(10_000_000, 1_000_000));
    let calls = most / threads;
    bench.set_turns(0, 3);
    let (mut dropped, before) = (0.0, resident());
    let mut grown = 0.0f64;
    let mut turn = || {
        let clock = Instant::now();
        let made = pool.record_trace(file(), || pool.run(|dev, _| (0..calls).try_for_each(|_| dev.synchronize())));
        made.expect("a trace").expect("calls");
        let (time, written) = (clock.elapsed().as_secs_f64(), slices());
        dropped = 1.0 - written / (calls * threads) as f64;
        grown = grown.max(resident() - before);
        written / time / 1e6
    };
    let first = turn();
    println!("{case}: {first:.2} million events/s, dropped {:.1} %, memory + {grown:.0} MB", 100.0 * dropped);
    bench.note("dropped", dropped);
    bench.note("grown_mb", grown);
    bench.compare(&case, MOPS, Side::new("the writer", move || first), vec![]);
}

fn main() {
    let mut bench = Bench::new("trace");
    let hardware = gpus::count();
    bench.set_turns(2, bench.size(15, 3));
    for devices in gpus::powers(if hardware == 0 { 2 } else { hardware }) {
        steps(&mut bench, devices, hardware == 0);
    }
    for threads in [1, 4] {
        events(&mut bench, threads);
    }
    let _ = fs::remove_file(file());
    bench.finish();
}
