//! The sides that run in this process, and the work that they do.

use std::{hint::black_box, sync::Barrier, time::Instant};

use crate::trace::{Step, Trace};
use gpu_pool::{Device, DeviceBuffer, GpuPool, PerDevice};

/// A round with this many operations needs no warm-up round.
const LONG: usize = 1000;

/// A way to get memory of a device on its thread.
pub trait Source: 'static {
    type Block: 'static;
    /// None when no memory is left.
    fn take(&self, dev: &Device, bytes: usize) -> Option<Self::Block>;
    fn give(&self, block: Self::Block);
}

/// This crate's pool.
pub struct Ours;

impl Source for Ours {
    type Block = DeviceBuffer<u8>;

    #[inline]
    fn take(&self, dev: &Device, bytes: usize) -> Option<DeviceBuffer<u8>> {
        // SAFETY: nobody reads it.
        unsafe { dev.uninit(bytes) }.ok()
    }

    #[inline]
    fn give(&self, block: DeviceBuffer<u8>) {
        drop(block);
    }
}

/// The work of a round.
#[derive(Clone, Copy)]
pub enum Work<'t> {
    /// Bytes taken and given back.
    Pair(usize),
    /// The repeatable part of a trace.
    Trace(&'t Trace),
}

impl Work<'_> {
    /// Operations per round; a pair counts as one.
    fn operations(self) -> usize {
        match self {
            Work::Pair(_) => 1,
            Work::Trace(trace) => trace.operations(),
        }
    }
}

struct State<S: Source> {
    source: S,
    slots: Vec<Option<S::Block>>,
}

impl<S: Source> State<S> {
    /// Replays the steps. Returns how many requests were refused.
    fn replay(&mut self, dev: &Device, steps: &[Step]) -> usize {
        let mut refused = 0;
        for step in steps {
            let slot = &mut self.slots[step.slot as usize];
            match step.bytes {
                0 => {
                    if let Some(block) = slot.take() {
                        self.source.give(block);
                    }
                }
                bytes => {
                    *slot = self.source.take(dev, bytes as usize);
                    refused += usize::from(slot.is_none());
                }
            }
        }
        refused
    }

    fn round(&mut self, dev: &Device, work: Work<'_>) -> usize {
        match work {
            Work::Pair(bytes) => match self.source.take(dev, bytes) {
                Some(block) => {
                    self.source.give(black_box(block));
                    0
                }
                None => 1,
            },
            Work::Trace(trace) => self.replay(dev, &trace.again),
        }
    }
}

impl<S: Source> Drop for State<S> {
    fn drop(&mut self) {
        self.slots.drain(..).flatten().for_each(|block| self.source.give(block));
    }
}

/// One side on every device of a pool. It keeps its memory from turn to turn.
pub struct Contender<'p, S: Source> {
    pool: &'p GpuPool,
    states: PerDevice<State<S>>,
}

impl<'p, S: Source> Contender<'p, S> {
    /// With room for `slots` blocks.
    pub fn new(pool: &'p GpuPool, slots: usize, make: impl Fn(&Device) -> S + Sync) -> Self {
        let empty = || (0..slots).map(|_| None).collect();
        let states = pool.per_device(|dev, _| Ok(State { source: make(dev), slots: empty() }));
        Contender { pool, states: states.expect("the sides can be set up") }
    }

    /// With the first part of a trace done, on every device.
    pub fn with(pool: &'p GpuPool, trace: &Trace, make: impl Fn(&Device) -> S + Sync) -> Self {
        let this = Self::new(pool, trace.slots, make);
        let refused = this.pool.run(|dev, _| Ok(this.states.borrow_mut(dev)?.replay(dev, &trace.first)));
        assert!(refused.expect("replayed").iter().all(|&refused| refused == 0), "there is memory for the trace");
        this
    }

    /// Nanoseconds an operation, one sample for each of the first `devices`, which start together.
    pub fn time(&self, devices: usize, work: Work<'_>, rounds: usize, samples: &mut Vec<f64>) {
        let all: Vec<usize> = (0..devices).collect();
        let start = Barrier::new(devices);
        let times = self.pool.on(&all).run(|dev, _| {
            let state = &mut *self.states.borrow_mut(dev)?;
            // A warm-up round for threads and caches; a long replay needs none.
            let mut refused = if work.operations() < LONG { state.round(dev, work) } else { 0 };
            start.wait();
            let clock = Instant::now();
            for _ in 0..rounds {
                refused += state.round(dev, work);
            }
            let nanos = clock.elapsed().as_secs_f64() * 1e9;
            assert_eq!(refused, 0, "there is memory for everything");
            Ok(nanos / (rounds * work.operations()) as f64)
        });
        samples.extend(times.expect("every call succeeds"));
    }

    /// Replays steps on device 0. Returns how many requests were refused.
    pub fn replay(&self, steps: &[Step]) -> usize {
        self.run(|dev, state| state.replay(dev, steps))
    }

    /// Asks device 0's source.
    pub fn ask<R: Send>(&self, question: impl Fn(&Device, &S) -> R + Sync) -> R {
        self.run(|dev, state| question(dev, &state.source))
    }

    fn run<R: Send>(&self, f: impl Fn(&Device, &mut State<S>) -> R + Sync) -> R {
        let mut done = self.pool.on(&[0]).run(|dev, _| Ok(f(dev, &mut *self.states.borrow_mut(dev)?)));
        done.as_mut().expect("device 0 is healthy").remove(0)
    }

    /// Drops the values on their threads, and waits for that: all their memory is free when this returns.
    pub fn end(self) {
        let pool = self.pool;
        drop(self);
        pool.run(|_, _| Ok(())).expect("the device threads are there");
    }
}
