//! The device-aware memory pool: the books of one device's memory, in the hands of its thread.
//!
//! ```text
//!   driver ── chunks (backing) ──> heap (large pieces, split and joined) ──> slabs ──> small blocks by class and stream
//! ```
//!
//! Only the owner allocates, so its books need no lock; anyone may free ([`block`](super::block)). Blocks of at most
//! 128 KiB come from slabs; what is freed goes to the list of its class and of the stream that used it last, and the
//! next request of that stream takes it from there: no lock, no driver call, no wait. Larger ones are pieces of the
//! [heap](super::heap). On 8 x H200 `cuMemAllocAsync` + `cuMemFreeAsync` costs 0.48 us from one thread and 16.1 us when
//! eight threads call at once; a pool that makes no driver call has no such problem.
//!
//! **Order.** Free memory remembers its uses ([`hazard`](super::hazard)), so whoever gets it waits, on the device, for
//! those that are not over, on whichever device they run (cf. pytorch#196257, CUDA.jl#1522). No event is recorded for a
//! free. Memory that needs no wait is preferred: the stream's own, then what is over, then what was never used
//! (rmm#850: a pool that steals first makes streams wait for each other).
//!
//! **Short of memory**, `ladder` has the order in which everything is tried.

pub(super) mod audit;
mod classes;
mod ladder;
mod small;
mod view;

use super::{
    backing::{self, Backing, BackingChoice, Region, Trial},
    block::{Block, BlockRef, ChunkKind, Home, Place},
    handle::DeviceHandle,
    hazard::History,
    heap::{Heap, Taken},
    insight::ledger::{self, Ledger},
    numa::Node,
    stats::MemoryStats,
};
use crate::{
    contain::Contained,
    driver::check,
    error::{Error, Result},
    memory::{OutOfMemoryReport, stream::StreamCore},
};
use audit::Audit;
use classes::{ALIGN, SMALL};
use ladder::Need;
use small::Small;
use std::{collections::HashMap, fmt, ops::Range, sync::Arc, time::Duration};

/// What the heap rounds to.
const GRAIN: usize = Heap::<History>::GRAIN;
/// The largest alignment that can be asked for.
pub(crate) const MOST_ALIGN: usize = 2 << 20;
/// Headers of large blocks that are kept for the next ones.
const SPARE_HEADERS: usize = 1024;
/// A pool that is small grows rather than let streams wait for each other: one that has just begun would else make them
/// run in turn (rmm#850). Beyond that the memory is worth more than the wait.
const EAGER: u64 = 256 << 20;
/// Large allocations between two looks for what others have freed.
const LOOK: u64 = 64;

/// How much a pool may take from a device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryLimit {
    Bytes(u64),
    Percent(f64),
}

impl MemoryLimit {
    pub(crate) fn of(self, total: u64) -> u64 {
        match self {
            MemoryLimit::Bytes(bytes) => bytes,
            MemoryLimit::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        }
    }
}

/// How often a callback may ask for another attempt.
pub(crate) const ATTEMPTS: usize = 16;

/// Asked when a device is out of memory; whether to try again.
#[derive(Clone)]
pub(crate) struct OnOutOfMemory(pub(crate) Contained<Arc<Asked>>);

/// What is asked.
type Asked = dyn Fn(&OutOfMemoryReport) -> bool + Send + Sync;

impl fmt::Debug for OnOutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a callback")
    }
}

/// How a pool's memory is to be managed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// The most that may be taken from each device.
    pub(crate) limit: Option<MemoryLimit>,
    /// What may be taken, as a multiple of the most that was ever in use, before free memory is moved instead.
    pub(crate) slack: Option<f64>,
    /// Where page-locked memory is to lie.
    pub(crate) node: Option<Node>,
    /// Bytes to take when the pool is built.
    pub(crate) reserve: Option<u64>,
    pub(crate) deadline: Duration,
    pub(crate) choice: BackingChoice,
    pub(crate) on_out_of_memory: Option<OnOutOfMemory>,
    /// Keep account of call sites and of what happened.
    pub(crate) record: Option<bool>,
    /// Red zones and poison.
    pub(crate) audit: bool,
    /// Devices of the pool, each of which has a lane for what it frees.
    pub(crate) devices: usize,
}

