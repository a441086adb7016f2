//! Faults from a plan, and what the runtime makes of each: an error that names device and operation, or the right data;
//! never a hang; and a pool that goes on, with all devices or with those that are left.

mod driver;
mod half_way;
mod kinds;
mod peers;
mod stress;
mod stuck;
mod sweep;

use gpu_pool::{Device, Error, GpuPool, ReduceOp};
use gpu_pool_lab::{FaultPlan, FaultRule, Injected};

/// A sum over all devices, checked; then the host's collectives.
fn collectives(dev: &Device) -> Result<(), Error> {
    let n = dev.count();
    let mut x = dev.upload(&ramp(dev.rank(), 100))?;
    dev.all_reduce(&mut x, ReduceOp::Sum)?;
    dev.barrier()?;
    assert_eq!(dev.exchange(dev.rank())?, (0..n).collect::<Vec<_>>());
    let expected: Vec<f32> = (0..100).map(|i| (0..n).map(|rank| ramp(rank, 100)[i]).sum()).collect();
    assert_eq!(dev.download(&x)?, expected);
    Ok(())
}

/// Small whole numbers, whose sums are exact.
fn ramp(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (i * (rank + 1) % 1000) as f32).collect()
}

/// The pool does all that pools do.
#[track_caller]
fn assert_works(pool: &GpuPool) {
    if let Err(error) = pool.run(|dev, _| collectives(dev)) {
        panic!("the pool does not work any more: {error}");
    }
}

fn plan(rule: FaultRule) -> FaultPlan {
    FaultPlan::new().on(rule).paused()
}

/// Whether the error is what a device makes of this fault.
fn is_typed(error: &Error, device: usize, fault: Injected) -> bool {
    match (fault, error) {
        (Injected::OutOfMemory, Error::OutOfMemory { device: at, op, .. }) => *at == device && !op.is_empty(),
        (Injected::Error, Error::Driver { device: at, op, code: 999, .. }) => *at == device && !op.is_empty(),
        (Injected::LaunchFailed, Error::DeviceLost { device: at, op, code: 719, .. }) => {
            *at == device && !op.is_empty()
        }
        (Injected::DeviceLost, Error::DeviceLost { device: at, op, code: 46, .. }) => *at == device && !op.is_empty(),
        _ => false,
    }
}
