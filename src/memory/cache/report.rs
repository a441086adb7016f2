//! A cache as users see it: counters, snapshots, out-of-memory reports, leaks.
//!
//! Called by the owner's thread only. Nothing here changes the cache, except that remote frees are taken in first.

use super::{Cache, Request};
use crate::{
    driver::Address,
    error::{Error, op_site::OpSite as Called},
    memory::{
        History, MemorySnapshot, MemoryStats, OutOfMemoryReport,
        insight::{BlockInfo, BlockState, CallSite, Leak, out_of_memory::PendingOnStream, snapshot::ChunkInfo},
    },
};
use std::{collections::BTreeMap, sync::Arc};

/// Most holders that a report names.
const HOLDERS: usize = 10;

impl Cache {
    /// Takes remote frees in, and returns the counters.
    pub(crate) fn stats(&mut self) -> MemoryStats {
        self.collect();
        let mut pending = 0;
        for block in self.small.free_blocks() {
            pending += if block.hazards.history().is_over() { 0 } else { block.bytes as u64 };
        }
        for free in self.heap.free_ranges() {
            pending += free.payload.busy(free.bytes as usize).iter().map(|busy| busy.len() as u64).sum::<u64>();
        }
        MemoryStats { pending, ..self.counters() }
    }

    fn counters(&self) -> MemoryStats {
        MemoryStats {
            reserved: self.backing.reserved(),
            slabs: self.small.slabs().count() as u64,
            driver_calls: self.backing.driver_calls(),
            ..self.stats
        }
    }

    /// Takes remote frees in, and publishes the counters to other threads. They see the last published values.
    pub(crate) fn publish_stats(&mut self) {
        self.collect();
        self.owner.mirror.write(self.counters().to_words());
    }

    pub(crate) fn snapshot(&mut self) -> MemorySnapshot {
        let stats = self.stats();
        let units = |region: &u32| self.backing.units_in(*region, 0..Address::MAX);
        let mut chunks: Vec<ChunkInfo> = self
            .regions
            .keys()
            .flat_map(units)
            .map(|unit| ChunkInfo { address: unit.start, bytes: unit.end - unit.start })
            .collect();
        chunks.sort_by_key(|chunk| chunk.address);
        let mut blocks = BTreeMap::new();
        // First the pieces; slabs are then replaced by their blocks.
        let (free, pieces) = (self.heap.free_ranges(), self.heap.walk());
        for piece in pieces.iter().filter(|span| span.piece.is_some()) {
            blocks.insert(piece.address, info(piece.address, piece.bytes, BlockState::Live, None));
        }
        for range in free {
            let mut at = 0;
            let mut add = |upto: usize, state| {
                if upto > at {
                    let address = range.address + at as u64;
                    blocks.insert(address, info(address, (upto - at) as u64, state, None));
                    at = upto;
                }
            };
            for busy in range.payload.busy(range.bytes as usize) {
                add(busy.start, BlockState::Free);
                add(busy.end, BlockState::Pending);
            }
            add(range.bytes as usize, BlockState::Free);
        }
        for slab in self.small.slabs() {
            blocks.remove(&slab.address);
            let bytes = slab.block_bytes();
            for at in (0..slab.uncut()).step_by(bytes) {
                let address = slab.address + at as u64;
                blocks.insert(address, info(address, bytes as u64, BlockState::Live, Some(bytes as u64)));
            }
            if slab.uncut() < slab.bytes {
                let address = slab.address + slab.uncut() as u64;
                let rest = (slab.bytes - slab.uncut()) as u64;
                blocks.insert(address, info(address, rest, BlockState::Free, Some(bytes as u64)));
            }
        }
        for block in self.small.free_blocks() {
            let bytes = block.bytes as u64;
            blocks.insert(block.address, info(block.address, bytes, state(block.hazards.history()), Some(bytes)));
        }
        let mut snapshot = MemorySnapshot {
            device: self.handle.device,
            stats,
            chunks,
            blocks: blocks.into_values().collect(),
            ..Default::default()
        };
        if let Some(ledger) = &self.ledger {
            ledger.complete(&mut snapshot);
        }
        snapshot
    }

    pub(super) fn out_of_memory_report(
        &mut self,
        request: &Request<'_>,
        rungs: Vec<&'static str>,
    ) -> OutOfMemoryReport {
        let mut pending = BTreeMap::new();
        let mut free_in_pool = 0;
        let mut count = |past: &History, bytes: u64| {
            free_in_pool += bytes;
            for (stream, bytes) in past.pending(bytes as usize) {
                *pending.entry((stream.handle.device, stream.id)).or_insert(0) += bytes;
            }
        };
        for block in self.small.free_blocks() {
            let bytes = block.bytes as u64;
            count(block.hazards.history(), bytes);
        }
        self.heap.free_ranges().for_each(|free| count(free.payload, free.bytes));
        let (driver_free, driver_total) = self.handle.driver.memory_info().unwrap_or((0, 0));
        let mut holders = self.ledger.as_ref().map_or_else(Vec::new, |ledger| ledger.holders());
        holders.truncate(HOLDERS);
        let pending = pending.into_iter().map(|((device, stream), bytes)| PendingOnStream { device, stream, bytes });
        OutOfMemoryReport {
            device: self.handle.device,
            op: Called::current().map_or(request.op, |here| here.op),
            site: Called::current().map(CallSite::from),
            requested: request.bytes as u64,
            limit: self.limit,
            in_use: self.stats.in_use,
            reserved: self.backing.reserved(),
            free_in_pool,
            largest_free: self.heap.largest_free(),
            pending: pending.collect(),
            driver_free,
            driver_total,
            recorded: self.ledger.is_some(),
            holders,
            jobs: Vec::new(),
            rungs,
        }
    }

    pub(crate) fn leaks(&mut self) -> Vec<Leak> {
        self.collect();
        self.ledger.as_ref().map_or_else(Vec::new, |ledger| ledger.leaks())
    }
}

impl OutOfMemoryReport {
    pub(super) fn into_error(self) -> Error {
        let (free, capacity) = match self.limit {
            Some(limit) => (limit.saturating_sub(self.reserved), limit),
            None => (self.driver_free, self.driver_total),
        };
        let OutOfMemoryReport { device, op, requested, in_use, .. } = self;
        Error::OutOfMemory { device, op, requested, in_use, free, capacity, report: Arc::new(self) }
    }
}

fn state(past: &History) -> BlockState {
    if past.is_over() { BlockState::Free } else { BlockState::Pending }
}

fn info(address: u64, bytes: u64, state: BlockState, class: Option<u64>) -> BlockInfo {
    BlockInfo { address, bytes, state, class, ..Default::default() }
}
