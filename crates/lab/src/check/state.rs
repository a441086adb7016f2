//! The account: streams, events, host threads, memory.
//!
//! Everything is judged at submission: the record that an event wait refers to was made before the wait. The exception
//! is a wait for a flag that is raised later: see [`FlagWait`] and `deferred`.

use super::clock::{Clock, Component, FlagWait};
use super::heap::{Chunk, Heap, Source};
use super::shadow::{Segment, Shadow};
use super::{deferred::Deferred, flags::Flags, ranges::Ranges, replay::Noted};
use gpu_pool::{extend::driver::Address, extend::lab::unique_id};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// A device's index and the driver's handle, which is unique on the device only.
pub(super) type Key = (usize, u64);

pub(super) type HostId = usize;

/// Number of destroyed streams after which the account looks for those that no clock needs any more.
const RETIRED: usize = 64;

pub(super) struct Stream {
    pub component: Component,
    pub count: u64,
    pub clock: Clock,
    /// The knowledge that a thread gets when it learns from the pool how far the stream is.
    pub done: Clock,
    /// The version of the host clock that was joined last. Mostly the next one is equal, and then no join is needed.
    heard: u64,
    /// Its number on the device, in order of creation.
    pub number: usize,
}

#[derive(Default)]
pub(super) struct Event {
    pub record: Option<Arc<Clock>>,
    /// Changes with every record.
    pub version: u64,
}

#[derive(Default)]
pub(super) struct Host {
    pub clock: Clock,
    /// Changes with the clock. No two host threads have the same version.
    pub version: u64,
}

pub(super) struct Removed {
    chunk: Option<Chunk>,
    segments: Vec<(Address, Segment)>,
}

#[derive(Default)]
pub(super) struct State {
    pub heap: Heap,
    pub shadow: Shadow,
    pub flags: Flags,
    pub deferred: Vec<Deferred>,
    pub streams: HashMap<Key, Stream>,
    pub events: HashMap<Key, Event>,
    pub captures: HashMap<Key, Vec<Noted>>,
    pub graphs: HashMap<Key, Arc<[Noted]>>,
    /// How often memory of other code is adopted now, by device and address.
    pub adoptions: HashMap<(usize, Address), usize>,
    /// While the launch of a graph is judged: the ranges that its operations so far write.
    pub ahead: Ranges,
    hosts: Vec<Option<Host>>,
    created: Vec<usize>,
    versions: u64,
    retired: Vec<Component>,
    retire_at: usize,
}

impl State {
    pub fn new(devices: usize) -> Self {
        State { created: vec![0; devices], retire_at: RETIRED, ..State::default() }
    }

    fn version(&mut self) -> u64 {
        self.versions += 1;
        self.versions
    }

    pub fn host_enters(&mut self) -> HostId {
        let host = Host { version: self.version(), ..Host::default() };
        let free = self.hosts.iter().position(Option::is_none);
        let id = free.unwrap_or(self.hosts.len());
        match free {
            Some(id) => self.hosts[id] = Some(host),
            None => self.hosts.push(Some(host)),
        }
        id
    }

    pub fn host_leaves(&mut self, id: HostId) {
        self.hosts[id] = None;
    }

    pub fn host(&self, id: HostId) -> &Host {
        self.hosts[id].as_ref().expect("a seat is left only by its thread")
    }

    pub fn host_becomes(&mut self, id: HostId, clock: Clock) -> Clock {
        let version = self.version();
        let old = self.hosts[id].replace(Host { clock, version });
        old.map_or_else(Clock::default, |host| host.clock)
    }

