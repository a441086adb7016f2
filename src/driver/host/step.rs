//! Steps: the choice of the next stream when operations run one at a time. Called by `machine::steps`.
//!
//! The *candidates* are the streams whose head operation can run now, by device and order of creation. The stream of
//! the last step comes first if it is one, so choice 0 means "no switch". The rule picks an index: a random number from
//! a seed, the next number of a list, or the operation that starts first in virtual time. No stream is ever parked.

use super::{
    Core, Engine, ExecutionOrder, HostCall, Key, Op, Progress, Stream, Time, Work,
    grace::GraceTimer,
    stream::State,
    timing::Cost,
    trace::{Step, Trace, What},
};
use crate::driver::KernelArg;
use std::{sync::Arc, thread, time::Instant};

pub(super) struct Stepper {
    rule: Rule,
    last: Option<Key>,
    pub trace: Trace,
    taken: usize,
    grace: Option<GraceTimer>,
}

enum Rule {
    Seeded(Draw),
    Replay(Arc<[u32]>),
    Virtual,
}

impl Stepper {
    /// `None` for a schedule that is not stepped.
    pub fn new(schedule: &ExecutionOrder) -> Option<Self> {
        let rule = match schedule {
            ExecutionOrder::Threaded => return None,
            ExecutionOrder::Seeded(seed) => Rule::Seeded(Draw::new(*seed)),
            ExecutionOrder::Replay(choices) => Rule::Replay(choices.clone()),
            ExecutionOrder::Virtual => Rule::Virtual,
        };
        Some(Stepper { rule, last: None, trace: Trace::default(), taken: 0, grace: None })
    }

    pub fn rests(&mut self) {
        self.grace = None;
    }

    /// `works`: whether a thread of the program is seen to run.
    pub fn has_waited(&mut self, submissions: u64, works: impl FnOnce() -> bool) -> bool {
        match &mut self.grace {
            Some(grace) if grace.submissions == submissions => grace.is_over(Instant::now(), works),
            other => {
                *other = Some(GraceTimer::new(Instant::now(), submissions));
                false
            }
        }
    }

    /// The candidates are sorted and not empty. Returns an index as a choice.
    fn pick(&mut self, core: &Core, candidates: &mut [Key]) -> usize {
        if let Some(at) = candidates.iter().position(|key| Some(*key) == self.last) {
            candidates[..=at].rotate_right(1);
        }
        match &mut self.rule {
            Rule::Seeded(draw) => draw.below(candidates.len()),
            Rule::Replay(choices) => choices.get(self.taken).map_or(0, |&choice| choice as usize % candidates.len()),
            Rule::Virtual => {
                let start = |key: &Key| {
                    let stream = core.streams.get(*key).expect("candidates are streams");
                    (core.start_time(stream), stream.device, stream.number)
                };
                (0..candidates.len()).min_by_key(|&i| start(&candidates[i])).expect("there are candidates")
            }
        }
    }

    pub fn choose(&mut self, core: &mut Core, mut candidates: Vec<Key>) -> Key {
        let choice = self.pick(core, &mut candidates);
        let key = candidates[choice];
        let stream = core.streams.get(key).expect("candidates are streams");
        let op = stream.queue.front().expect("candidates have an operation");
        let (device, number, what) = (stream.device, stream.number, core.what(op));
        let (submitted, place) = (op.submitted, op.place);
        let (choice, candidates) = (choice as u32, candidates.len() as u32);
        let time = core.book(key);
        self.trace.push(Step { device, stream: number, what, choice, candidates, time, submitted, place });
        self.taken += 1;
        self.last = Some(key);
        key
    }

    pub fn was_forced(&mut self, key: Key, step: Step) {
        self.trace.push(step);
        self.taken += 1;
        self.last = Some(key);
    }

    /// The last step was an attempt of a kernel that has not finished.
    pub fn attempted(&mut self) {
        self.trace.attempted();
    }
}

/// A small random generator (splitmix64) with phases, in which it mostly stays with a stream or switches often.
struct Draw {
    state: u64,
    /// How many of 64 draws stay with the stream in this phase.
    stays: u64,
    left: u64,
}

