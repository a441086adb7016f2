//! Out of memory: what is tried, in which order, before a request fails.
//!
//! Each rung is followed by a new search: a block that has come back meanwhile is not overlooked (pytorch#189504 raised an
//! error although a fitting block had just been returned). A request that fails leaves everything as it was, apart from
//! memory that has moved to where it is of more use.
//!
//! "Ask the peers to hand over what they have freed" is no rung: what they free is visible to the owner at once
//! ([`Returns`](crate::sync::Returns)), so a peer that is parked, or stuck in a user's closure, holds nothing back.

use super::{ATTEMPTS, Cache, GRAIN, Request};
use crate::{
    driver::{Address, FaultKind},
    error::{Error, Result},
    memory::{
        LeakReport,
        backing::Mapping,
        block::{Block, ChunkKind, Place, let_go},
        hazard::History,
    },
    plant::Bug,
};
use std::ops::Range;

/// Memory is taken from the driver in multiples of it,
const GRANULE: u64 = 2 << 20;
/// and given back, or moved, in pieces of this size.
const UNIT: u64 = 64 << 20;

/// What is tried, and what it is called in reports.
const RUNGS: [(&str, Rung); 6] = [
    ("took what other threads had freed", |cache, _, _| {
        cache.collect();
        Ok(())
    }),
    ("joined empty slabs", |cache, _, _| Ok(cache.dissolve())),
    ("asked the driver for more", Cache::grow),
    ("moved free memory together", |cache, request, need| cache.gather(request, cache.room(request, need.least), true)),
    ("waited for work on freed memory", |cache, request, _| cache.wait(request)),
    ("gave free memory back and asked again", Cache::exchange),
];

