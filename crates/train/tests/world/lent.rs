//! Steps of `ShardedOptimizer` in memory that processes lend each other, where the processes are pools of this one, with
//! a CUDA device each: several may have the same one.

use crate::{loopback::Hosts, steps};
use gpu_pool::GpuPool;
use gpu_pool_lab::{Check, prelude::*};
use std::cell::Cell;

/// Pools with one CUDA device each. None without one.
fn hosts(count: usize) -> Option<Hosts> {
    let gpus = gpu_pool::extend::driver::cuda::device_count().unwrap_or(0);
    if gpus == 0 {
        println!("skipped: no CUDA device");
        return None;
    }
    let host = Cell::new(0);
    Some(Hosts::with_pads(count, |builder| {
        builder.check(Check::Off).cuda().devices(&[host.replace(host.get() + 1) % gpus])
    }))
}

#[test]
fn steps_in_lent_memory_have_the_bits_of_collectives() {
    for count in 2..=4 {
        let Some(hosts) = hosts(count) else { return };
        let pool = GpuPool::builder().host(count).build().unwrap();
        let calls = pool.run(|dev, _| steps::bits(&dev.world()?, true)).unwrap();
        let found = hosts.all(|dev| steps::bits(&dev.world()?, false));
        assert!(found.iter().all(|bits| *bits == calls[0]), "{count}: {found:x?} {calls:x?}");
    }
}
