//! Small blocks: the hot path, on one device thread and on all at once.

use crate::{
    Machine,
    driver_pool::{self, DriverPool},
    sides::{Contender, Ours, Work},
    support::{Bench, NANOSECONDS, Side},
    trace::Trace,
};

const BYTES: usize = 4096;

pub fn run(bench: &mut Bench, machine: &Machine) {
    let kind = machine.kind;
    if !bench.wants(&format!("{kind}/small/")) && !["pair_4K", "ring_16"].iter().any(|what| any(bench, kind, what)) {
        return;
    }
    let pool = machine.pool(machine.devices);
    let ring = Trace::small_ring(16, 256, 7);
    for (what, work) in [("pair_4K", Work::Pair(BYTES)), ("ring_16", Work::Trace(&ring))] {
        // Rounds for a few hundred microseconds on our side; the driver takes as many times longer as it is slower.
        let (rounds, slow) = match work {
            Work::Pair(_) => (bench.size(10_000, 1000), bench.size(500, 50)),
            Work::Trace(_) => (bench.size(50, 5), 2),
        };
        let ours = match work {
            Work::Pair(_) => Contender::new(&pool, 0, |_| Ours),
            Work::Trace(trace) => Contender::with(&pool, trace, |_| Ours),
        };
        let driver = (!machine.software).then(|| match work {
            Work::Pair(_) => Contender::new(&pool, 0, DriverPool::new),
            Work::Trace(trace) => Contender::with(&pool, trace, DriverPool::new),
        });
        for (who, devices) in [("one", 1), ("all", machine.devices)] {
            bench.set_turns(bench.size(3, 1), bench.size(31, 5));
            let side = |name, devices| {
                Side::sampling(name, {
                    let ours = &ours;
                    move |samples| ours.time(devices, work, rounds, samples)
                })
            };
            let mut peers = Vec::new();
            if devices > 1 {
                peers.push(side("one thread", 1));
            }
            if let Some(driver) = &driver {
                let turn = move |samples: &mut Vec<f64>| driver.time(devices, work, slow, samples);
                peers.push(Side::sampling(driver_pool::NAME, turn));
            }
            if let Some(torch) = &machine.torch {
                let (order, times) = match work {
                    Work::Pair(bytes) => (format!("pair:{bytes}:{devices}"), rounds),
                    Work::Trace(trace) => {
                        torch.prepare(trace, devices);
                        ("again".to_owned(), rounds)
                    }
                };
                peers.push(torch.side(order, times));
            }
            bench.compare(&format!("{kind}/small/{what}/{who}"), NANOSECONDS, side("gpu-pool", devices), peers);
        }
        if let Some(driver) = driver {
            driver.end();
        }
    }
}

fn any(bench: &Bench, kind: &str, what: &str) -> bool {
    ["one", "all"].iter().any(|who| bench.wants(&format!("{kind}/small/{what}/{who}")))
}