impl Draw {
    fn new(seed: u64) -> Self {
        Draw { state: seed, stays: 0, left: 0 }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        if self.left == 0 {
            self.stays = [0, 0, 32, 56, 62][(self.next() % 5) as usize];
            self.left = 4 + self.next() % 60;
        }
        self.left -= 1;
        if self.next() % 64 < self.stays { 0 } else { (self.next() % n as u64) as usize }
    }
}

impl Core {
    /// By device and order of creation.
    pub fn candidates(&self) -> Vec<Key> {
        let mut found: Vec<(usize, usize, Key)> = Vec::new();
        for key in self.streams.keys() {
            let Some(stream) = self.streams.get(key) else { continue };
            if stream.queue.front().is_some_and(|op| self.can_run(stream, op)) {
                found.push((stream.device, stream.number, key));
            }
        }
        found.sort_unstable();
        found.into_iter().map(|(.., key)| key).collect()
    }

    /// Streams whose head operation is a kernel that was tried and has not finished.
    pub fn spinners(&self) -> Vec<Key> {
        let spins = |key: &Key| self.streams.get(*key).is_some_and(|s| s.tried.is_some() && !s.queue.is_empty());
        self.streams.keys().into_iter().filter(spins).collect()
    }

    pub fn can_go_on(&self) -> bool {
        let can = |stream: &Stream| stream.queue.front().is_some_and(|op| self.can_run(stream, op));
        self.streams.keys().into_iter().any(|key| self.streams.get(key).is_some_and(can))
    }

    pub fn has_work(&self) -> bool {
        self.streams.keys().into_iter().any(|key| self.streams.get(key).is_some_and(|s| !s.queue.is_empty()))
    }

    pub fn forced_step(&mut self, key: Key) -> Option<Step> {
        let stream = self.streams.get(key)?;
        let op = stream.queue.front()?;
        let (what, submitted, place) = (self.what(op), op.submitted, op.place);
        let (device, stream) = (stream.device, stream.number);
        let time = self.book(key);
        Some(Step { device, stream, what, choice: 0, candidates: 1, time, submitted, place })
    }

    fn can_run(&self, stream: &Stream, op: &Op) -> bool {
        match op.work {
            Work::WaitEvent(record) => !matches!(self.progress(record), Progress::Pending),
            // The word's memory was freed: `start` reports that.
            Work::WaitValue { address, value } => match self.flag(address, false) {
                Ok(flag) => flag.is_some_and(|flag| flag.reached(value)),
                Err(_) => true,
            },
            _ => stream.tried != Some(self.completions),
        }
    }

    /// Whether the stream's kernel has been tried, and nothing has completed since.
    pub fn is_tried(&self, key: Key) -> bool {
        self.streams.get(key).is_some_and(|stream| stream.tried == Some(self.completions))
    }

