//! RMM's `random_allocations`: time, driver calls once warm, and bytes held for bytes needed.

use crate::{
    Machine,
    driver_pool::{self, DriverPool},
    pace, record,
    sides::{Contender, Ours, Work},
    support::{Bench, COUNT, FACTOR, NANOSECONDS, Side},
    trace::Trace,
};

const ALLOCATIONS: [usize; 2] = [1000, 10_000];
const MOST_MIB: [u64; 6] = [1, 4, 64, 256, 1024, 4096];
const SEED: u64 = 850;
/// `Builder::memory_slack`, and the request size (MiB) from which it is measured: below, the pool keeps within it
/// anyway.
const SLACK: (f64, u64) = (1.1, 256);

pub fn run(bench: &mut Bench, machine: &Machine) {
    for allocations in ALLOCATIONS {
        for most in MOST_MIB {
            let case = format!("{}/rmm_random/{allocations}/{most}", machine.kind);
            one(bench, machine, &case, (allocations, most), None);
            if most >= SLACK.1 {
                one(bench, machine, &format!("{case}/slack"), (allocations, most), Some(SLACK.0));
            }
        }
    }
}

fn one(bench: &mut Bench, machine: &Machine, case: &str, (allocations, most): (usize, u64), slack: Option<f64>) {
    let (calls, held) = (&format!("{case}/driver_calls"), &format!("{case}/reserved"));
    if ![case, calls, held].iter().any(|case| bench.wants(case)) {
        return;
    }
    let trace = &Trace::rmm_random(allocations, most, SEED + most);
    let work = Work::Trace(trace);
    let builder = machine.builder(1);
    let pool =
        slack.map_or(builder.clone(), |slack| builder.memory_slack(slack)).build().expect("the device can be opened");
    let ours = Contender::with(&pool, trace, |_| Ours);
    let driver = (!machine.software).then(|| Contender::with(&pool, trace, DriverPool::new));
    let torch = machine.torch.as_ref();
    // The first replay takes memory from the driver. What the second one takes is what a steady state would.
    let stats = || ours.ask(|dev, _| dev.stats());
    assert_eq!(ours.replay(&trace.again), 0, "there is memory for the trace");
    let before = stats();
    ours.replay(&trace.again);
    let again = stats().driver_calls - before.driver_calls;
    let torch_again = torch.map(|torch| {
        torch.prepare(trace, 1);
        torch.ask("again", 1);
        let before = torch.ask("calls", 0);
        torch.ask("again", 1);
        (torch.name, torch.ask("calls", 0) - before)
    });

    // Every side is warm when it is timed.
    let most = bench.size(9, 3);
    pace(bench, most, || {
        if let Some(driver) = &driver {
            driver.replay(&trace.again);
        }
    });
    let mut peers = Vec::new();
    if let Some(driver) = &driver {
        peers.push(Side::sampling(driver_pool::NAME, move |samples| driver.time(1, work, 1, samples)));
    }
    if let Some(torch) = torch {
        peers.push(torch.side("again".to_owned(), 1));
    }
    let side = Side::sampling("gpu-pool", |samples| ours.time(1, work, 1, samples));
    bench.compare(case, NANOSECONDS, side, peers);

    record(bench, calls, COUNT, again as f64, torch_again.as_slice());
    let factor = |bytes: f64| bytes / trace.peak as f64;
    let mut peers = Vec::new();
    if let Some(driver) = &driver {
        peers.push((driver_pool::NAME, factor(driver.ask(|_, driver| driver.peak_reserved()) as f64)));
    }
    if let Some(torch) = torch {
        peers.push((torch.name, factor(torch.ask("peak_reserved", 0))));
    }
    record(bench, held, FACTOR, factor(stats().peak_reserved as f64), &peers);
    if let Some(driver) = driver {
        driver.end();
    }
}