impl Settings {
    pub(crate) fn records(&self) -> bool {
        self.record.unwrap_or(cfg!(debug_assertions))
    }
}

/// What is asked for.
pub(crate) struct Request<'a> {
    pub(crate) op: &'static str,
    pub(crate) bytes: usize,
    /// A power of two, at most [`MOST_ALIGN`].
    pub(crate) align: usize,
    /// Who will use it first; none for memory that the host uses.
    pub(crate) stream: Option<&'a StreamCore>,
    /// Whether to stop waiting: the gang has failed.
    pub(crate) stop: &'a dyn Fn() -> bool,
}

/// The books of one kind of memory.
pub(crate) struct Cache {
    handle: Arc<DeviceHandle>,
    pub(crate) home: Arc<Home>,
    kind: ChunkKind,
    settings: Settings,
    /// Bytes that may be taken from the driver.
    limit: Option<u64>,
    /// Bytes up to which memory is taken from the driver rather than waited for.
    eager: u64,
    backing: Box<dyn Backing>,
    regions: HashMap<u32, Arc<Region>>,
    heap: Heap<History>,
    small: Small,
    #[allow(clippy::vec_box, reason = "a header is a node of `Returns`, and stays where it is")]
    spare: Vec<Box<Block>>,
    stats: MemoryStats,
    ledger: Option<Box<Ledger>>,
    audit: Option<Box<Audit>>,
    /// Whether there is a checker, a ledger or an audit, so that the hot path has one question to ask.
    watched: bool,
}

impl Cache {
    /// Books without memory. `owned`: they belong to a device thread; else to whoever holds the lock around them.
    /// `trial`: what new memory may be tried with.
    pub(crate) fn new(
        handle: &Arc<DeviceHandle>,
        kind: ChunkKind,
        owned: bool,
        settings: &Settings,
        trial: Trial<'_>,
    ) -> Result<Self> {
        // Of a GPU that several devices share, each has its part.
        let total = handle.driver.info().total_memory / handle.sharers as u64;
        let part = (handle.sharers > 1 && kind == ChunkKind::Device).then_some(total);
        let limit = settings.limit.map(|limit| limit.of(total)).or(part);
        Ok(Cache {
            handle: handle.clone(),
            home: Home::new(handle, owned, settings.devices),
            kind,
            limit,
            eager: (limit.unwrap_or(total) / 16).min(EAGER),
            settings: settings.clone(),
            backing: backing::open(handle, kind, settings.choice, trial)?,
            regions: HashMap::new(),
            heap: Heap::new(),
            small: Small::new(),
            spare: Vec::new(),
            stats: MemoryStats::default(),
            ledger: settings.records().then(|| Box::new(Ledger::new(handle.device, ledger::EVENTS))),
            audit: None,
            watched: settings.records() || handle.watch().is_some(),
        })
    }

    /// Bytes that may be taken from the driver, if there is a limit.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Takes memory from the driver before it is needed. At most a device's memory, as the builder has checked.
    pub(crate) fn reserve(&mut self, op: &'static str, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let request = Request { op, bytes: bytes as usize, align: ALIGN, stream: None, stop: &|| false };
        let grain = GRAIN as u64;
        let most = self.limit.unwrap_or(u64::MAX) / grain * grain;
        self.map(op, bytes.div_ceil(grain).saturating_mul(grain).min(most)).map_err(|error| match error {
            // The driver's fault does not say what was asked for.
            Error::OutOfMemory { .. } => {
                self.out_of_memory_report(&request, vec!["asked the driver for more"]).into_error()
            }
            other => other,
        })
    }

    /// A block of at least as many bytes; its contents are undefined and its hazards may hold old uses.
    // What is inlined here and in `put` is the hot path, which is one function that way: calls would be a third of it.
    #[inline(always)]
    pub(crate) fn allocate(&mut self, request: &Request<'_>) -> Result<BlockRef> {
        if !self.watched && request.bytes <= SMALL && request.align <= ALIGN {
            let class = classes::class(request.bytes);
            if let Some(block) = self.small.pop(class, request.stream.map(|stream| stream.id)) {
                return Ok(self.hand_out(block, request));
            }
        }
        self.allocate_slowly(request)
    }

