//! The crate's own all-reduce, on a pool in virtual time.

use gpu_pool::{GpuPool, ReduceOp, Result};
use gpu_pool_lab::Topology;
use gpu_pool_lab::prelude::*;

/// Microseconds of one `Device::all_reduce` of `bytes` of `f32`: the mean of back-to-back calls, by timing events of
/// the slowest device.
pub fn all_reduce(machine: &Topology, bytes: usize) -> Result<f64> {
    const CALLS: u32 = 4;
    let pool = GpuPool::builder().topology(machine.clone()).dry().build()?;
    let times = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(bytes / size_of::<f32>())?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.synchronize()?;
        let start = dev.record_timed()?;
        for _ in 0..CALLS {
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
        }
        let end = dev.record_timed()?;
        dev.synchronize()?;
        end.elapsed_since(&start)
    })?;
    pool.close()?;
    let slowest = times.into_iter().max().unwrap_or_default();
    Ok(1e6 * slowest.as_secs_f64() / f64::from(CALLS))
}