type Rung = fn(&mut Cache, &Request<'_>, Need) -> Result<()>;

/// Bytes in one piece that are looked for: so many will do, and so many would be good.
#[derive(Clone, Copy)]
pub(super) struct Need {
    pub least: usize,
    pub good: usize,
}

impl Cache {
    /// Looks for memory until every rung has been tried.
    #[cold]
    pub(super) fn climb<T>(
        &mut self,
        request: &Request<'_>,
        need: Need,
        mut search: impl FnMut(&mut Cache) -> Option<T>,
    ) -> Result<T> {
        self.stats.ladder += 1;
        for _ in 0..ATTEMPTS {
            let mut tried = Vec::with_capacity(RUNGS.len());
            self.patient = true;
            if self.can_be_had(need.least) {
                for (name, rung) in RUNGS {
                    tried.push(name);
                    match rung(self, request, need) {
                        Err(error) if !matches!(error, Error::OutOfMemory { .. } | Error::Timeout { .. }) => {
                            return Err(error);
                        }
                        _ => {}
                    }
                    if let Some(found) = search(self) {
                        return Ok(found);
                    }
                }
            }
            let report = self.out_of_memory_report(request, tried);
            let again = match &self.settings.on_out_of_memory {
                Some(callback) => callback.clone().0(&report),
                None => false,
            };
            if !again {
                if let Some(ledger) = &mut self.ledger {
                    ledger.out_of_memory(request.bytes, crate::driver::check::Place::current());
                }
                return Err(report.into_error());
            }
        }
        Err(self.out_of_memory_report(request, vec!["the callback asked for more attempts than it gets"]).into_error())
    }
}

/// The rungs.
impl Cache {
    /// Whether so much can be had at all, however empty the device.
    fn can_be_had(&self, need: usize) -> bool {
        let most = match self.kind {
            ChunkKind::Device => self.limit.unwrap_or(u64::MAX).min(self.link.driver.info().total_memory),
            ChunkKind::Pinned | ChunkKind::Managed => isize::MAX as u64 / 2,
        };
        need as u64 <= most
    }

    /// Slabs that are wholly free become free pieces of the heap, and so does what was never cut of the others.
    pub(super) fn dissolve(&mut self) {
        for (slab, past) in self.small.dissolve() {
            self.heap.free(slab.piece, past);
        }
        for (piece, keep, rest) in self.small.give_up_uncut() {
            self.heap.shrink(piece, keep, rest);
        }
    }

    /// Bytes that must lie together, with room to align in where the driver's own alignment does not do.
    fn room(&self, request: &Request<'_>, need: usize) -> u64 {
        let room = if request.align > GRAIN { request.align } else { 0 };
        (need + room).next_multiple_of(GRAIN) as u64
    }

    fn grow(&mut self, request: &Request<'_>, Need { least, good }: Need) -> Result<()> {
        let need = self.room(request, least);
        let more = self.room(request, good) - need;
        // A little more than is missing, so that a pool which grows in small steps makes few calls.
        let more = more.max((self.backing.reserved() / 32).min(UNIT) / GRANULE * GRANULE);
        if let Some(slack) = self.settings.slack {
            // What a request would take beyond the bound is no more than what there is where memory is short.
            let most = self.stats.peak.max(self.stats.in_use + need) as f64 * slack;
            let bound = (most as u64).next_multiple_of(GRANULE);
            match self.map_within(request.op, need, bound) {
                Err(Error::OutOfMemory { .. }) => {}
                mapped => return mapped,
            }
            // In steps nothing may depend on what happens to be over.
            for wait in [self.link.stepped, true] {
                self.gather(request, need, wait)?;
                if self.heap.largest_free() >= need {
                    return Ok(());
                }
            }
        }
        match self.map(request.op, need + more) {
            Err(Error::OutOfMemory { .. }) if more > 0 => self.map(request.op, need),
            done => done,
        }
    }

    /// Takes memory from the driver, so that `need` bytes lie together.
    pub(super) fn map(&mut self, op: &'static str, need: u64) -> Result<()> {
        self.map_within(op, need, u64::MAX)
    }

    /// The same, unless more than `most` bytes would be the pool's then.
    fn map_within(&mut self, op: &'static str, need: u64, most: u64) -> Result<()> {
        let left = self.limit.unwrap_or(u64::MAX).min(most).saturating_sub(self.backing.reserved());
        let budget = left / GRAIN as u64 * GRAIN as u64;
        // Single allocations neither grow nor move, so a small one would be of little use.
        let least = if self.backing.is_window() { 0 } else { GRANULE.min(budget) };
        // What comes in one piece goes, or moves, in one piece: not too large; and not too many.
        let unit = UNIT.max(self.link.driver.info().total_memory / 4096).min(need.max(least));
        let (heap, own) = (&self.heap, self.link.device);
        // What a lost device may use for ever does not count.
        let free = |region: u32, at: Address| heap.free_around(region, at, |past| !past.names_lost_peer(own));
        let backing = &mut self.backing;
        let mut grow = || backing.grow(need, unit, budget, &free);
        let mapped = match self.settings.node {
            None => grow(),
            Some(node) => node.near(grow),
        };
        let mapped = self.link.check(op, mapped)?;
        if let Some(node) = self.settings.node {
            for fresh in &mapped {
                // SAFETY: page-locked memory that has just come, zeroed, from the driver.
                unsafe { node.take(fresh.address as *mut u8, fresh.bytes as usize) };
            }
        }
        self.add(mapped);
        Ok(())
    }

    fn add(&mut self, mapped: impl IntoIterator<Item = Mapping>) {
        for Mapping { region, home, address, bytes } in mapped {
            self.regions.entry(region).or_insert(home);
            self.heap.insert(region, address, bytes);
            if let Some(ledger) = &mut self.ledger {
                ledger.mapped(address, bytes);
            }
        }
        self.stats.peak_reserved = self.stats.peak_reserved.max(self.backing.reserved());
    }

    /// Free memory is moved, by mapping, to where it makes one piece with other free memory. Takes nothing from the driver.
    /// What is not over is waited for, or stays.
    fn gather(&mut self, request: &Request<'_>, need: u64, wait: bool) -> Result<()> {
        if self.heap.free_bytes() < need {
            return Ok(());
        }
        // The smallest ranges are worth least where they are.
        let mut ranges = self.free_ranges();
        ranges.sort_by_key(|(_, range)| range.end - range.start);
        let mut units = Vec::new();
        for (region, range) in ranges {
            for unit in self.backing.units_in(region, range) {
                if self.is_over(request.op, region, &unit, wait) {
                    units.push((region, unit));
                }
            }
        }
        let (heap, own) = (&self.heap, self.link.device);
        // What a lost device may use for ever does not count.
        let free = |region: u32, at: Address| heap.free_around(region, at, |past| !past.names_lost_peer(own));
        // SAFETY: the units are free, and their uses are over, on every device.
        let moved = unsafe { self.backing.move_units(&units, need, &free) };
        for (region, unit) in moved.from {
            let bytes = unit.end - unit.start;
            self.heap.remove(region, unit.start, bytes);
            if let Some(ledger) = &mut self.ledger {
                ledger.unmapped(unit.start, bytes);
            }
        }
        self.add(moved.to);
        match moved.fault {
            Some(fault) if fault.kind != FaultKind::Unsupported => Err(self.link.error(request.op, fault)),
            _ => Ok(()),
        }
    }

    fn free_ranges(&self) -> Vec<(u32, Range<Address>)> {
        self.heap.free_ranges().map(|free| (free.region, free.address..free.address + free.bytes)).collect()
    }

    /// Whether the uses of a free unit are over, if need be after a wait; the calling thread may rely on it.
    fn is_over(&mut self, op: &'static str, region: u32, unit: &Range<Address>, wait: bool) -> bool {
        let bytes = unit.end - unit.start;
        let past = self.heap.remove(region, unit.start, bytes);
        let over = self.link.planted(Bug::ChunkReleasedEarly)
            || if wait && self.patient { self.outlast(op, &past) } else { past.all_completed() };
        if over {
            self.link.acquire(past.known());
        }
        self.heap.insert_used(region, unit.start, bytes, past);
        over
    }

    /// Waits for all uses. A stream that is stuck is waited for once, not for every block that it has used.
    fn outlast(&mut self, op: &'static str, past: &History) -> bool {
        let waited = past.wait_all(op, self.settings.deadline);
        self.patient = !matches!(waited, Err(Error::Timeout { .. }));
        waited.is_ok()
    }

    fn wait(&mut self, request: &Request<'_>) -> Result<()> {
        let limit = self.settings.deadline;
        if !self.patient {
            return Ok(());
        }
        let own = self.link.device;
        let heap = self.heap.free_payloads_mut();
        let small = self.small.at_rest().map(|block| block.hazards.history());
        for past in heap.chain(small).filter(|past| !past.names_lost_peer(own)) {
            match past.wait_all(request.op, limit) {
                Err(Error::Timeout { .. }) => {
                    self.patient = false;
                    break;
                }
                waited => waited?,
            }
            past.settle();
        }
        self.collect();
        Ok(())
    }

    fn exchange(&mut self, request: &Request<'_>, need: Need) -> Result<()> {
        self.give_back(request.op, true);
        self.grow(request, need)
    }

    /// Gives what is free back to the driver, in whole units; how many bytes. What is not over is waited for, or stays.
    fn give_back(&mut self, op: &'static str, wait: bool) -> u64 {
        let mut given = 0;
        for (region, range) in self.free_ranges() {
            for unit in self.backing.units_in(region, range) {
                if !self.is_over(op, region, &unit, wait) {
                    continue;
                }
                let bytes = unit.end - unit.start;
                // SAFETY: the unit is free, and its uses are over, on every device.
                if let Err(fault) = unsafe { self.backing.unmap(region, unit.clone()) } {
                    tracing::warn!(device = self.link.device, %fault, "memory could not be given back");
                    let refused = fault.kind == FaultKind::Misuse;
                    if let Some(report) = fault.report {
                        self.link.refuse(report);
                    }
                    if refused {
                        continue;
                    }
                }
                self.heap.remove(region, unit.start, bytes);
                given += bytes;
                if let Some(ledger) = &mut self.ledger {
                    ledger.unmapped(unit.start, bytes);
                }
            }
        }
        let regions = &mut self.regions;
        regions.retain(|_, region| !region.is_spent());
        // Numbers of regions are used again, so no header may keep one that is gone.
        self.spare.retain(|block| matches!(block.place, Place::Piece { region, .. } if regions.contains_key(&region)));
        given
    }

    /// Gives all that is free, and over, back to the driver; how many bytes. Does not wait.
    pub(crate) fn trim(&mut self, op: &'static str) -> u64 {
        self.collect();
        self.dissolve();
        let given = self.give_back(op, false);
        if let Some(ledger) = &mut self.ledger {
            ledger.trimmed(given);
        }
        given
    }
}

impl Drop for Cache {
    /// Gives everything back but what holds live blocks: that goes when they go.
    fn drop(&mut self) {
        let home = self.home.clone();
        for block in home.returns.close() {
            self.put(block);
        }
        for block in self.end_audit() {
            self.put(block);
        }
        if let Some(ledger) = &self.ledger
            && self.stats.in_use > 0
        {
            let live = LeakReport { leaks: ledger.leaks() };
            tracing::warn!(device = self.link.device, kind = self.backing.name(), "buffers outlive their pool: {live}");
        }
        self.dissolve();
        self.give_back("close", false);
        for free in self.heap.free_ranges() {
            let_go(&self.regions[&free.region], free.payload, free.address..free.address + free.bytes);
        }
        self.small.take().for_each(Block::release);
    }
}
