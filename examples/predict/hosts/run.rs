//! The two ways of an all-reduce over several hosts, on a dry pool in virtual time.

use gpu_pool::{Device, DeviceBuffer, GpuPool, ReduceOp, Result};
use gpu_pool_lab::Topology;
use gpu_pool_lab::prelude::*;

/// How the devices of several hosts add up their buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One ring over all devices, host by host.
    Flat,
    /// A reduce-scatter on each host, an all-reduce on each rail, an all-gather on each host.
    Hierarchy,
}

/// Microseconds of one call of each way (flat, hierarchy), for each size: the mean of back-to-back calls on the slowest
/// device. All hosts have the same number of devices, in the order of the hosts, and a buffer has an element for each
/// device at least.
pub fn times(machine: &Topology, sizes: &[usize]) -> Result<Vec<[f64; 2]>> {
    let pool = GpuPool::builder().topology(machine.clone()).dry().build()?;
    let times = sizes.iter().map(|&bytes| {
        let time = |way| time(&pool, machine, bytes, way);
        Ok([time(Way::Flat)?, time(Way::Hierarchy)?])
    });
    let times = times.collect();
    pool.close()?;
    times
}

/// Calls before the clock starts, and calls that count.
pub const WARM_UP: usize = 1;
pub const CALLS: usize = 2;

fn time(pool: &GpuPool, machine: &Topology, bytes: usize, way: Way) -> Result<f64> {
    let each = machine.hosts().first().map_or(machine.len(), |host| host.devices.len());
    let times = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(bytes / size_of::<f32>())?;
        let mut calls = |count: usize| (0..count).try_for_each(|_| all_reduce(dev, &mut x, way, each));
        calls(WARM_UP)?;
        let start = dev.record_timed()?;
        calls(CALLS)?;
        let end = dev.record_timed()?;
        dev.synchronize()?;
        end.elapsed_since(&start)
    })?;
    Ok(1e6 * times.into_iter().max().unwrap_or_default().as_secs_f64() / CALLS as f64)
}

/// Adds up `x` over all devices of hosts that have `each` devices.
pub fn all_reduce(dev: &Device, x: &mut DeviceBuffer<f32>, way: Way, each: usize) -> Result<()> {
    if way == Way::Flat {
        return dev.all_reduce(x, ReduceOp::Sum);
    }
    let (host, local) = (dev.rank() / each, dev.rank() % each);
    let inside = dev.group(&(host * each..(host + 1) * each).collect::<Vec<_>>())?;
    let rail = dev.group(&(local..dev.count()).step_by(each).collect::<Vec<_>>())?;
    inside.reduce_scatter_in_place(x, ReduceOp::Sum)?;
    let own = x.len() / each;
    rail.all_reduce(&mut x.slice_mut(local * own..(local + 1) * own), ReduceOp::Sum)?;
    inside.all_gather_in_place(x)
}
