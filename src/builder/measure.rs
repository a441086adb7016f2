//! The collectives' limits of a pool: from the table, measured on all devices at once, or the defaults.
//!
//! `builder/open.rs` calls [`tune`] when the pool's peers and its signal pad are known.
//!
//! Invariant: all devices come to one answer. They exchange what decides before it does.

use crate::{
    Algorithm as Wish, Device, DeviceBuffer, GpuPool, ReduceOp, Tune,
    collective::{
        Group,
        algorithm::{Algorithm, fused::Fused, fused_events::FusedEvents, ll::Ll},
    },
    error::{Error, Result},
    fabric::limits::{Limits, Tuned, multiprocessors, table},
};
use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

/// How long measuring may take. A step that would take longer is not begun.
const BUDGET: Duration = Duration::from_millis(100);
/// The smallest message that is measured, as a power of two of bytes. Below, the LL algorithm is the fastest on any
/// machine.
const LEAST: u32 = 10;
/// Bytes of an all-reduce with large parts.
const LARGE: usize = 32 << 20;
/// Bytes that a device's pool may take for large parts to be measured.
const ROOMY: u64 = 256 << 20;
/// Numbers of blocks that are tried on large parts. The likeliest one comes first.
const BLOCKS: [u32; 4] = [16, 64, 32, 8];
/// Turns of each side. One more comes before them and does not count.
const TURNS: usize = 3;
/// How long a turn should be. It has at least and at most these numbers of calls.
const TURN: Duration = Duration::from_micros(250);
const CALLS: RangeInclusive<u32> = 2..=24;
/// A side that is slower by less than this factor is not slower: back to back, small collectives take the time that the
/// host needs to launch them.
const TIE: f64 = 1.05;

/// The limits of a pool whose peers and signal pad are known. It never fails: a limit that cannot be measured has its
/// default.
pub(crate) fn tune(pool: &GpuPool, wish: Tune) -> Tuned {
    let shared = &pool.shared;
    let n = shared.devices();
    let default = |why: &str| Tuned::new(&shared.handles, why, Limits::default_of);
    let everyone: Vec<usize> = (0..n).collect();
    let software = shared.handles[0].driver.info().compute_capability == (0, 0);
    if wish == Tune::Off || software || n < 2 || !shared.are_direct(&everyone) {
        return default("default");
    }
    if shared.handles.iter().any(|handle| handle.sharers > 1) {
        return default("default, since devices share a GPU");
    }
    let name = &shared.handles[0].driver.info().name;
    let alike = shared.handles.iter().all(|handle| handle.driver.info().name == *name);
    if wish != Tune::Measure
        && alike
        && let Some(rows) = table::of(name)
    {
        return Tuned::new(&shared.handles, format!("table for {name}"), |members| table::between(rows, members));
    }
    let meets = shared.signals.get().is_some() && matches!(shared.algorithm, Wish::Auto | Wish::Direct);
    if wish == Tune::Table || !meets {
        return default("default");
    }
    match measure(pool, BUDGET, LARGE).map(|found| found[0]) {
        Ok(Measured { ll: None, large_blocks: None, .. }) => default("default, since measuring took too long"),
        Ok(measured) => {
            Tuned::new(&shared.handles, "measured when the pool was built", |members| measured.limits(n, members))
        }
        Err(error) => {
            event!(warn, %error, "the collectives could not be measured; they go by defaults");
            default("default, since measuring failed")
        }
    }
}

/// What was measured, for all devices of a pool together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Measured {
    /// `Limits::ll`; none: there was no time to measure it.
    ll: Option<usize>,
    /// `Limits::large_blocks`; none: there was no time to measure it.
    large_blocks: Option<u32>,
    /// Whether barriers were faster than packets from some size on. Then they are used for all larger sizes, since the
    /// eager algorithm and inboxes are not measured.
    barriers: bool,
}

