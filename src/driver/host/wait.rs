//! Waiting: how the scheduler parks and unparks streams, and how a lost device ends all waits for it.

use super::{Core, Key, Progress, Record, Waiter, Who, exec::Flag, fault, sched::Start, stream::State};
use crate::driver::{Address, DriverResult, Fault};
use std::mem;

impl Core {
    /// A destroyed stream has completed all of its work.
    pub fn progress(&self, record: Record) -> Progress {
        let Some(stream) = self.streams.get(record.stream) else { return Progress::Done };
        if stream.completed < record.seq {
            return Progress::Pending;
        }
        match (stream.failed_from, &self.devices[record.device].lost) {
            (Some(good), Some(lost)) if record.seq > good => return Progress::Failed(lost.clone()),
            _ => {}
        }
        match &stream.harm {
            Some(harm) if record.seq > harm.after => Progress::Failed(harm.fault.clone()),
            _ => Progress::Done,
        }
    }

    /// Or is destroyed.
    pub fn has_passed(&self, stream: Key, seq: u64) -> bool {
        self.streams.get(stream).is_none_or(|stream| stream.completed >= seq)
    }

    pub fn set_state(&mut self, key: Key, state: State) {
        if let Some(stream) = self.streams.get_mut(key) {
            stream.state = state;
        }
    }

    /// The caller has put it on the list of its obstacle.
    pub fn park(&mut self, key: Key) -> Start {
        self.set_state(key, State::Parked);
        Start::Left
    }

    pub fn park_behind(&mut self, key: Key, record: Record) -> Start {
        if let Some(awaited) = self.streams.get_mut(record.stream) {
            awaited.waiters.push(Waiter { seq: record.seq, who: Who::Stream(key) });
        }
        self.park(key)
    }

    pub fn unpark(&mut self, key: Key) {
        if let Some(stream) = self.streams.get_mut(key).filter(|stream| stream.state == State::Parked) {
            stream.state = State::Ready;
            self.ready.push_back(key);
        }
    }

    pub fn advance(&mut self, key: Key) {
        if let Some(stream) = self.streams.get_mut(key) {
            stream.completed += 1;
            stream.tried = None;
            if self.clock.is_some() {
                stream.finishes.push(self.booked);
            }
            self.completions += 1;
            self.wake_waiters(key);
            self.try_spinners();
        }
    }

    pub fn try_spinners(&mut self) {
        for key in mem::take(&mut self.spinning) {
            self.unpark(key);
        }
    }

    fn wake_waiters(&mut self, key: Key) {
        let Some(stream) = self.streams.get_mut(key).filter(|stream| !stream.waiters.is_empty()) else { return };
        let completed = stream.completed;
        let mut waiters = mem::take(&mut stream.waiters);
        waiters.retain(|waiter| {
            if waiter.seq > completed {
                return true;
            }
            match &waiter.who {
                Who::Stream(key) => self.unpark(*key),
                Who::Thread(condvar) => {
                    condvar.notify_all();
                }
            }
            false
        });
        if let Some(stream) = self.streams.get_mut(key) {
            stream.waiters = waiters;
        }
    }

    /// The host might write it without a call.
    pub fn awaits_values(&self) -> bool {
        !self.values.is_empty() || !self.spinning.is_empty()
    }

    pub fn poll(&mut self) {
        self.check_values();
        self.try_spinners();
    }

    pub fn check_values(&mut self) {
        let mut values = mem::take(&mut self.values);
        values.retain(|awaited| {
            let waits = match self.flag(awaited.address, false) {
                Ok(Some(flag)) => !flag.reached(awaited.value),
                Ok(None) => true,
                // The word's memory was freed: `start` reports that.
                Err(_) => false,
            };
            if !waits {
                self.unpark(awaited.stream);
            }
            waits
        });
        self.values = values;
    }

    /// `None` while a running operation excludes the access.
    pub fn flag(&self, address: Address, write: bool) -> DriverResult<Option<Flag>> {
        let place = self.memory.resolve(address, 8);
        let place = place.map_err(|e| fault::illegal_address(format!("a flag's memory was freed: {}", e.detail)))?;
        if !place.block.is_real() {
            return Err(fault::illegal_address(format!(
                "{address:#x} is in memory that this dry machine has no room for"
            )));
        }
        let ptr = place.block.at(place.offset);
        if self.active.conflicts(ptr as usize, 8, write) {
            return Ok(None);
        }
        // SAFETY: the word is live while the lock is held, and aligned (checked at submit; addresses and pointers agree
        // modulo 256). No running operation excludes this access. The host's own accesses to flags are atomic: the
        // contract of `write_value` demands it.
        Ok(Some(unsafe { Flag::new(ptr) }))
    }

    pub fn fail(&mut self, key: Key, lost: Fault) -> Start {
        if let Some(stream) = self.streams.get_mut(key) {
            let device = stream.device;
            stream.state = State::Idle;
            self.devices[device].lost.get_or_insert(lost);
            for key in self.streams.keys() {
                self.abandon(key);
            }
        }
        Start::Left
    }

    /// If its device is lost. The waiters continue, but not before an operation that another worker performs has ended.
    pub fn abandon(&mut self, key: Key) {
        let Core { streams, devices, graveyard, values, .. } = self;
        let Some(stream) = streams.get_mut(key).filter(|stream| devices[stream.device].lost.is_some()) else { return };
        stream.failed_from.get_or_insert(stream.completed);
        graveyard.extend(stream.queue.drain(..));
        if stream.state == State::Active {
            return;
        }
        values.retain(|awaited| awaited.stream != key);
        self.give_up(key);
    }

    /// For a reason that leaves the device alive.
    pub fn forsake(&mut self, key: Key, reason: Fault) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.hurt(stream.completed, reason);
        self.graveyard.extend(stream.queue.drain(..));
        self.values.retain(|awaited| awaited.stream != key);
        self.spinning.retain(|spinning| *spinning != key);
        self.give_up(key);
    }

    /// After its queue was emptied.
    fn give_up(&mut self, key: Key) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.state = State::Idle;
        stream.tried = None;
        let skipped = stream.submitted - stream.completed;
        if self.clock.is_some() {
            stream.finishes.resize(stream.submitted as usize, self.latest);
        }
        stream.completed = stream.submitted;
        self.completions += skipped;
        let gone = stream.destroyed;
        self.wake_waiters(key);
        self.try_spinners();
        if gone {
            self.streams.remove(key);
        }
    }
}
