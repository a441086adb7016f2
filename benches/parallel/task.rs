//! What an empty task costs the host: a closure gives out 10,000 of them to two devices in turn, and waits for them.
//! The time is divided by 10,000. Target: 2 us, on software GPUs.
//!
//! * `<software or gpu>/task/empty`: microseconds per task; no task depends on another
//! * `.../task/chain`: each task changes one variable, so it waits for the task before it, on the other device

use std::time::Instant;

use gpu_pool::{GpuPool, Result};

use crate::{
    Machine,
    machine::build,
    support::{Bench, MICROSECONDS, Side},
};

pub fn run(bench: &mut Bench, machine: &Machine) {
    let count = bench.size(10_000, 1000);
    bench.set_turns(1, bench.size(15, 3));
    for kind in ["software", "gpu"] {
        if kind == "gpu" && (machine.software || machine.devices < 2) {
            continue;
        }
        for (what, once) in [("empty", empty as fn(&GpuPool, usize) -> Result<()>), ("chain", chain)] {
            let case = format!("{kind}/task/{what}");
            if bench.wants(&case) {
                let pool = if kind == "gpu" { machine.pool(2) } else { build(GpuPool::builder().host(2)) };
                let ours = Side::new("gpu-pool", || {
                    let clock = Instant::now();
                    once(&pool, count).expect("tasks");
                    clock.elapsed().as_secs_f64() * 1e6 / count as f64
                });
                bench.compare(&case, MICROSECONDS, ours, vec![]);
            }
        }
    }
}

fn empty(pool: &GpuPool, count: usize) -> Result<()> {
    pool.tasks(|t| {
        for number in 0..count {
            let _ = t.gpu(number % 2).run((), |_, ()| Ok(()));
        }
        Ok(())
    })
}

fn chain(pool: &GpuPool, count: usize) -> Result<()> {
    let sum = pool.tasks(|t| {
        let mut sum = t.gpu(0).run((), |_, ()| Ok(0));
        for number in 0..count {
            let _ = t.gpu(number % 2).run((&mut sum,), |_, (sum,)| {
                *sum += 1;
                Ok(())
            });
        }
        t.get(&sum)
    })?;
    assert_eq!(sum, count, "every task has run once");
    Ok(())
}
