//! The scheduler: plain data under the machine's lock.
//!
//! `push` appends to a stream. `pick_next` chooses a ready stream. `start` takes its head operation if it can run,
//! completes it at once if it is only bookkeeping, and parks the stream otherwise (`wait`). `finish` releases the
//! engine and the byte ranges of the operation and unparks the streams that waited for them.

use super::exec::{Died, Span};
use super::{
    Ended, Engine, Event, ExecutionOrder, Graph, Home, HostConfig, Job, Key, MachineConfig, Memory, Op, Operand,
    Progress, Stream, Time, Work, access::Active, event::Stamp, fault, peer::Rights, slab::Slab, stream::State,
    timing::Clock,
};
use crate::driver::{Address, DriverResult, Fault};
use std::collections::{HashMap, VecDeque};
use std::{any::Any, mem, time::Instant};

pub(super) struct Core {
    pub memory: Memory,
    pub rights: Rights,
    pub devices: Vec<Device>,
    pub streams: Slab<Stream>,
    pub events: Slab<Event>,
    pub modules: Slab<Module>,
    pub graphs: Slab<Graph>,
    /// In order of arrival.
    pub ready: VecDeque<Key>,
    conflicted: Vec<Key>,
    pub values: Vec<Awaited>,
    pub active: Active,
    pub spinning: Vec<Key>,
    /// Then streams are never parked: see `step`.
    pub stepped: bool,
    pub clock: Option<Box<dyn Clock>>,
    pub latest: Time,
    pub booked: Time,
    /// Before the current step was booked, if the step may turn out to be an attempt.
    pub unbooked: Option<(Box<dyn Any + Send>, Time)>,
    /// Values and virtual times of the writes to words, by address.
    pub words: HashMap<Address, Vec<(u64, Time)>>,
    pub submissions: u64,
    /// And of attempts of kernels that have advanced.
    pub completions: u64,
    /// They own closures of the user, so they are dropped without the lock.
    pub graveyard: Vec<Op>,
}

#[derive(Default)]
pub(super) struct Device {
    pub lost: Option<Fault>,
    pub streams: usize,
    engines: [EngineState; Engine::EXCLUSIVE],
}

#[derive(Default)]
struct EngineState {
    busy: bool,
    queue: VecDeque<Key>,
    completed: u64,
}

pub(super) struct Module {
    pub device: usize,
    /// One of the crate's own. Their kernels call no code of the user's, and wait for nothing but words.
    pub own: bool,
}

pub(super) struct Awaited {
    pub stream: Key,
    pub address: Address,
    pub value: u64,
}

pub(super) enum Start {
    /// The worker performs it and then calls `finish`.
    Run,
    Done,
    /// The stream is idle, parked, or destroyed.
    Left,
}

#[derive(PartialEq, Eq)]
pub(super) enum Next {
    Continue,
    /// Take other streams first: they waited for the engine that this stream held.
    Yield,
    /// Nothing: the device is lost.
    Left,
}

impl Core {
    pub fn new(configs: &[HostConfig], machine: &MachineConfig) -> DriverResult<Self> {
        let memory = Memory::new(configs.iter().map(|config| config.memory), machine.dry)?;
        let is_virtual = machine.schedule == ExecutionOrder::Virtual;
        let tag = memory.first_window();
        Ok(Core {
            memory,
            rights: Rights::new(configs),
            devices: configs.iter().map(|_| Device::default()).collect(),
            streams: Slab::new(tag),
            events: Slab::new(tag),
            modules: Slab::new(tag),
            graphs: Slab::new(tag),
            ready: VecDeque::new(),
            conflicted: Vec::new(),
            values: Vec::new(),
            active: Active::new(),
            spinning: Vec::new(),
            stepped: machine.schedule != ExecutionOrder::Threaded,
            clock: machine.topology.as_ref().filter(|_| is_virtual).map(|machine| machine.clock()),
            latest: 0,
            booked: 0,
            unbooked: None,
            words: HashMap::new(),
            submissions: 0,
            completions: 0,
            graveyard: Vec::new(),
        })
    }

    pub fn check_alive(&self, device: usize) -> DriverResult {
        self.devices[device].lost.clone().map_or(Ok(()), Err)
    }

    pub fn stream(&mut self, device: usize, key: Key) -> DriverResult<&mut Stream> {
        let stream = self.streams.get_mut(key).filter(|stream| stream.device == device && !stream.destroyed);
        stream.ok_or_else(|| fault::invalid_handle("stream"))
    }