impl Measured {
    /// The limits for some of a pool's devices. One device then sends as much in all as it does in a collective of all
    /// devices.
    fn limits(self, devices: usize, members: usize) -> Limits {
        let default = Limits::default_of(members);
        let ll = self.ll.map_or(default.ll, |bytes| bytes * (devices - 1) / members.saturating_sub(1).max(1));
        // Two devices have one link each. What is best for them says nothing on more, and the reverse.
        let blocks = self.large_blocks.filter(|_| (members > 2) == (devices > 2));
        let large_blocks = blocks.unwrap_or(default.large_blocks);
        let [eager, eager_whole] =
            [default.eager, default.eager_whole].map(|most| if self.barriers { 0 } else { most });
        // Inboxes hold half the bytes of packets for the same data.
        let [inbox, inbox_whole] =
            [default.inbox, default.inbox_whole].map(|most| if self.barriers { most.min(2 * ll) } else { most });
        let (slots, norm_pull) = if self.barriers { (0, 0) } else { (default.slots, default.norm_pull) };
        Limits { ll, inbox, inbox_whole, slots, norm_pull, eager, eager_whole, large_blocks, ..default }
    }
}

/// Measures until the time is up, with all-reduces of up to `large` bytes. All devices find the same.
fn measure(pool: &GpuPool, budget: Duration, large: usize) -> Result<Vec<Measured>> {
    let end = Instant::now() + budget;
    pool.run(|dev, _| {
        let found = Trial::new(dev, end, large)?.run();
        // The pool begins without what was taken for this, unless it is to begin with some.
        if dev.worker.shared.memory.reserve.is_none() {
            dev.trim()?;
        }
        found
    })
}

/// One side of a comparison: an algorithm, and the limits from which it takes its numbers of blocks.
type Side = (&'static dyn Algorithm, Limits);

/// One device's part.
struct Trial<'d> {
    group: Group<'d>,
    x: DeviceBuffer<f32>,
    /// Most bytes that packets have room for.
    room: usize,
    /// Bytes of an all-reduce with large parts, if there is memory for it.
    large: Option<usize>,
    /// The limits that are not on trial.
    default: Limits,
    end: Instant,
}

impl<'d> Trial<'d> {
    fn new(dev: &'d Device, end: Instant, large: usize) -> Result<Self> {
        let room = dev.worker.shared.signals.get().map_or(0, |signals| signals.ll_bytes());
        let poor = dev.worker.cache.borrow().limit().is_some_and(|limit| limit < ROOMY);
        // All take the same, or they would not call the same.
        let large = if dev.exchange(poor)?.contains(&true) { None } else { Some(large) };
        let x = noise(dev, room.max(large.unwrap_or(4)) / 4)?;
        let default = Limits::default_of(dev.count()).capped(multiprocessors(&dev.worker.shared.handles));
        Ok(Trial { group: dev.everyone(), x, room, large, default, end })
    }

    fn run(mut self) -> Result<Measured> {
        let default = self.default;
        let mut measured = Measured::default();
        if self.room >> LEAST > 0 {
            let sides: [Side; 2] = [(&Ll, default), (&Fused, default)];
            let ll = crossing(LEAST..=self.room.ilog2(), |log| {
                let times = self.contest(&sides, 1 << log)?;
                Ok::<_, Error>(times.map(|times| times[0] <= times[1] * TIE))
            })?;
            measured.barriers = match ll {
                Crossing::Unknown => false,
                Crossing::Never => true,
                Crossing::UpTo(log) => log < self.room.ilog2(),
            };
            measured.ll = match ll {
                Crossing::Unknown => None,
                Crossing::Never => Some(0),
                // A power of two that is the last one has room for all.
                Crossing::UpTo(log) if log == self.room.ilog2() => Some(self.room),
                Crossing::UpTo(log) => Some(1 << log),
            };
        }
        if let Some(large) = self.large {
            // No more blocks than run at once: the others would wait for these to end, and these for their peers' other
            // blocks.
            let blocks: Vec<u32> = BLOCKS.into_iter().filter(|&blocks| blocks <= default.blocks).collect();
            // Software GPUs are not tuned, but tests measure them.
            let meets = self.group.device().worker.shared.signals.get().is_some();
            let kernel: &'static dyn Algorithm = if meets { &Fused } else { &FusedEvents };
            let of = |&blocks| -> Side { (kernel, Limits { large: 0, large_blocks: blocks, ..default }) };
            let sides: Vec<Side> = blocks.iter().map(of).collect();
            if let Some(times) = self.contest(&sides, large)?
                && !sides.is_empty()
            {
                let (blocks, _) = best(blocks.into_iter().zip(times));
                measured.large_blocks = Some(blocks);
            }
        }
        Ok(measured)
    }

