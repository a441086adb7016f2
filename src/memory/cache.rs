//! The owner's lists of free blocks: the crate's first pool.
//!
//! Only the device's own thread allocates, so the lists need no lock; anyone may free, through the home's inbox. Blocks
//! up to [`SMALL`] come in size classes (four per doubling) carved from slabs; larger ones are chunks of their own,
//! rounded to 2 MiB and reused for requests down to four fifths of their size. In the steady state an allocation makes no
//! driver call. That is the point: on 8 x H200 `cuMemAllocAsync` + `cuMemFreeAsync` costs 0.48 us from one thread and
//! 16.1 us when eight threads call at once.
//!
//! When the driver (or the limit) has no more: take the inbox, search again, wait for and give back what is free, retry;
//! then [`Error::OutOfMemory`], with nothing lost.

use super::{
    OutOfMemoryReport,
    block::{Block, Chunk, ChunkKind, FreeBlock, Home},
    hazard::{History, all_completed, names_lost_peer, wait_all},
    link::Link,
    stats::MemoryStats,
};
use crate::{
    driver::FaultKind,
    error::{Error, Result},
    plant::Bug,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Weak},
    time::Duration,
};

const SLAB: usize = 2 << 20;
const SMALL: usize = 1 << 20;
const ALIGN: usize = 256;

/// The free blocks of one kind of memory, in the hands of their owner.
pub(crate) struct Cache {
    link: Arc<Link>,
    pub(crate) home: Arc<Home>,
    kind: ChunkKind,
    limit: Option<u64>,
    deadline: Duration,
    free: BTreeMap<usize, Vec<FreeBlock>>,
    chunks: Vec<(Weak<Chunk>, usize)>,
    stats: MemoryStats,
}

impl Cache {
    pub(crate) fn new(link: &Arc<Link>, kind: ChunkKind, limit: Option<u64>, deadline: Duration) -> Self {
        Cache {
            link: link.clone(),
            home: Home::new(),
            kind,
            limit,
            deadline,
            free: BTreeMap::new(),
            chunks: Vec::new(),
            stats: MemoryStats::default(),
        }
    }

    /// A block of at least `bytes`; its contents are undefined and its hazards may hold old uses.
    pub(crate) fn allocate(&mut self, op: &'static str, bytes: usize) -> Result<Arc<Block>> {
        let class = class(bytes).ok_or_else(|| self.out_of_memory(op, bytes))?;
        let block = match self.search(class) {
            Some(block) => block,
            None => self.grow(op, class).or_else(|_| self.squeeze(op, class))?,
        };
        let block = Block::new(block, &self.home);
        if let Some(watch) = self.link.watch() {
            let device = block.device().map(|_| watch.device);
            watch.checker.allocated(block.address, bytes, device, self.kind != ChunkKind::Device);
        }
        self.stats.allocations += 1;
        self.stats.peak = self.stats.peak.max(self.home.in_use());
        Ok(block)
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        MemoryStats { in_use: self.home.in_use(), reserved: self.reserved(), ..self.stats }
    }

    fn search(&mut self, class: usize) -> Option<FreeBlock> {
        if let Some(block) = self.pop(class) {
            return Some(block);
        }
        self.collect();
        self.pop(class)
    }

    /// Sorts freed blocks into the lists.
    fn collect(&mut self) {
        for block in self.home.inbox.take() {
            self.free.entry(block.bytes).or_default().push(block);
        }
    }

    fn pop(&mut self, class: usize) -> Option<FreeBlock> {
        let upto = if class > SMALL { class + class / 4 } else { class };
        let own = self.link.device;
        for (_, blocks) in self.free.range_mut(class..=upto) {
            // The latest is warm, but one whose uses are over needs no wait at all.
            while !blocks.is_empty() {
                // In steps it must not depend on what happens to be over.
                let over = |b: &FreeBlock| !self.link.stepped && all_completed(&b.history.uses);
                let at = blocks.iter().rposition(over).unwrap_or(blocks.len() - 1);
                let block = blocks.swap_remove(at);
                if !names_lost_peer(&block.history.uses, own) {
                    return Some(block);
                }
                // A lost device may hold a block for ever; it must not fail every later use of it here.
                block.release();
            }
        }
        None
    }

