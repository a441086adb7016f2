//! The cost of rounding: bytes held in blocks for bytes requested, uniform from 256 bytes to 1 MiB.

use gpu_pool::memory::{BlockState, MemorySnapshot};
use std::collections::BTreeMap;

use crate::{
    Machine,
    driver_pool::{self, DriverPool},
    record,
    sides::{Contender, Ours},
    support::{Bench, FACTOR},
    trace::Trace,
};

const LIVE: usize = 20_000;

pub fn run(bench: &mut Bench, machine: &Machine) {
    let name = |what| format!("{}/waste/{what}", machine.kind);
    let names = ["all", "slabs", "pieces", "reserved"].map(name);
    if !names.iter().any(|case| bench.wants(case)) {
        return;
    }
    let trace = Trace::uniform(bench.size(LIVE, LIVE / 10), 256..(1 << 20) + 1, 3);
    // With recording: only the records know the requested bytes of each block.
    let pool = machine.builder(1).record_memory(true).build().expect("the device can be opened");
    let ours = Contender::with(&pool, &trace, |_| Ours);
    let snapshot = ours.ask(|dev, _| dev.memory_snapshot());
    let classes = Classes::of(&snapshot);
    classes.print();

    let factor = |bytes: f64| bytes / trace.peak as f64;
    let mut peers = [Vec::new(), Vec::new()];
    if !machine.software {
        let driver = Contender::with(&pool, &trace, DriverPool::new);
        let (used, reserved) = driver.ask(|_, driver| (driver.peak_used(), driver.peak_reserved()));
        peers[0].push((driver_pool::NAME, factor(used as f64)));
        peers[1].push((driver_pool::NAME, factor(reserved as f64)));
        driver.end();
    }
    if let Some(torch) = &machine.torch {
        torch.prepare(&trace, 1);
        peers[0].push((torch.name, factor(torch.ask("peak_allocated", 0))));
        peers[1].push((torch.name, factor(torch.ask("peak_reserved", 0))));
    }
    let [all, slabs, pieces, reserved] = &names;
    let total = classes.sum(|_| true);
    record(bench, all, FACTOR, total.factor(), &peers[0]);
    record(bench, slabs, FACTOR, classes.sum(|class| class.is_some()).factor(), &[]);
    record(bench, pieces, FACTOR, classes.sum(|class| class.is_none()).factor(), &[]);
    record(bench, reserved, FACTOR, factor(snapshot.stats.reserved as f64), &peers[1]);
}

#[derive(Clone, Copy, Default)]
struct Sum {
    blocks: usize,
    requested: u64,
    bytes: u64,
}

impl Sum {
    fn add(&mut self, blocks: usize, requested: u64, bytes: u64) {
        *self = Sum { blocks: self.blocks + blocks, requested: self.requested + requested, bytes: self.bytes + bytes };
    }

    fn factor(self) -> f64 {
        self.bytes as f64 / self.requested.max(1) as f64
    }
}

/// Live blocks by the block size of their slab; large ones have none.
struct Classes(BTreeMap<Option<u64>, Sum>);

impl Classes {
    fn of(snapshot: &MemorySnapshot) -> Self {
        let mut classes = BTreeMap::<_, Sum>::new();
        for block in snapshot.blocks.iter().filter(|block| block.state == BlockState::Live && block.requested > 0) {
            classes.entry(block.class).or_default().add(1, block.requested, block.bytes);
        }
        Classes(classes)
    }

    fn sum(&self, which: impl Fn(Option<u64>) -> bool) -> Sum {
        let mut sum = Sum::default();
        for (_, class) in self.0.iter().filter(|(class, _)| which(**class)) {
            sum.add(class.blocks, class.requested, class.bytes);
        }
        sum
    }

    fn print(&self) {
        println!("{:>10} {:>8} {:>12} {:>12} {:>7}", "block", "live", "asked for", "in use", "x");
        for (class, sum) in &self.0 {
            let class = class.map_or("large".to_owned(), |bytes| bytes.to_string());
            println!("{class:>10} {:>8} {:>12} {:>12} {:>7.3}", sum.blocks, sum.requested, sum.bytes, sum.factor());
        }
    }
}
