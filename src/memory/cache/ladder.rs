//! Out of memory: the attempts, in order, before a request fails; how memory comes from and returns to the driver.
//!
//! A new search follows each rung, so a block that came back meanwhile is found (cf. pytorch#189504). A request that
//! fails leaves everything as it was, except for memory that has moved. No rung asks the peers for what they have
//! freed: the owner sees their frees immediately ([`Returns`](crate::sync::Returns)).

use super::{ATTEMPTS, Cache, GRAIN, Request};
use crate::driver::{Address, FailPoint, FaultKind};
use crate::error::{Error, Result, op_site::OpSite};
use crate::memory::{
    History, LeakReport, Origin,
    backing::{ChunkKind, Mapping},
    block::release_bytes,
};
use std::ops::Range;

const GRANULE: u64 = 2 << 20;
const UNIT: u64 = 64 << 20;

/// A pool that grows rather than wait grows by one part in this many of itself.
const EAGER_SHARE: u64 = 2;

/// The rungs, each with its name in reports.
const RUNGS: [(&str, Rung); 7] = [
    ("took what other threads had freed", |cache, _, _| {
        cache.collect();
        Ok(())
    }),
    ("joined empty slabs", |cache, _, _| {
        cache.dissolve();
        Ok(())
    }),
    ("asked the driver for more", Cache::grow),
    ("moved free memory together", |cache, request, need| cache.gather(request, cache.room(request, need.least))),
    ("waited for work on freed memory", |cache, request, _| cache.wait(request)),
    ("moved that memory, too", |cache, request, need| cache.gather(request, cache.room(request, need.least))),
    ("gave free memory back and asked again", Cache::exchange),
];

/// From this rung on a host request takes memory that it has to wait for.
const WAITING: usize = 4;