    /// There is nothing in the stream's own list, or somebody watches.
    #[inline(never)]
    fn allocate_slowly(&mut self, request: &Request<'_>) -> Result<BlockRef> {
        let bytes = self.with_zone(request.bytes);
        let block = if bytes <= SMALL && request.align <= ALIGN {
            let class = classes::class(bytes);
            match self.small.pop(class, request.stream.map(|stream| stream.id)) {
                Some(block) => block,
                None => self.small_miss(class, request)?,
            }
        } else {
            self.large(request)?
        };
        if let Some(watch) = self.handle.watch() {
            let device = block.device().map(|_| watch.device);
            watch.checker.allocated(block.address, request.bytes, device, self.kind != ChunkKind::Device);
        }
        if let Some(ledger) = &mut self.ledger {
            let stream = request.stream.map_or(0, |stream| stream.id);
            ledger.allocated(block.address, request.bytes, block.bytes, stream, check::OpSite::current());
        }
        Ok(self.hand_out(block, request))
    }

    #[inline(always)]
    fn hand_out(&mut self, mut block: Box<Block>, request: &Request<'_>) -> BlockRef {
        block.requested = request.bytes;
        self.stats.allocations += 1;
        self.stats.requested += request.bytes as u64;
        self.stats.in_use += block.bytes as u64;
        self.stats.peak = self.stats.peak.max(self.stats.in_use);
        BlockRef::wake(block)
    }

    /// A block comes to rest: one that this thread has freed.
    #[inline(always)]
    pub(crate) fn put(&mut self, block: Box<Block>) {
        if !self.watched && matches!(block.place, Place::Slab { .. }) {
            self.take_back(&block);
            return self.small.put(block);
        }
        self.sort_in(block, false);
    }

    #[inline(always)]
    fn take_back(&mut self, block: &Block) {
        self.stats.in_use -= block.bytes as u64;
        self.stats.requested -= block.requested as u64;
    }

    #[inline(never)]
    fn sort_in(&mut self, mut block: Box<Block>, remote: bool) {
        if let Some(audit) = &mut self.audit {
            let Some(looked_at) = audit.returned(block, remote) else { return };
            block = looked_at;
        }
        self.take_back(&block);
        if let Some(ledger) = &mut self.ledger {
            ledger.freed(block.address, remote);
        }
        match block.place {
            Place::Slab { .. } => self.small.put(block),
            Place::Piece { piece, .. } => {
                let history = block.hazards.history();
                history.settle();
                self.heap.free(piece, history.hand_on());
                if self.spare.len() < SPARE_HEADERS {
                    self.spare.push(block);
                }
            }
            Place::Region => unreachable!("memory that is not pooled does not come home"),
        }
    }

    /// Sorts what other threads have freed into the books; whether there was anything.
    #[cold]
    fn collect(&mut self) -> bool {
        let before = self.stats.remote_frees;
        let home = self.home.clone();
        for block in home.returns.take() {
            self.stats.remote_frees += 1;
            self.sort_in(block, true);
        }
        self.stats.remote_frees > before
    }

    /// There is nothing in the stream's own list.
    #[cold]
    fn small_miss(&mut self, class: usize, request: &Request<'_>) -> Result<Box<Block>> {
        if self.collect()
            && let Some(block) = self.small.pop(class, request.stream.map(|stream| stream.id))
        {
            return Ok(block);
        }
        if let Some(block) = self.small.pop_free(class, request.stream) {
            self.stats.steals += 1;
            return Ok(block);
        }
        if let Some(block) = self.cut(class) {
            return Ok(block);
        }
        let free = |past: &History, room, bytes| past.free_place(request.stream, room, bytes);
        if self.add_slab(class, false, free)
            && let Some(block) = self.cut(class)
        {
            return Ok(block);
        }
        let own = self.handle.device;
        let need = Need { least: classes::bytes(class).next_multiple_of(GRAIN), good: self.small.next_slab(class) };
        if self.grow_rather(request, need)
            && self.add_slab(class, false, free)
            && let Some(block) = self.cut(class)
        {
            return Ok(block);
        }
        // A stream waits for others' blocks on the device; the host would have to wait itself.
        let stolen = request.stream.and_then(|_| self.small.steal(class, own));
        let mut block = match stolen {
            Some(block) => block,
            None => self.climb(request, need, |cache, used| {
                let first = cache.small.pop(class, request.stream.map(|stream| stream.id));
                if let Some(block) = first.or_else(|| cache.small.pop_free(class, request.stream)) {
                    return Some(block);
                }
                let usable = |past: &History, room, bytes| past.usable_place(own, room, bytes);
                if cache.add_slab(class, true, free) || used && cache.add_slab(class, true, usable) {
                    return cache.cut(class);
                }
                if used { cache.small.steal(class, own) } else { None }
            })?,
        };
        self.count(block.hazards.history().waits_for(request.stream));
        Ok(block)
    }

