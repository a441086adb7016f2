//! Loops that made other allocators run out of memory with much of it free, under a limit that leaves no room for
//! waste.
//!
//! * `keep_last`: [pytorch#193400](https://github.com/pytorch/pytorch/issues/193400): 91 MiB, 45.5 MiB and 2 MiB are
//!   allocated, the first two freed, the small one kept, a thousand times over. `keep_first`: the small one comes
//!   first, while what was freed before lies there to be cut up.
//! * `batches`: one more row in each batch, as in [pytorch#35901](https://github.com/pytorch/pytorch/issues/35901):
//!   each step's blocks are all a little larger than those which have just been freed.
//!
//! Results: refused requests, and bytes held for bytes needed, the most of any cycle.

use crate::{
    Machine, record,
    sides::{Contender, Ours},
    support::{Bench, COUNT, FACTOR},
    trace::{Step, Trace},
};

const MIB: u64 = 1 << 20;
/// Limit above the needed bytes.
const ROOM: u64 = 16 * MIB;

/// A loop, and the ends of its cycles.
struct Cycles {
    name: &'static str,
    trace: Trace,
    ends: Vec<usize>,
    /// Maximum of live bytes, from the beginning to the end of each cycle.
    live: Vec<u64>,
}

impl Cycles {
    fn new(name: &'static str, cycles: usize, mut cycle: impl FnMut(&mut Trace, usize)) -> Self {
        let (mut trace, mut ends, mut live) = (Trace::default(), Vec::new(), Vec::new());
        for index in 0..cycles {
            cycle(&mut trace, index);
            ends.push(trace.first.len());
        }
        let trace = trace.finish();
        let (mut held, mut now, mut most, mut from) = (vec![0; trace.slots], 0, 0, 0);
        for &end in &ends {
            for &Step { slot, bytes } in &trace.first[from..end] {
                now = now - held[slot as usize] + bytes;
                held[slot as usize] = bytes;
                most = most.max(now);
            }
            from = end;
            live.push(most);
        }
        Cycles { name, trace, ends, live }
    }

    /// Two large blocks are allocated and freed, a small one stays.
    fn keep(name: &'static str, cycles: usize, first: bool) -> Self {
        Self::new(name, cycles, |trace, cycle| {
            let keep = |trace: &mut Trace, now| {
                if now {
                    trace.take_first(2 + cycle, 2 * MIB);
                }
            };
            keep(trace, first);
            trace.take_first(0, 91 * MIB);
            trace.take_first(1, 45 * MIB + MIB / 2);
            keep(trace, !first);
            trace.free_first(0);
            trace.free_first(1);
        })
    }

    /// Activations of twelve layers, with one more row at each step.
    fn batches(steps: usize) -> Self {
        const LAYERS: usize = 12;
        Self::new("batches", steps, |trace, step| {
            // 0.25 to 5.5 MiB a row.
            (0..LAYERS).for_each(|layer| trace.take_first(layer, (step as u64 + 1) * (1 + 2 * layer as u64) * MIB / 4));
            (0..LAYERS).rev().for_each(|layer| trace.free_first(layer));
        })
    }
}

/// The results of one side.
struct Outcome {
    refused: f64,
    /// Bytes held at the end of each cycle.
    reserved: Vec<f64>,
}

impl Outcome {
    /// Bytes held per maximum of bytes needed so far, in the worst cycle. The first cycles do not count: a chunk may be
    /// larger than what they need.
    fn worst(&self, cycles: &Cycles) -> f64 {
        let each = self.reserved.iter().zip(&cycles.live).map(|(held, &live)| held / live as f64);
        each.skip(cycles.live.len() / 10).fold(0.0, f64::max)
    }
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let cycles = bench.size(1000, 100);
    let all = [
        Cycles::keep("keep_last", cycles, false),
        Cycles::keep("keep_first", cycles, true),
        Cycles::batches(bench.size(64, 16)),
    ];
    for cycles in all {
        let case = format!("{}/fragmentation/{}", machine.kind, cycles.name);
        let (refused, held) = (format!("{case}/refused"), format!("{case}/reserved"));
        if !bench.wants(&refused) && !bench.wants(&held) {
            continue;
        }
        let limit = cycles.trace.peak + ROOM;
        let ours = ours(machine, &cycles, limit);
        let torch = machine.torch.as_ref().map(|torch| (torch.name, self::torch(torch, &cycles, limit)));
        table(&cycles, limit, &ours, &torch);
        let peers = |value: fn(&Outcome, &Cycles) -> f64| -> Vec<_> {
            torch.iter().map(|(name, outcome)| (*name, value(outcome, &cycles))).collect()
        };
        record(bench, &refused, COUNT, ours.refused, &peers(|outcome, _| outcome.refused));
        record(bench, &held, FACTOR, ours.worst(&cycles), &peers(Outcome::worst));
    }
}

fn ours(machine: &Machine, cycles: &Cycles, limit: u64) -> Outcome {
    let pool = machine.builder(1).memory_limit(limit).build().expect("the device can be opened");
    let ours = Contender::new(&pool, cycles.trace.slots, |_| Ours);
    let (mut outcome, mut from) = (Outcome { refused: 0.0, reserved: Vec::new() }, 0);
    for &end in &cycles.ends {
        outcome.refused += ours.replay(&cycles.trace.first[from..end]) as f64;
        outcome.reserved.push(ours.ask(|dev, _| dev.stats().reserved) as f64);
        from = end;
    }
    outcome
}

fn torch(torch: &crate::torch::Torch, cycles: &Cycles, limit: u64) -> Outcome {
    torch.load(&cycles.trace, 1, Some(limit));
    let (mut outcome, mut from) = (Outcome { refused: 0.0, reserved: Vec::new() }, 0);
    for &end in &cycles.ends {
        outcome.refused += torch.ask("first", (end - from) as u64);
        outcome.reserved.push(torch.ask("reserved", 0));
        from = end;
    }
    torch.ask("limit", 0);
    outcome
}

/// Bytes held and needed, over the cycles.
fn table(cycles: &Cycles, limit: u64, ours: &Outcome, torch: &Option<(&str, Outcome)>) {
    let mib = |bytes: f64| bytes / MIB as f64;
    let name = torch.as_ref().map_or("", |(name, _)| name);
    println!("{}, limit {:.0} MiB: MiB held after a cycle", cycles.name, mib(limit as f64));
    println!("{:>8} {:>10} {:>10} {name:>16}", "cycle", "needed", "gpu-pool");
    let last = cycles.ends.len() - 1;
    for tenth in 0..=10 {
        let at = last * tenth / 10;
        let (needed, held) = (mib(cycles.live[at] as f64), mib(ours.reserved[at]));
        let theirs = torch.as_ref().map_or(String::new(), |(_, torch)| format!("{:.0}", mib(torch.reserved[at])));
        println!("{:>8} {needed:>10.0} {held:>10.0} {theirs:>16}", at + 1);
    }
}
