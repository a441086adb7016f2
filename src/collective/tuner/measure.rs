//! Measuring, on all devices of a pool at once. All come to the same answers: what decides is exchanged before it does.

use super::{Limits, Measured, multiprocessors};
use crate::{
    Device, DeviceBuffer, GpuPool, ReduceOp,
    collective::{
        Group,
        algorithm::{Algorithm, fused::Fused, fused_events::FusedEvents, ll::Ll},
    },
    error::Result,
};
use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

/// The least that is pushed, as a power of two of bytes. Below, a push is the shortest way on any machine.
const LEAST: u32 = 10;
/// Bytes of an all-reduce with large parts.
pub(super) const LARGE: usize = 32 << 20;
/// Bytes that a device's pool may take for large parts to be measured.
const ROOMY: u64 = 256 << 20;
/// Numbers of blocks that are tried on large parts, the likeliest first.
const BLOCKS: [u32; 4] = [16, 64, 32, 8];
/// Turns of each side, after one that does not count.
const TURNS: usize = 3;
/// How long a turn should be, within these numbers of calls.
const TURN: Duration = Duration::from_micros(250);
const CALLS: RangeInclusive<u32> = 2..=24;
/// Who is slower by less is not slower: back to back, small ones take the time that the host needs to launch them.
const TIE: f64 = 1.05;

/// Measures until the time is up: what each device has found, which is the same. With all-reduces of up to `large`
/// bytes.
pub(super) fn measure(pool: &GpuPool, budget: Duration, large: usize) -> Result<Vec<Measured>> {
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

/// What is compared: an algorithm, with limits of which it uses the numbers of blocks.
type Side = (&'static dyn Algorithm, Limits);

/// One device's part.
struct Trial<'d> {
    group: Group<'d>,
    x: DeviceBuffer<f32>,
    /// Bytes that packets have room for,
    room: usize,
    /// and of an all-reduce with large parts, if there is memory for it.
    large: Option<usize>,
    /// What kernels are like that are not on trial.
    default: Limits,
    end: Instant,
}

impl<'d> Trial<'d> {
    fn new(dev: &'d Device, end: Instant, large: usize) -> Result<Self> {
        let room = dev.worker.shared.signals.get().map_or(0, |signals| signals.push_bytes());
        let poor = dev.worker.cache.borrow().limit().is_some_and(|limit| limit < ROOMY);
        // All take the same, or they would not call the same.
        let large = if dev.exchange(poor)?.contains(&true) { None } else { Some(large) };
        let x = noise(dev, room.max(large.unwrap_or(4)) / 4)?;
        let default = Limits::default_of(dev.count()).capped(multiprocessors(&dev.worker.shared));
        Ok(Trial { group: dev.everyone(), x, room, large, default, end })
    }

    fn run(mut self) -> Result<Measured> {
        let default = self.default;
        let mut measured = Measured::default();
        if self.room >> LEAST > 0 {
            let sides: [Side; 2] = [(&Ll, default), (&Fused, default)];
            let pushed = crossing(LEAST..=self.room.ilog2(), |log| {
                let times = self.contest(&sides, 1 << log)?;
                Ok(times.map(|times| times[0] <= times[1] * TIE))
            })?;
            measured.barriers = match pushed {
                Crossing::Unknown => false,
                Crossing::Never => true,
                Crossing::UpTo(log) => log < self.room.ilog2(),
            };
            measured.push = match pushed {
                Crossing::Unknown => None,
                Crossing::Never => Some(0),
                // A power of two that is the last one has room for all.
                Crossing::UpTo(log) if log == self.room.ilog2() => Some(self.room),
                Crossing::UpTo(log) => Some(1 << log),
            };
        }
        if let Some(large) = self.large {
            // As many as are at work at once: more would wait for those to end, and those for their peers' others.
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

    /// Times of a call of each side, the slowest device's median, in microseconds; none when it would take too long.
    fn contest(&mut self, sides: &[Side], bytes: usize) -> Result<Option<Vec<f64>>> {
        let dev = self.group.device();
        // What is new to the device, and threads that sleep, are in the first.
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

    /// The time of a call, of so many that depend on one another.
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

/// The first whose time nobody beats by more than a tie.
pub(super) fn best(times: impl Iterator<Item = (u32, f64)>) -> (u32, f64) {
    times.reduce(|best, next| if next.1 * TIE < best.1 { next } else { best }).expect("somebody plays")
}

/// Up to where the first of two sides wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Crossing {
    /// Up to this step.
    UpTo(u32),
    /// It loses even at the first step.
    Never,
    /// There was no time to find out.
    Unknown,
}

/// Finds the last step at which `wins`, if it wins up to some step and loses from there on. `None`: no more time.
pub(super) fn crossing<E>(
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
