//! Compares the prediction of virtual time for `Device::all_reduce` around a ring of copies with its time on the GPUs
//! of this machine. Microseconds per call of the slowest device.
//!
//! * `all_reduce/<bytes>/<devices>`: f32, sum, in place, back to back. The peer is the prediction of
//!   `Topology::nvswitch(devices)`; a ratio of 1 means that it was right, above 1 that it was too slow.
//!
//! Without GPUs it writes what the models predict for 4 and 8 of them, so that a run can be held against it
//! (`--json benches/results/predicted/all_reduce.json`):
//!
//! * `predicted/copies/all_reduce/f32/<devices>/<bytes>`: the ring of copies of `Topology::nvswitch(devices)`
//! * `predicted/graph/all_reduce/f32/<devices>/<bytes>`: kernels that meet by inboxes, in graphs; see `kernels`

mod support;

use gpu_pool::{Builder, GpuPool, ReduceOp, Result, collective::Algorithm};
use gpu_pool_lab::{Check, Topology, prelude::*};
use support::{Bench, MICROSECONDS, Side, gpus};

const SIZES: [usize; 5] = [64, 128, 256, 512, 1024];

/// Microseconds per call on the slowest device.
fn time(builder: Builder, megabytes: usize) -> Result<f64> {
    // Virtual time models copies. On GPUs the ring uses kernels up to some size, except with a checker.
    let pool = builder.algorithm(Algorithm::Ring).build()?;
    let rounds = 4;
    let times = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(megabytes << 18)?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.synchronize()?;
        dev.barrier()?;
        let start = dev.record_timed()?;
        for _ in 0..rounds {
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
        }
        let end = dev.record_timed()?;
        dev.synchronize()?;
        end.elapsed_since(&start)
    })?;
    Ok(times.into_iter().max().expect("a device").as_secs_f64() * 1e6 / f64::from(rounds))
}

/// Microseconds of an all-reduce by inboxes: trips of 0.9 us, and 320 bytes a nanosecond over a device's link, both
/// fitted to two H200s (`src/fabric/limits/traffic.rs`). Everything to everyone in one trip, or parts to owners and
/// sums to all in three; the faster one.
fn kernels(bytes: usize, members: usize) -> f64 {
    let (bytes, members) = (bytes as f64, members as f64);
    let time = |trips: f64, sent: f64| trips * 0.9 + sent / 320e3;
    time(2.0, (members - 1.0) * bytes).min(time(4.0, 2.0 * bytes * (members - 1.0) / members))
}

fn predictions(mut bench: Bench) {
    bench.set_turns(0, 1);
    for devices in [4, 8] {
        let dry = || GpuPool::builder().topology(Topology::nvswitch(devices)).dry();
        for megabytes in SIZES {
            let ours = Side::new("predicted", || time(dry(), megabytes).expect("a dry run"));
            let case = format!("predicted/copies/all_reduce/f32/{devices}/{}", megabytes << 20);
            bench.compare(&case, MICROSECONDS, ours, Vec::new());
        }
        for bytes in (10..=30).step_by(2).map(|power| 1 << power) {
            let ours = Side::new("predicted", move || kernels(bytes, devices));
            let case = format!("predicted/graph/all_reduce/f32/{devices}/{bytes}");
            bench.compare(&case, MICROSECONDS, ours, Vec::new());
        }
    }
    bench.finish();
}

fn main() {
    let mut bench = Bench::new("predict");
    let devices = gpus::count().min(8);
    if devices < 2 {
        return predictions(bench);
    }
    bench.set_turns(1, 7);
    let ordinals: Vec<usize> = (0..devices).collect();
    for megabytes in SIZES {
        let real = || GpuPool::builder().cuda().devices(&ordinals).check(Check::Races);
        let dry = || GpuPool::builder().topology(Topology::nvswitch(devices)).dry();
        let predicted = time(dry(), megabytes).expect("a dry run");
        let ours = Side::new("measured", || time(real(), megabytes).expect("every call succeeds"));
        let peer = Side::new("predicted", move || predicted);
        bench.compare(&format!("all_reduce/{megabytes}MB/{devices}"), MICROSECONDS, ours, vec![peer]);
    }
    bench.finish();
}
