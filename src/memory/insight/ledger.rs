//! The ledger: the records of a cache's owner about blocks and events.
//!
//! The cache calls it while recording is on. Live blocks are kept exactly; events are kept in a ring, so that a long
//! run costs bounded memory (as PyTorch's `_record_memory_history(max_entries)` does).

use super::{BlockState, CallSite, EventKind, Holder, Leak, MemoryEvent, MemorySnapshot, site::holders};
use crate::{driver::Address, error::op_site::OpSite};
use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

/// Default number of events to keep: 5 MiB of them.
pub(crate) const EVENTS: usize = 65_536;

pub(crate) struct Ledger {
    device: usize,
    began: Instant,
    live: HashMap<Address, Live>,
    events: VecDeque<Event>,
    capacity: usize,
    dropped: u64,
}

#[derive(Clone, Copy)]
struct Live {
    bytes: u64,
    requested: u64,
    stream: u64,
    place: Option<OpSite>,
    since: u64,
}

struct Event {
    micros: u64,
    kind: EventKind,
    address: Address,
    bytes: u64,
    requested: u64,
    stream: u64,
    place: Option<OpSite>,
}

impl Ledger {
    pub(crate) fn new(device: usize, capacity: usize) -> Self {
        Ledger { device, began: Instant::now(), live: HashMap::new(), events: VecDeque::new(), capacity, dropped: 0 }
    }

    pub(crate) fn allocated(
        &mut self,
        at: Address,
        requested: usize,
        bytes: usize,
        stream: u64,
        place: Option<OpSite>,
    ) {
        let (bytes, requested, since) = (bytes as u64, requested as u64, self.micros());
        self.live.insert(at, Live { bytes, requested, stream, place, since });
        self.note(Event { micros: since, kind: EventKind::Allocated, address: at, bytes, requested, stream, place });
    }

    /// The owner has seen that the block at `at` was freed: by its own thread, or (`remote`) by another thread some
    /// time ago. Blocks from before the recording are ignored.
    pub(crate) fn freed(&mut self, at: Address, remote: bool) {
        let Some(Live { bytes, requested, stream, place, .. }) = self.live.remove(&at) else { return };
        let kind = if remote { EventKind::FreedRemotely } else { EventKind::Freed };
        let micros = self.micros();
        self.note(Event { micros, kind, address: at, bytes, requested, stream, place });
    }

    pub(crate) fn mapped(&mut self, at: Address, bytes: u64) {
        self.note_chunk(EventKind::Mapped, at, bytes);
    }

    pub(crate) fn unmapped(&mut self, at: Address, bytes: u64) {
        self.note_chunk(EventKind::Unmapped, at, bytes);
    }

    /// A trim has given back `bytes` in all. Each piece is recorded as unmapped, too.
    pub(crate) fn trimmed(&mut self, bytes: u64) {
        self.note_chunk(EventKind::Trimmed, 0, bytes);
    }

    pub(crate) fn out_of_memory(&mut self, requested: usize, place: Option<OpSite>) {
        let (micros, requested) = (self.micros(), requested as u64);
        let kind = EventKind::OutOfMemory;
        self.note(Event { micros, kind, address: 0, bytes: requested, requested, stream: 0, place });
    }

    pub(crate) fn holders(&self) -> Vec<Holder> {
        holders(self.live.values().map(|live| (live.place.map(CallSite::from), live.bytes)))
    }

    pub(crate) fn leaks(&self) -> Vec<Leak> {
        let Self { device, .. } = *self;
        let leak = |Holder { site, blocks, bytes }| Leak { device, site, blocks, bytes };
        self.holders().into_iter().map(leak).collect()
    }

    pub(crate) fn micros(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    /// The call site of each live block, the events, the time.
    pub(crate) fn complete(&self, snapshot: &mut MemorySnapshot) {
        snapshot.taken_at = self.micros();
        snapshot.recorded = true;
        snapshot.dropped_events = self.dropped;
        snapshot.events = self.events.iter().map(Event::show).collect();
        for block in snapshot.blocks.iter_mut().filter(|block| block.state == BlockState::Live) {
            if let Some(live) = self.live.get(&block.address) {
                block.requested = live.requested;
                block.stream = Some(live.stream);
                block.site = live.place.map(CallSite::from);
                block.since = Some(live.since);
            }
        }
    }

    fn note_chunk(&mut self, kind: EventKind, address: Address, bytes: u64) {
        let micros = self.micros();
        self.note(Event { micros, kind, address, bytes, requested: 0, stream: 0, place: None });
    }

    fn note(&mut self, event: Event) {
        if self.events.len() >= self.capacity {
            self.dropped += 1;
            if self.events.pop_front().is_none() {
                return;
            }
        }
        self.events.push_back(event);
    }
}

const _: () = assert!(size_of::<Event>() <= 80);

impl Event {
    fn show(&self) -> MemoryEvent {
        let Event { micros, kind, address, bytes, requested, stream, place } = *self;
        MemoryEvent { micros, kind, address, bytes, requested, stream, site: place.map(CallSite::from) }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/insight/ledger_tests.rs"]
mod tests;