    /// Takes a chunk from the driver: one block, or a slab full of them.
    fn grow(&mut self, op: &'static str, class: usize) -> Result<FreeBlock> {
        let bytes = class.max(SLAB);
        if self.limit.is_some_and(|limit| self.reserved() + bytes as u64 > limit) {
            return Err(self.out_of_memory(op, bytes));
        }
        self.stats.driver_calls += 1;
        let driver = &self.link.driver;
        let address = match self.kind {
            ChunkKind::Device => driver.mem_alloc(bytes),
            ChunkKind::Pinned => driver.host_alloc(bytes).map(|ptr| ptr as u64),
            ChunkKind::Managed => driver.managed_alloc(bytes).map(|ptr| ptr as u64),
        }
        .map_err(|fault| match fault.kind {
            FaultKind::OutOfMemory => self.out_of_memory(op, bytes),
            _ => self.link.error(op, fault),
        })?;
        let chunk = Chunk::new(&self.link, address, self.kind);
        self.chunks.retain(|(chunk, _)| chunk.strong_count() > 0);
        self.chunks.push((Arc::downgrade(&chunk), bytes));
        if class > SMALL {
            return Ok(FreeBlock { chunk, address, bytes, history: History::default() });
        }
        let list = self.free.entry(class).or_default();
        for i in (1..bytes / class).rev() {
            let address = address + (i * class) as u64;
            list.push(FreeBlock { chunk: chunk.clone(), address, bytes: class, history: History::default() });
        }
        Ok(FreeBlock { chunk, address, bytes: class, history: History::default() })
    }

    /// The driver has no more: search what came back meanwhile, then give back everything that is free, and try again.
    fn squeeze(&mut self, op: &'static str, class: usize) -> Result<FreeBlock> {
        if let Some(block) = self.search(class) {
            return Ok(block);
        }
        // A slab with a block in use cannot go back, so its free blocks must not be lost.
        let mut at_rest: HashMap<*const Chunk, usize> = HashMap::new();
        for block in self.free.values().flatten() {
            *at_rest.entry(Arc::as_ptr(&block.chunk)).or_default() += 1;
        }
        for (_, blocks) in std::mem::take(&mut self.free) {
            for block in blocks {
                let chunk = Arc::as_ptr(&block.chunk);
                let whole = at_rest[&chunk] == Arc::strong_count(&block.chunk);
                let early = self.link.planted(Bug::ChunkReleasedEarly);
                if whole && (early || wait_all(&block.history.uses, op, self.deadline).is_ok()) {
                    // What others have waited for is not among the uses any more.
                    self.link.acquire(block.history.known());
                    *at_rest.get_mut(&chunk).expect("counted above") -= 1;
                } else {
                    // In use, or not over: it must not go to the driver. Keep it.
                    self.free.entry(block.bytes).or_default().push(block);
                }
            }
        }
        self.chunks.retain(|(chunk, _)| chunk.strong_count() > 0);
        self.grow(op, class)
    }

    fn reserved(&self) -> u64 {
        self.chunks.iter().filter(|(chunk, _)| chunk.strong_count() > 0).map(|(_, bytes)| *bytes as u64).sum()
    }

    fn out_of_memory(&self, op: &'static str, requested: usize) -> Error {
        let (driver_free, driver_total) = self.link.driver.memory_info().unwrap_or((0, 0));
        let (device, requested, limit) = (self.link.device, requested as u64, self.limit);
        let (in_use, reserved) = (self.home.in_use(), self.reserved());
        let (free, capacity) = match limit {
            Some(limit) => (limit.saturating_sub(reserved), limit),
            None => (driver_free, driver_total),
        };
        let lists = || self.free.values().flatten().map(|block| block.bytes as u64);
        let report = Arc::new(OutOfMemoryReport {
            device,
            op,
            requested,
            limit,
            in_use,
            reserved,
            free_in_pool: lists().sum(),
            largest_free: lists().max().unwrap_or(0),
            driver_free,
            driver_total,
            ..Default::default()
        });
        Error::OutOfMemory { device, op, requested, in_use, free, capacity, report }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.collect();
        std::mem::take(&mut self.free).into_values().flatten().for_each(FreeBlock::release);
    }
}

/// The size that a request is rounded up to; none for sizes that cannot be had.
fn class(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(ALIGN);
    if bytes > isize::MAX as usize / 2 {
        return None;
    }
    if bytes > SMALL {
        return Some(bytes.next_multiple_of(SLAB));
    }
    let quarter = (bytes.next_power_of_two() / 8).max(ALIGN);
    Some(bytes.next_multiple_of(quarter))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn classes() {
        assert_eq!(class(0), Some(256));
        assert_eq!(class(257), Some(512));
        assert_eq!(class(5 * 1024), Some(5 * 1024));
        assert_eq!(class(5 * 1024 + 1), Some(6 * 1024));
        assert_eq!(class(SMALL), Some(SMALL));
        assert_eq!(class(SMALL + 1), Some(SLAB));
        assert_eq!(class(usize::MAX), None);
    }

    proptest! {
        #[test]
        fn a_class_holds_its_request_and_wastes_little(bytes in 1usize..(1 << 30)) {
            let c = class(bytes).unwrap();
            prop_assert!(c >= bytes && c.is_multiple_of(ALIGN) && class(c) == Some(c));
            prop_assert!(!(4096..=SMALL).contains(&bytes) || c <= bytes + bytes / 4 + ALIGN);
        }
    }
}