    /// The time of a call of each side, in microseconds: the slowest device's median. None when measuring would take
    /// too long.
    fn contest(&mut self, sides: &[Side], bytes: usize) -> Result<Option<Vec<f64>>> {
        let dev = self.group.device();
        // The first turn pays for what is new to the device and for threads that sleep.
        let mut once = Duration::ZERO;
        for side in sides {
            self.turn(side, bytes, 1)?;
            once = once.max(self.turn(side, bytes, 1)?);
        }
        let left = self.end.saturating_duration_since(Instant::now());
        let (once, left): (Vec<_>, Vec<_>) = dev.exchange((once, left))?.into_iter().unzip();
        let once = once.into_iter().max().unwrap_or_default().max(Duration::from_nanos(1));
        let calls = (TURN.as_nanos() / once.as_nanos()) as u32;
        let calls = calls.clamp(*CALLS.start(), *CALLS.end());
        if left.into_iter().min().unwrap_or_default() < once * calls * (TURNS * sides.len()) as u32 {
            return Ok(None);
        }
        let mut times = vec![Vec::with_capacity(TURNS); sides.len()];
        for turn in 0..TURNS {
            for k in 0..sides.len() {
                let k = (turn + k) % sides.len();
                times[k].push(self.turn(&sides[k], bytes, calls)?.as_secs_f64() * 1e6);
            }
        }
        let medians: Vec<f64> = times.into_iter().map(median).collect();
        let all = dev.exchange(medians)?;
        Ok(Some((0..sides.len()).map(|k| all.iter().map(|of| of[k]).fold(0.0, f64::max)).collect()))
    }

    /// The time of one of so many calls, each of which depends on the one before.
    fn turn(&mut self, side: &Side, bytes: usize, calls: u32) -> Result<Duration> {
        let dev = self.group.device();
        dev.barrier()?;
        let clock = Instant::now();
        for _ in 0..calls {
            let x = self.x.slice_mut(..bytes / 4);
            self.group.all_reduce_by(x, ReduceOp::Avg, side.0, &side.1)?;
        }
        dev.synchronize()?;
        Ok(clock.elapsed() / calls)
    }
}

/// Numbers from -1 to 1 that differ on each device; averages of them stay there.
fn noise(dev: &Device, len: usize) -> Result<DeviceBuffer<f32>> {
    let mut state = dev.rank() as u64 + 1;
    let block: Vec<f32> = (0..len.min(1 << 14))
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    let mut x = dev.zeros::<f32>(len)?;
    dev.upload_into(&block, &mut x.slice_mut(..block.len()))?;
    let mut done = block.len();
    while done < len {
        let more = done.min(len - done);
        let (from, to) = x.split_at_mut(done);
        dev.copy(&from.slice_mut(..more), &mut to.slice_mut(..more))?;
        done += more;
    }
    Ok(x)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The first one whose time no other one beats by more than a tie.
fn best(times: impl Iterator<Item = (u32, f64)>) -> (u32, f64) {
    times.reduce(|best, next| if next.1 * TIE < best.1 { next } else { best }).expect("somebody plays")
}

/// Up to where the first of two sides wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crossing {
    /// Up to this step.
    UpTo(u32),
    /// It loses even at the first step.
    Never,
    /// There was no time to find out.
    Unknown,
}

/// Finds the last step at which `wins`, if it wins up to some step and loses from there on. `None`: no more time.
fn crossing<E>(
    steps: RangeInclusive<u32>,
    mut wins: impl FnMut(u32) -> Result<Option<bool>, E>,
) -> Result<Crossing, E> {
    let (mut low, mut high) = (*steps.start(), *steps.end() + 1);
    // All below `low` win, and all from `high` on lose.
    while low < high {
        let middle = low + (high - low) / 2;
        match wins(middle)? {
            None => return Ok(Crossing::Unknown),
            Some(true) => low = middle + 1,
            Some(false) => high = middle,
        }
    }
    Ok(if low == *steps.start() { Crossing::Never } else { Crossing::UpTo(low - 1) })
}

#[cfg(test)]
#[path = "measure_tests.rs"]
mod tests;
