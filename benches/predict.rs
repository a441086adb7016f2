//! Compares the prediction of virtual time for `Device::all_reduce` around a ring of copies with its time on the GPUs
//! of this machine. Microseconds per call of the slowest device.
//!
//! * `all_reduce/<bytes>/<devices>`: f32, sum, in place, back to back. The peer is the prediction of
//!   `Topology::nvswitch(devices)`; a ratio of 1 means that it was right, above 1 that it was too slow.

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

fn main() {
    let mut bench = Bench::new("predict");
    let devices = gpus::count().min(8);
    if devices < 2 {
        return println!("skipped: needs 2 CUDA devices");
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