    /// The memory is live, the device has access to it, and no operand that is written overlaps another operand.
    pub fn admit(&self, device: usize, work: &Work) -> DriverResult {
        let mut result = Ok(());
        let mut seen: Vec<Operand> = Vec::new();
        work.operands(&mut |range| {
            if range.bytes == 0 || result.is_err() {
                return;
            }
            let overlaps = |o: &Operand| {
                (o.write || range.write)
                    && o.address < range.address + range.bytes as u64
                    && range.address < o.address + o.bytes as u64
            };
            result = self.check_access(device, range);
            if result.is_ok() && seen.iter().any(overlaps) {
                result = Err(fault::invalid(format!(
                    "{} bytes at {:#x} overlap another operand, and one of them is written",
                    range.bytes, range.address
                )));
            }
            seen.push(range);
        });
        result
    }

    fn check_access(&self, device: usize, range: Operand) -> DriverResult {
        match self.memory.resolve(range.address, range.bytes)?.home {
            Home::Device(owner) if !self.rights.allowed(device, owner) => {
                let Operand { address, bytes, .. } = range;
                let detail = format!("device {device} names {bytes} bytes at {address:#x} of device {owner}");
                Err(fault::peer_not_enabled(detail))
            }
            _ => Ok(()),
        }
    }

    pub fn push(&mut self, key: Key, op: Op) {
        if self.append(key, op) {
            self.set_state(key, State::Ready);
            if !self.stepped {
                self.ready.push_back(key);
            }
        }
    }

    /// The calling thread has the stream from now on as a worker has it.
    pub fn push_active(&mut self, key: Key, op: Op) {
        if self.append(key, op) {
            self.set_state(key, State::Active);
        }
    }

    /// Whether the stream was idle.
    fn append(&mut self, key: Key, op: Op) -> bool {
        let stream = self.streams.get_mut(key).expect("the caller has looked it up under the same lock");
        self.submissions += 1;
        stream.submitted += 1;
        stream.queue.push_back(op);
        stream.state == State::Idle
    }

    pub fn add_stream(&mut self, device: usize, priority: i32) -> DriverResult<Key> {
        let number = self.devices[device].streams;
        let key = self.streams.insert(Stream { device, number, priority, ..Stream::default() })?;
        self.devices[device].streams += 1;
        Ok(key)
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Lowest priority value first, then order of arrival.
    pub fn pick_next(&mut self) -> Option<Key> {
        loop {
            let priority = |key: &Key| self.streams.get(*key).map_or(i32::MIN, |stream| stream.priority);
            let at = (0..self.ready.len()).min_by_key(|&i| priority(&self.ready[i]))?;
            let key = self.ready.remove(at)?;
            if let Some(stream) = self.streams.get_mut(key).filter(|stream| stream.state == State::Ready) {
                stream.state = State::Active;
                return Some(key);
            }
        }
    }

    /// Behind the others.
    pub fn requeue(&mut self, key: Key) {
        if let Some(stream) = self.streams.get_mut(key) {
            stream.state = State::Ready;
            self.ready.push_back(key);
        }
    }

    pub fn rest_or_requeue(&mut self, key: Key) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        if !stream.queue.is_empty() {
            return self.requeue(key);
        }
        stream.state = State::Idle;
        if stream.destroyed {
            self.streams.remove(key);
        }
    }

    pub fn start(&mut self, key: Key, job: &mut Job) -> Start {
        let Some(stream) = self.streams.get_mut(key) else { return Start::Left };
        let Some(op) = stream.queue.front() else {
            self.rest_or_requeue(key);
            return Start::Left;
        };
        match op.work {
            Work::WaitEvent(record) => {
                if let Progress::Pending = self.progress(record) {
                    return self.park_behind(key, record);
                }
            }
            Work::Stamp { event, seq } => {
                if let Some(event) = self.events.get_mut(event)
                    && event.record.is_some_and(|record| (record.stream, record.seq) == (key, seq))
                {
                    let time = self.booked;
                    event.stamp =
                        Some(self.clock.as_ref().map_or_else(|| Stamp::Real(Instant::now()), |_| Stamp::Virtual(time)));
                }
            }
            Work::WaitValue { address, value } => match self.flag(address, false) {
                Err(lost) => return self.fail(key, lost),
                Ok(Some(flag)) if flag.reached(value) => {}
                Ok(_) => {
                    self.values.push(Awaited { stream: key, address, value });
                    return self.park(key);
                }
            },
            Work::WriteValue { address, value } => match self.flag(address, true) {
                Err(lost) => return self.fail(key, lost),
                Ok(None) => {
                    self.conflicted.push(key);
                    return self.park(key);
                }
                Ok(Some(flag)) => {
                    flag.store(value);
                    self.check_values();
                }
            },
            _ => return self.start_job(key, job),
        }
        if let Some(stream) = self.streams.get_mut(key) {
            stream.queue.pop_front();
        }
        self.advance(key);
        Start::Done
    }

