//! Measures the cost of a scope: an empty closure on every device, results collected. The peers are rayon's `broadcast`
//! on a pool of as many threads, and threads spawned for each call with `crossbeam::thread::scope`.
//!
//! A scope does more than a broadcast: it takes its place in the gang order, makes the context current, drains the
//! device's streams, and can be aborted. Targets: within 1.25 of rayon, 5 times as fast as spawning, and over 8 GPUs at
//! most 15 us while the threads are awake.
//!
//! * `software/<devices>` and `gpu/<devices>`: back to back, the threads are awake
//! * `.../idle_300us`: after 300 idle us, so that the threads are asleep

mod support;

use std::{
    thread,
    time::{Duration, Instant},
};

use gpu_pool::GpuPool;
use support::{Bench, MICROSECONDS, Side, gpus};

const IDLE: Duration = Duration::from_micros(300);

/// Times single calls of `dispatch`, each after `idle`.
fn side<'a>(name: &'a str, calls: usize, idle: Duration, mut dispatch: impl FnMut() -> Vec<usize> + 'a) -> Side<'a> {
    Side::sampling(name, move |samples| {
        // In the first calls of a turn threads still wake up from the others' turns.
        for call in 0..calls + 5 {
            if !idle.is_zero() {
                thread::sleep(idle);
            }
            let clock = Instant::now();
            let indices = dispatch();
            let micros = clock.elapsed().as_secs_f64() * 1e6;
            assert!(indices.iter().copied().eq(0..indices.len()), "{name}: {indices:?}");
            if call >= 5 {
                samples.push(micros);
            }
        }
    })
}

fn scope(pool: &GpuPool) -> Vec<usize> {
    pool.run(|dev, _| Ok(dev.index())).expect("an empty closure succeeds")
}

fn spawned(threads: usize) -> Vec<usize> {
    crossbeam::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|i| scope.spawn(move |_| i)).collect();
        handles.into_iter().map(|handle| handle.join().expect("it returns its index")).collect()
    })
    .expect("no thread panics")
}

fn main() {
    let mut bench = Bench::new("scope");
    let calls = bench.size(200, 50);
    let most = gpus::count();
    for (kind, software, counts) in [("software", true, gpus::powers(8)), ("gpu", false, gpus::powers(most))] {
        for devices in counts {
            let pool = gpus::pool(software, devices);
            let rayon = rayon::ThreadPoolBuilder::new().num_threads(devices).build().expect("rayon's threads start");
            for (suffix, calls, idle) in [("", calls, Duration::ZERO), ("/idle_300us", calls / 5, IDLE)] {
                bench.compare(
                    &format!("{kind}/{devices}{suffix}"),
                    MICROSECONDS,
                    side("gpu-pool", calls, idle, || scope(&pool)),
                    vec![
                        side("rayon broadcast", calls, idle, || rayon.broadcast(|context| context.index())),
                        side("crossbeam spawn", calls / 5, idle, || spawned(devices)),
                    ],
                );
            }
        }
    }
    bench.finish();
}
