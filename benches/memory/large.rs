//! Large blocks: split and joined, with few and with many live blocks.

use crate::{
    Machine,
    driver_pool::{self, DriverPool},
    pace,
    sides::{Contender, Ours, Work},
    support::{Bench, NANOSECONDS, Side},
    trace::Trace,
};

/// Live blocks, and their smallest and largest size in MiB: together at most about 30 GB a side.
const CASES: [(usize, u64, u64); 4] = [(10, 1, 512), (100, 1, 512), (1000, 1, 64), (10_000, 1, 4)];
/// Replacements in one trace.
const STEPS: usize = 2000;

pub fn run(bench: &mut Bench, machine: &Machine) {
    for (live, least, most) in CASES {
        let case = format!("{}/large/{live}", machine.kind);
        if !bench.wants(&case) {
            continue;
        }
        let trace = Trace::churn(live, least..most, STEPS, live as u64);
        let pool = machine.pool(1);
        let ours = Contender::with(&pool, &trace, |_| Ours);
        let driver = (!machine.software).then(|| Contender::with(&pool, &trace, DriverPool::new));
        let work = Work::Trace(&trace);
        let most = bench.size(31, 5);
        // The first turns do not count.
        pace(bench, most, || {
            ours.time(1, work, 1, &mut Vec::new());
            if let Some(driver) = &driver {
                driver.time(1, work, 1, &mut Vec::new());
            }
        });
        let mut peers = Vec::new();
        if let Some(driver) = &driver {
            peers.push(Side::sampling(driver_pool::NAME, move |samples| driver.time(1, work, 1, samples)));
        }
        if let Some(torch) = &machine.torch {
            torch.prepare(&trace, 1);
            torch.ask("again", 1);
            peers.push(torch.side("again".to_owned(), 1));
        }
        let rounds = bench.size(2, 1);
        let ours = Side::sampling("gpu-pool", move |samples| ours.time(1, work, rounds, samples));
        bench.compare(&case, NANOSECONDS, ours, peers);
        if let Some(driver) = driver {
            driver.end();
        }
    }
}
