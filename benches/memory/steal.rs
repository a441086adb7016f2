//! Memory that one stream has used, taken by another one when no other memory is left: the cost and the number of
//! waits.

use std::time::Instant;

use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, PerDevice, Result, Stream};

use crate::{
    Machine, record, spin,
    support::{Bench, COUNT, MICROSECONDS, NANOSECONDS, Side},
};

const BLOCK: usize = 2 << 20;
const LIMIT: u64 = 64 << 20;
/// Clock cycles for which each block is in use: about 20 us.
const CLOCKS: u64 = 40_000;

/// The state of the work that uses the memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Last {
    /// It is running.
    InFlight,
    /// It is running, and the other stream comes after it anyway.
    Ordered,
    /// It is over.
    Over,
}

struct State {
    first: Stream,
    second: Stream,
    /// The number of blocks that the limit allows.
    blocks: usize,
}

struct Sample {
    /// Nanoseconds per allocation.
    allocate: f64,
    /// Microseconds per allocation with its first use, measured on the host.
    first_use: f64,
    /// Waits per allocation.
    waits: f64,
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let kind = machine.kind;
    let pool = machine.builder(1).module(&spin::MODULE).memory_limit(LIMIT).build().expect("the device can be opened");
    let states = pool.per_device(|dev, _| {
        let blocks = fill(dev)?.len();
        Ok(State { first: dev.stream()?, second: dev.stream()?, blocks })
    });
    let states = &states.expect("two streams");
    let turn = |last, same| sample(&pool, states, last, same);
    for (name, last) in [("in_flight", Last::InFlight), ("ordered", Last::Ordered), ("over", Last::Over)] {
        bench.set_turns(bench.size(3, 1), bench.size(31, 5));
        let case = format!("{kind}/steal/{name}");
        let peers = vec![Side::new("same stream", || turn(last, true).allocate)];
        bench.compare(&case, NANOSECONDS, Side::new("gpu-pool", || turn(last, false).allocate), peers);
        let peers = vec![Side::new("same stream", || turn(last, true).first_use)];
        let ours = Side::new("gpu-pool", || turn(last, false).first_use);
        bench.compare(&format!("{case}/first_use"), MICROSECONDS, ours, peers);
        let waits = format!("{case}/waits");
        if bench.wants(&waits) {
            let most = (0..5).map(|_| turn(last, false).waits).fold(0.0, f64::max);
            record(bench, &waits, COUNT, most, &[]);
        }
    }
}

/// Allocates all that the limit allows.
fn fill(dev: &Device) -> Result<Vec<DeviceBuffer<u64>>> {
    let mut all = Vec::new();
    loop {
        // SAFETY: nobody reads it.
        match unsafe { dev.uninit(BLOCK / 8) } {
            Ok(block) => all.push(block),
            Err(Error::OutOfMemory { .. }) => return Ok(all),
            Err(error) => return Err(error),
        }
    }
}

/// Uses all blocks on the first stream, drops them, and takes all of them for the second stream (or for the first
/// again).
fn sample(pool: &GpuPool, states: &PerDevice<State>, last: Last, same: bool) -> Sample {
    let done = pool.run(|dev, _| {
        let State { first, second, blocks } = &*states.borrow(dev)?;
        let second = &*dev.on(if same { first } else { second });
        let first = &*dev.on(first);
        // SAFETY: nobody reads them.
        let take =
            |dev: &Device| (0..*blocks).map(|_| unsafe { dev.uninit::<u64>(BLOCK / 8) }).collect::<Result<Vec<_>>>();
        let mut used = take(first)?;
        used.iter_mut().try_for_each(|block| spin::spin(first, block, CLOCKS))?;
        match last {
            Last::InFlight => {}
            Last::Ordered => second.wait(&first.record()?)?,
            Last::Over => first.synchronize()?,
        }
        drop(used);
        let before = dev.stats().waits;
        let clock = Instant::now();
        let mut taken = take(second)?;
        let allocate = clock.elapsed();
        taken.iter_mut().try_for_each(|block| spin::spin(second, block, 0))?;
        let first_use = clock.elapsed();
        let waits = dev.stats().waits - before;
        drop(taken);
        first.synchronize()?;
        second.synchronize()?;
        let each = |count: f64| count / *blocks as f64;
        Ok(Sample {
            allocate: each(allocate.as_secs_f64() * 1e9),
            first_use: each(first_use.as_secs_f64() * 1e6),
            waits: each(waits as f64),
        })
    });
    done.expect("the limit is known").remove(0)
}