    pub fn settle(&mut self, key: Key) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.state = if stream.queue.is_empty() { State::Idle } else { State::Ready };
        if stream.state == State::Idle && stream.destroyed {
            self.streams.remove(key);
        }
    }

    pub fn what(&self, op: &Op) -> What {
        match &op.work {
            Work::Copy { bytes, .. } => match op.engine {
                Engine::Up => What::CopyUp(*bytes),
                Engine::Down => What::CopyDown(*bytes),
                Engine::Peer => What::CopyPeer(*bytes),
                _ => What::CopyWithin(*bytes),
            },
            Work::FillU8 { bytes, .. } => What::Fill(*bytes),
            Work::FillU32 { count, .. } => What::Fill(4 * *count),
            Work::Kernel { name, .. } => What::Kernel(name),
            #[cfg(feature = "blas")]
            Work::Gemm(_) => What::Gemm,
            Work::HostFunction(_) => What::HostFunction,
            Work::WaitEvent(record) => {
                What::WaitEvent { device: record.device, stream: record.number, operations: record.seq }
            }
            Work::Stamp { .. } => What::Stamp,
            Work::WriteValue { value, .. } => What::WriteValue(*value),
            Work::WaitValue { value, .. } => What::WaitValue(*value),
        }
    }

    pub fn cost(&self, work: &Work) -> Cost {
        match work {
            Work::Copy { dst, src, bytes } => {
                let (from, to) = (self.memory.side(*src), self.memory.side(*dst));
                Cost::Copy { from, to, bytes: *bytes }
            }
            Work::FillU8 { bytes, .. } => Cost::Fill { bytes: *bytes },
            Work::FillU32 { count, .. } => Cost::Fill { bytes: 4 * *count },
            Work::Kernel { name, dims, args, .. } => {
                let all = |of: bool| {
                    let bytes = |arg: &KernelArg| match *arg {
                        KernelArg::Slice { bytes, write, .. } if write == of => bytes,
                        _ => 0,
                    };
                    args.iter().map(bytes).sum()
                };
                Cost::Kernel { name, dims: *dims, read: all(false), written: all(true) }
            }
            #[cfg(feature = "blas")]
            Work::Gemm(gemm) => Cost::Gemm { m: gemm.m, n: gemm.n, k: gemm.k, count: gemm.count, size: gemm.of.size() },
            Work::HostFunction(_) => Cost::HostFunction,
            Work::WaitEvent(_) => Cost::WaitEvent,
            Work::Stamp { .. } => Cost::Stamp,
            Work::WriteValue { .. } => Cost::WriteValue,
            Work::WaitValue { .. } => Cost::WaitValue,
        }
    }

    /// The calling thread submits an operation. Returns the virtual time at which the operation is in its stream.
    pub fn price(&mut self, work: &Work) -> Time {
        if self.clock.is_none() {
            return 0;
        }
        let cost = self.cost(work);
        self.clock.as_mut().map_or(0, |clock| clock.submit(thread::current().id(), &cost))
    }

    /// The thread knows the result from the virtual time `learnt` on.
    pub fn called(&mut self, call: HostCall, learnt: Time) {
        if let Some(clock) = &mut self.clock {
            let me = thread::current().id();
            clock.raise(me, learnt);
            clock.call(me, call);
        }
    }

    /// The virtual time at which all predecessors of the head operation have finished.
    fn ready_time(&self, stream: &Stream, op: &Op) -> Time {
        let own = stream.finishes.last().copied().unwrap_or(0).max(op.submitted);
        match op.work {
            Work::WaitEvent(record) => own.max(self.streams.get(record.stream).map_or(0, |s| s.finish(record.seq))),
            Work::WaitValue { address, value } => own.max(self.written(address, value)),
            // The last try failed, so the kernel can only finish after the latest operation so far.
            Work::Kernel { .. } if stream.tried.is_some() => own.max(self.latest),
            _ => own,
        }
    }

    fn start_time(&self, stream: &Stream) -> Time {
        let (Some(clock), Some(op)) = (&self.clock, stream.queue.front()) else { return 0 };
        clock.start(stream.device, &self.cost(&op.work), self.ready_time(stream, op))
    }

    /// Returns its start and end.
    fn book(&mut self, key: Key) -> (Time, Time) {
        let Some(stream) = self.streams.get(key) else { return (0, 0) };
        let (device, Some(op)) = (stream.device, stream.queue.front()) else { return (0, 0) };
        let (cost, ready) = (self.cost(&op.work), self.ready_time(stream, op));
        let latest = self.latest;
        let may_spin = matches!(op.work, Work::Kernel { .. });
        let written = if let Work::WriteValue { address, value } = op.work { Some((address, value)) } else { None };
        let Some(clock) = &mut self.clock else { return (0, 0) };
        self.unbooked = may_spin.then(|| (clock.unbooked(device), latest));
        let (start, finish) = clock.book(device, &cost, ready);
        if let Some((address, value)) = written {
            let history = self.words.entry(address).or_default();
            history.push((value, finish));
            if history.len() > 64 {
                history.remove(0);
            }
        }
        self.latest = self.latest.max(finish);
        self.booked = finish;
        (start, finish)
    }

    /// An attempt takes no virtual time: the number of attempts may depend on real time.
    pub fn unbook(&mut self) {
        if let (Some(clock), Some((before, latest))) = (&mut self.clock, self.unbooked.take()) {
            clock.restore(before);
            self.latest = latest;
        }
    }

    /// The virtual time at which a stream's write raised a word to at least `value`; 0 if the host wrote it.
    fn written(&self, address: u64, value: u64) -> Time {
        let Some(history) = self.words.get(&address) else { return 0 };
        history.iter().find(|(v, _)| v.wrapping_sub(value) as i64 >= 0).map_or(0, |(_, time)| *time)
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/host/step_tests.rs"]
mod tests;