    fn start_job(&mut self, key: Key, job: &mut Job) -> Start {
        let Some(stream) = self.streams.get_mut(key) else { return Start::Left };
        let Some(op) = stream.queue.front() else { return Start::Left };
        let (device, number, engine) = (stream.device, stream.number, op.engine);

        let mut result = Ok(());
        job.spans.clear();
        op.work.operands(&mut |Operand { address, bytes, write }| {
            if bytes == 0 {
                return job.spans.push(Span::empty(write));
            }
            match self.memory.resolve(address, bytes) {
                Ok(place) => {
                    let ptr = place.block.at(place.offset);
                    job.spans.push(Span { ptr, bytes, write, _block: Some(place.block.clone()) });
                }
                Err(e) => {
                    result = Err(fault::illegal_address(format!("memory was freed under an operation: {}", e.detail)))
                }
            }
        });
        if let Err(lost) = result {
            job.spans.clear();
            return self.fail(key, lost);
        }
        if job.spans.iter().any(|s| s.bytes > 0 && self.active.conflicts(s.ptr as usize, s.bytes, s.write)) {
            job.spans.clear();
            self.conflicted.push(key);
            return self.park(key);
        }
        if let Some(engine) = engine.exclusive() {
            let engine = &mut self.devices[device].engines[engine];
            if engine.busy {
                job.spans.clear();
                engine.queue.push_back(key);
                return self.park(key);
            }
            engine.busy = true;
        }
        for span in job.spans.iter().filter(|s| s.bytes > 0) {
            self.active.claim(key, span.ptr as usize, span.bytes, span.write);
        }
        (job.stream, job.number, job.device, job.engine) = (key, number, device, Some(engine));
        job.op = self.streams.get_mut(key).and_then(|stream| stream.queue.pop_front());
        Start::Run
    }

    /// The engine that an operation needs, if another stream uses it now, and its number of completed operations.
    pub fn engine(&self, device: usize, engine: Engine) -> Option<(usize, u64)> {
        let index = engine.exclusive()?;
        let state = &self.devices[device].engines[index];
        state.busy.then_some((index, state.completed))
    }

    pub fn finish(&mut self, job: &mut Job, result: Result<Ended, Died>) -> Next {
        let (key, device) = (job.stream, job.device);
        let mut next = Next::Continue;
        if !job.spans.is_empty() {
            self.active.release(key);
            for key in mem::take(&mut self.conflicted) {
                self.unpark(key);
            }
        }
        if let Some(engine) = job.engine.and_then(Engine::exclusive) {
            let engine = &mut self.devices[device].engines[engine];
            engine.busy = false;
            engine.completed += 1;
            // All waiting streams are woken: if the first one conflicts with a running operation, the next one runs.
            for waiting in mem::take(&mut engine.queue) {
                self.unpark(waiting);
                next = Next::Yield;
            }
        }
        let lost = self.devices[device].lost.is_some();
        match result {
            Err(Died::Panicked(what)) => {
                self.fail(key, fault::launch_failed(what));
                next = Next::Left;
            }
            Ok(_) | Err(_) if lost => {
                self.graveyard.extend(job.op.take());
                self.set_state(key, State::Idle);
                self.abandon(key);
                next = Next::Left;
            }
            Ok(Ended::Again) => {
                self.try_again(key, job.op.take());
                next = Next::Left;
            }
            Err(Died::Misused(report)) => {
                if let Some(stream) = self.streams.get_mut(key) {
                    stream.hurt(stream.completed, fault::misuse(*report));
                }
                self.advance(key);
            }
            Ok(Ended::Done) => self.advance(key),
        }
        if !self.values.is_empty() && job.spans.iter().any(|span| span.write) {
            self.check_values();
        }
        job.spans.clear();
        next
    }

    fn try_again(&mut self, key: Key, op: Option<Op>) {
        let completions = self.completions;
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.queue.extend(op);
        stream.queue.rotate_right(1);
        stream.tried = Some(completions);
        if !self.stepped {
            stream.state = State::Parked;
            self.spinning.push(key);
        }
    }
}