    /// A thread has seen that everything in `clock` is complete. Then the flag waits in `clock` are over, too. If no
    /// raise is known for such a wait, a store of the host has ended it; the account assumes a thread with the
    /// knowledge that all threads together have now.
    pub fn learn(&mut self, by: HostId, clock: &Clock) {
        let mut clock = clock.clone();
        clock.flatten();
        while !clock.waits().is_empty() {
            let waits: Vec<Arc<FlagWait>> = clock.waits().to_vec();
            let mut all = Clock::default();
            for host in self.hosts.iter().flatten() {
                all.join(&host.clock);
            }
            waits.iter().for_each(|wait| wait.raise(all.clone()));
            self.flags.end(&waits);
            self.deferred.retain(Deferred::is_pending);
            clock.flatten();
        }
        let version = self.version();
        if let Some(host) = &mut self.hosts[by]
            && host.clock.join(&clock)
        {
            host.version = version;
        }
    }

    pub fn stream_created(&mut self, key: Key) {
        let number = self.created[key.0];
        self.created[key.0] += 1;
        let (component, clock) = (unique_id(), Clock::default());
        self.streams.insert(key, Stream { component, count: 0, done: clock.clone(), clock, heard: 0, number });
    }

    pub fn stream_destroyed(&mut self, key: Key) {
        if let Some(stream) = self.streams.remove(&key) {
            self.retired.push(stream.component);
            if self.retired.len() >= self.retire_at {
                self.forget_retired();
            }
        }
    }

    pub fn hear(&mut self, key: Key, by: HostId) -> Option<&mut Stream> {
        let host = self.hosts[by].as_ref()?;
        let stream = self.streams.get_mut(&key)?;
        stream.clock.flatten();
        if stream.heard != host.version {
            stream.heard = host.version;
            stream.clock.join(&host.clock);
        }
        Some(stream)
    }

    fn forget_retired(&mut self) {
        let mut needed = HashSet::new();
        let mut need = |component| {
            needed.insert(component);
        };
        self.shadow.each(|access| need(access.component));
        self.deferred.iter().for_each(|deferred| deferred.each(|access| need(access.component)));
        self.flags.each(|component, _| need(component));
        let gone: HashSet<Component> = self.retired.iter().copied().filter(|c| !needed.contains(c)).collect();
        self.retired.retain(|component| !gone.contains(component));
        self.retire_at = 2 * self.retired.len() + RETIRED;
        let keep = |component: Component| !gone.contains(&component);
        self.flags.each(|_, clock| clock.retain(keep));
        for stream in self.streams.values_mut() {
            stream.clock.retain(keep);
            stream.done.retain(keep);
        }
        self.hosts.iter_mut().flatten().for_each(|host| host.clock.retain(keep));
        self.events.values_mut().filter_map(|e| e.record.as_mut()).for_each(|r| Arc::make_mut(r).retain(keep));
    }

    /// The key of an event that a call on `device` names; it may be an event of another device.
    pub fn event_key(&self, device: usize, raw: u64) -> Option<Key> {
        let others = (0..self.created.len()).filter(|&other| other != device);
        std::iter::once(device).chain(others).map(|device| (device, raw)).find(|key| self.events.contains_key(key))
    }

    pub fn recorded(&mut self, by: HostId, event: Key, stream: Key) {
        let version = self.version();
        let Some(stream) = self.hear(stream, by) else { return };
        let record = Some(Arc::new(stream.clock.clone()));
        self.events.insert(event, Event { record, version });
    }

    pub fn mem_added(&mut self, range: Range<Address>, source: Source) {
        self.shadow.take(&range);
        self.flags.forget(&range);
        self.heap.add(range, source);
    }

    /// How often it is adopted still.
    pub fn disowned(&mut self, memory: (usize, Address)) -> usize {
        let left = self.adoptions.remove(&memory).map_or(0, |count| count - 1);
        if left > 0 {
            self.adoptions.insert(memory, left);
        }
        left
    }

    pub fn mem_removed(&mut self, range: &Range<Address>) -> Removed {
        self.flags.forget(range);
        Removed { chunk: self.heap.remove(range.start), segments: self.shadow.take(range) }
    }

    /// Undoes [`mem_removed`](Self::mem_removed): the driver has refused the free.
    pub fn mem_restored(&mut self, removed: Removed) {
        self.shadow.restore(removed.segments);
        if let Some(chunk) = removed.chunk {
            self.heap.restore(chunk);
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check/state_tests.rs"]
mod tests;