    /// Memory was handed out that others may still use: whether it was, and its new stream will wait for them.
    fn count(&mut self, waits: bool) {
        self.stats.steals += u64::from(waits);
        self.stats.waits += u64::from(waits);
    }

    fn cut(&mut self, class: usize) -> Option<Box<Block>> {
        let (slab, address, region, history) = self.small.cut(class)?;
        let bytes = classes::bytes(class);
        let place = Place::Slab { slab, class: class as u8 };
        Some(Block::at_rest(&self.handle, self.kind, Some(&self.home), region, place, (address, bytes), history))
    }

    /// A slab from what the heap has free; a smaller one where there is no room for a whole one.
    fn add_slab(
        &mut self,
        class: usize,
        thoroughly: bool,
        mut place: impl FnMut(&History, Range<usize>, usize) -> Option<usize>,
    ) -> bool {
        let least = classes::bytes(class).next_multiple_of(GRAIN);
        let mut bytes = self.small.next_slab(class);
        loop {
            let taken = match thoroughly {
                true => self.heap.allocate_thoroughly(bytes, ALIGN, &mut place),
                false => self.heap.allocate_in(bytes, ALIGN, &mut place),
            };
            if let Some(taken) = taken {
                let region = self.regions[&taken.region].clone();
                self.small.add(class, taken.piece, region, (taken.address, taken.bytes), taken.payload);
                return true;
            }
            if bytes <= least {
                return false;
            }
            bytes = (bytes / 2).next_multiple_of(GRAIN).max(least);
        }
    }

    fn large(&mut self, request: &Request<'_>) -> Result<Box<Block>> {
        let (bytes, align) = (self.with_zone(request.bytes).max(1), request.align);
        if self.stats.allocations.is_multiple_of(LOOK) {
            self.collect();
        }
        let own = self.handle.device;
        let free = |past: &History, room, bytes| past.free_place(request.stream, room, bytes);
        let mut taken = self.heap.allocate_in(bytes, align, free);
        if taken.is_none() && self.collect() {
            taken = self.heap.allocate_in(bytes, align, free);
        }
        if taken.is_none() && self.small.has_empty_slabs() {
            self.dissolve();
            taken = self.heap.allocate_in(bytes, align, free);
        }
        let need = Need { least: bytes, good: bytes };
        if taken.is_none() && self.grow_rather(request, need) {
            taken = self.heap.allocate_in(bytes, align, free);
        }
        let taken = match taken {
            Some(taken) => taken,
            None => {
                let with_a_wait = |past: &History, room, bytes| past.usable_place(own, room, bytes);
                let found = request.stream.and_then(|_| self.heap.allocate_in(bytes, align, with_a_wait));
                let taken = match found {
                    Some(taken) => taken,
                    None => self.climb(request, need, |cache, used| {
                        let found = cache.heap.allocate_thoroughly(bytes, align, free);
                        let used = || used.then(|| cache.heap.allocate_thoroughly(bytes, align, with_a_wait)).flatten();
                        found.or_else(used)
                    })?,
                };
                self.count(taken.payload.waits_for(request.stream));
                taken
            }
        };
        Ok(self.header(taken))
    }

    /// The header of a large block: an old one, if there is one.
    fn header(&mut self, taken: Taken<History>) -> Box<Block> {
        let Taken { piece, region, address, bytes, payload } = taken;
        let place = Place::Piece { piece, region };
        match self.spare.pop() {
            Some(mut block) => {
                if !matches!(block.place, Place::Piece { region: old, .. } if old == region) {
                    block.region = self.regions[&region].clone();
                }
                (block.address, block.bytes, block.place) = (address, bytes, place);
                block.hazards.history().receive(payload);
                block
            }
            None => {
                let region = &self.regions[&region];
                Block::at_rest(&self.handle, self.kind, Some(&self.home), region, place, (address, bytes), payload)
            }
        }
    }
}