type Rung = fn(&mut Cache, &Request<'_>, Need) -> Result<()>;

/// Contiguous bytes to look for: `least` is enough, `good` is better.
#[derive(Clone, Copy)]
pub(super) struct Need {
    pub least: usize,
    pub good: usize,
}

impl Cache {
    /// `search` gets whether it may take memory that is in use. Streams may: they wait on the device. The host prefers
    /// other memory, because it would wait itself.
    #[cold]
    pub(super) fn climb<T>(
        &mut self,
        request: &Request<'_>,
        need: Need,
        mut search: impl FnMut(&mut Cache, bool) -> Option<T>,
    ) -> Result<T> {
        self.stats.ladder += 1;
        for _ in 0..ATTEMPTS {
            let mut tried = Vec::with_capacity(RUNGS.len());
            let mut cause: Option<Error> = None;
            if self.can_be_had(need.least) {
                for (index, (name, rung)) in RUNGS.into_iter().enumerate() {
                    tried.push(name);
                    match rung(self, request, need) {
                        Ok(()) | Err(Error::OutOfMemory { .. } | Error::Timeout { .. }) => {}
                        // A rung that fails is not the end: others may succeed.
                        Err(error) if self.is_fatal(&error) => return Err(error),
                        Err(error) => {
                            event!(
                                debug, "memory_short", device = self.handle.device, %error,
                                "memory is short: {name}"
                            );
                            cause.get_or_insert(error);
                        }
                    }
                    if let Some(found) = search(self, request.stream.is_some() || index >= WAITING) {
                        return Ok(found);
                    }
                    fail_if!((request.stop)(), self.out_of_memory_report(request, tried).into_error());
                }
            }
            if let Some(cause) = cause {
                // The cause is not lack of memory, so the user need not give up any.
                return Err(cause);
            }
            let report = self.out_of_memory_report(request, tried);
            let again = self.settings.on_out_of_memory.clone().is_some_and(|callback| callback.0(&report));
            if !again {
                self.note(|ledger| ledger.out_of_memory(request.bytes, OpSite::current()));
                return Err(report.into_error());
            }
        }
        Err(self.out_of_memory_report(request, vec!["the callback asked for more attempts than it gets"]).into_error())
    }

    fn is_fatal(&self, error: &Error) -> bool {
        let own = self.handle.device;
        matches!(error, Error::DeviceLost { device, .. } if *device == own) || matches!(error, Error::Misuse { .. })
    }

    fn can_be_had(&self, need: usize) -> bool {
        let most = match self.kind {
            ChunkKind::Device => self.limit.unwrap_or(u64::MAX).min(self.handle.driver.info().total_memory),
            ChunkKind::Pinned | ChunkKind::Managed => isize::MAX as u64 / 2,
        };
        need as u64 <= most
    }

    /// Wholly free slabs become free pieces of the heap, and so do the uncut parts of the other slabs.
    pub(super) fn dissolve(&mut self) {
        for (slab, past) in self.small.dissolve() {
            self.heap.free(slab.piece, past);
        }
        for (piece, keep, rest) in self.small.give_up_uncut() {
            self.heap.shrink(piece, keep, rest);
        }
    }

    fn room(&self, request: &Request<'_>, need: usize) -> u64 {
        let room = if request.align > GRAIN { request.align } else { 0 };
        need.saturating_add(room).checked_next_multiple_of(GRAIN).unwrap_or(need) as u64
    }

    fn grow(&mut self, request: &Request<'_>, Need { least, good }: Need) -> Result<()> {
        let need = self.room(request, least);
        let more = self.room(request, good) - need;
        // A little more than is missing, so that a pool that grows in small steps makes few calls.
        let more = more.max((self.backing.reserved() / 32).min(UNIT) / GRANULE * GRANULE);
        if let Some(slack) = self.settings.slack {
            // A request that would exceed the bound uses what the pool has, as if memory were short.
            let most = self.stats.peak.max(self.stats.in_use + need) as f64 * slack;
            let bound = (most as u64).checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
            let own = self.handle.device;
            match self.map_within(request.op, need, bound, |past| !past.names_lost_peer(own)) {
                Err(Error::OutOfMemory { .. }) => {}
                mapped => return mapped,
            }
            let can_move = self.backing.is_window() && self.heap.free_bytes() >= need;
            for wait in [false, true].into_iter().filter(|_| can_move) {
                let waited = if wait { self.wait(request) } else { Ok(()) };
                match waited.and_then(|()| self.gather(request, need)) {
                    // Work is stuck. More memory needs no wait.
                    Err(Error::Timeout { .. }) => break,
                    gathered => gathered?,
                }
                if self.heap.largest_free() >= need {
                    return Ok(());
                }
            }
        }
        let short = |done: &Result<()>| matches!(done, Err(Error::OutOfMemory { .. }));
        let mut done = self.map(request.op, need + more);
        if more > 0 && short(&done) {
            done = self.map(request.op, need);
        }
        // Without room for alignment: the memory may come at an aligned address by itself.
        let bare = least.next_multiple_of(GRAIN) as u64;
        if bare < need && short(&done) {
            done = self.map(request.op, bare);
        }
        done
    }

    #[cold]
    pub(super) fn grow_rather(&mut self, request: &Request<'_>, need: Need) -> bool {
        // A user who bounds the reserved memory wants it to be used.
        let may =
            self.settings.slack.is_none() && self.backing.reserved().saturating_add(need.good as u64) <= self.eager;
        may && {
            self.stats.ladder += 1;
            let (need, reserved) = (self.room(request, need.good), self.backing.reserved());
            // If the request would fit once all streams are done, the missing bytes depend on timing. Growing by those
            // would call the driver again at each slower step. So the pool grows by a share of itself.
            let timing = self.stats.in_use + need <= reserved;
            let share =
                if timing { (reserved / EAGER_SHARE).next_multiple_of(GRANULE).min(self.eager - reserved) } else { 0 };
            // Also next to memory that is in use: the new memory must need no wait.
            let mut map =
                |bytes| self.map_within(request.op, bytes, u64::MAX, |past| past.is_free_for(request.stream)).is_ok();
            (need < share && map(share)) || map(need)
        }
    }

    pub(super) fn map(&mut self, op: &'static str, need: u64) -> Result<()> {
        let own = self.handle.device;
        // Memory that a lost device may use for ever does not count as free.
        self.map_within(op, need, u64::MAX, |past| !past.names_lost_peer(own))
    }

    /// Like [`map`](Self::map), up to `most` bytes in the pool. Free memory counts if `counts` accepts its past.
    fn map_within(&mut self, op: &'static str, need: u64, most: u64, counts: impl Fn(&History) -> bool) -> Result<()> {
        let left = self.limit.unwrap_or(u64::MAX).min(most).saturating_sub(self.backing.reserved());
        let budget = left / GRAIN as u64 * GRAIN as u64;
        // Single allocations neither grow nor move, so a small one would be of little use.
        let least = if self.backing.is_window() { 0 } else { GRANULE.min(budget) };
        // A unit is mapped, unmapped and moved as a whole: it is not too large, and units are not too many.
        let mut unit = UNIT.max(self.handle.driver.info().total_memory / 4096).min(need.max(least));
        if self.backing.is_window() {
            // No part of a unit that is unmapped or moved may be in use: small pools need small units.
            unit = unit.min((self.backing.reserved().saturating_add(need) / 32).max(1).next_multiple_of(GRANULE));
        }
        let heap = &self.heap;
        let free = |region: u32, at: Address| heap.free_around(region, at, &counts);
        let backing = &mut self.backing;
        let mut grow = || backing.grow(need, unit, budget, &free);
        let mapped = match self.settings.node {
            None => grow(),
            Some(node) => node.near(grow),
        };
        let mapped = self.handle.check(op, mapped)?;
        if let Some(node) = self.settings.node {
            for fresh in &mapped {
                // SAFETY: page-locked memory that has just come from the driver, zeroed.
                unsafe { node.take(fresh.address as *mut u8, fresh.bytes as usize) };
            }
        }
        self.add(mapped);
        Ok(())
    }

    fn add(&mut self, mapped: impl IntoIterator<Item = Mapping>) {
        for Mapping { region, keep_alive, address, bytes } in mapped {
            self.regions.entry(region).or_insert(keep_alive);
            self.heap.insert(region, address, bytes);
            self.note(|ledger| ledger.mapped(address, bytes));
        }
        self.stats.peak_reserved = self.stats.peak_reserved.max(self.backing.reserved());
    }

    /// By mapping, so that one large piece results.
    fn gather(&mut self, request: &Request<'_>, need: u64) -> Result<()> {
        if self.heap.free_bytes() < need {
            return Ok(());
        }
        // The smallest ranges are worth least where they are: they move first.
        let mut ranges = self.free_ranges();
        ranges.sort_by_key(|(_, range)| range.end - range.start);
        let mut units = Vec::new();
        for (region, range) in ranges {
            for unit in self.backing.units_in(region, range) {
                if self.is_over(region, &unit, request.stop) {
                    units.push((region, unit));
                }
            }
        }
        let (heap, own) = (&self.heap, self.handle.device);
        // Memory that a lost device may use for ever does not count as free.
        let free = |region: u32, at: Address| heap.free_around(region, at, |past| !past.names_lost_peer(own));
        // SAFETY: the units are free, and their uses are over on every device.
        let moved = unsafe { self.backing.move_units(&units, need, &free) };
        for (region, unit) in moved.from {
            let bytes = unit.end - unit.start;
            self.heap.remove(region, unit.start, bytes);
            self.note(|ledger| ledger.unmapped(unit.start, bytes));
        }
        self.add(moved.to);
        match moved.fault {
            Some(fault) if fault.kind != FaultKind::Unsupported => Err(self.handle.error(request.op, fault)),
            _ => Ok(()),
        }
    }

    fn free_ranges(&self) -> Vec<(u32, Range<Address>)> {
        self.heap.free_ranges().map(|free| (free.region, free.address..free.address + free.bytes)).collect()
    }

    /// The calling thread may rely on the answer. After a failure of the gang (`stop`) uses do not count as over: a
    /// kernel that has given up has ended, but peers' kernels that send to it may not know that yet.
    fn is_over(&mut self, region: u32, unit: &Range<Address>, stop: &dyn Fn() -> bool) -> bool {
        let bytes = unit.end - unit.start;
        let past = self.heap.remove(region, unit.start, bytes);
        // In this order: a kernel gives up after the failure, and is seen to have ended after that.
        let over = past.all_completed() && !stop() || self.handle.injected(FailPoint::ChunkReleasedEarly);
        if over {
            self.handle.acquire(past.known());
        }
        self.heap.insert_used(region, unit.start, bytes, past);
        over
    }

    /// After one stream was found stuck, nothing more is waited for; else the deadline would pass again at every block.
    fn wait(&mut self, request: &Request<'_>) -> Result<()> {
        let (own, limit) = (self.handle.device, self.settings.deadline);
        let heap = self.heap.free_payloads_mut();
        let small = self.small.free_blocks().map(|block| block.hazards.history());
        let (mut first, mut is_stuck) = (Ok(()), false);
        for past in heap.chain(small).filter(|past| !past.names_lost_peer(own)) {
            if !is_stuck {
                let waited = past.wait_all(request.op, limit, request.stop);
                is_stuck = matches!(waited, Err(Error::Timeout { .. }));
                first = first.and(waited);
            }
            past.settle();
        }
        self.collect();
        first
    }

    fn exchange(&mut self, request: &Request<'_>, need: Need) -> Result<()> {
        self.give_back(request.stop);
        self.grow(request, need)
    }

    /// In whole units, if its uses are over. Returns how many bytes.
    fn give_back(&mut self, stop: &dyn Fn() -> bool) -> u64 {
        let mut given = 0;
        for (region, range) in self.free_ranges() {
            for unit in self.backing.units_in(region, range) {
                if !self.is_over(region, &unit, stop) {
                    continue;
                }
                let bytes = unit.end - unit.start;
                // SAFETY: the unit is free, and its uses are over on every device.
                if let Err(fault) = unsafe { self.backing.unmap(region, unit.clone()) } {
                    let refused = fault.kind == FaultKind::Misuse;
                    self.handle.not_returned(fault);
                    if refused {
                        continue;
                    }
                }
                self.heap.remove(region, unit.start, bytes);
                given += bytes;
                self.note(|ledger| ledger.unmapped(unit.start, bytes));
            }
        }
        let regions = &mut self.regions;
        regions.retain(|_, region| !region.is_spent());
        // Region numbers are reused, so no header may keep the number of a region that is gone.
        self.spare
            .retain(|block| matches!(block.origin, Origin::Piece { region, .. } if regions.contains_key(&region)));
        given
    }

    /// Unless it must stop. Returns how many bytes. Does not wait.
    pub(crate) fn trim(&mut self, stop: &dyn Fn() -> bool) -> u64 {
        self.collect();
        self.dissolve();
        let given = self.give_back(stop);
        self.note(|ledger| ledger.trimmed(given));
        given
    }
}

impl Drop for Cache {
    /// Gives back everything except memory with live blocks, which is given back with its last block.
    fn drop(&mut self) {
        let owner = self.owner.clone();
        for block in owner.returns.close() {
            self.put(block);
        }
        for block in self.end_audit() {
            self.put(block);
        }
        if let Some(ledger) = &self.ledger
            && self.stats.in_use > 0
        {
            let live = LeakReport { leaks: ledger.leaks() };
            let (device, kind) = (self.handle.device, self.backing.name());
            event!(warn, "buffers_outlive_pool", device, kind, "buffers outlive their pool: {live}");
        }
        self.dedicated.end();
        self.dissolve();
        self.give_back(&|| false);
        for free in self.heap.free_ranges() {
            release_bytes(&self.regions[&free.region], free.payload, free.address..free.address + free.bytes);
        }
        for slab in self.small.slabs() {
            let rest = slab.address + slab.uncut() as u64..slab.address + slab.bytes as u64;
            release_bytes(&slab.region, slab.rest(), rest);
        }
        self.small.take().for_each(|block| block.release());
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/cache/ladder_tests.rs"]
mod tests;
