//! The memory cache of one device (or of one NUMA node's page-locked memory): it serves allocations and takes frees.
//!
//! ```text
//!   driver -- units (backing) --> heap (large pieces, split and joined) --> slabs --> small blocks by class, stream
//! ```
//!
//! Only the owner's thread allocates, so the cache needs no lock; any thread may free ([`block`](super::block)). Blocks
//! of at most 128 KiB come from slabs. A freed small block goes to the list of its class and of the stream that used it
//! last; the next request of that stream takes it from there without a driver call. Larger blocks are pieces of the
//! [heap](super::heap). On 8 x H200 `cuMemAllocAsync` + `cuMemFreeAsync` costs 16.1 us when eight threads call.
//!
//! **Order.** Free memory keeps its uses ([`hazard`](super::hazard)). The next owner waits, on the device, for those
//! that are not over (cf. pytorch#196257, CUDA.jl#1522). Memory that needs no wait is preferred: first the stream's
//! own, then memory whose uses are over, then fresh memory (rmm#850). `ladder` has the order when memory is short.

pub(super) mod audit;
mod classes;
mod dedicated;
mod ladder;
mod report;
mod settings;
mod small;

use super::{
    Block, BlockRef, DeviceHandle, History, Origin, ProbeContext, Region, StreamCore,
    backing::{self, Backing, ChunkKind},
    block::Owner,
    heap::{Heap, Taken},
    insight::ledger::{self, Ledger},
    stats::MemoryStats,
};
use crate::error::{Error, Result, op_site::OpSite};
use audit::Audit;
use classes::{ALIGN, SMALL};
use dedicated::DedicatedChunks;
use ladder::Need;
pub(crate) use settings::{ATTEMPTS, MemoryLimit, OnOutOfMemory, Settings};
use small::Small;
use std::{collections::HashMap, ops::Range, sync::Arc};

const GRAIN: usize = Heap::<History>::GRAIN;
/// The largest alignment that a request may have.
pub(crate) const MOST_ALIGN: usize = 2 << 20;
const SPARE_HEADERS: usize = 1024;
/// Up to this size a pool grows rather than make streams wait for each other (rmm#850). Beyond it the wait costs less.
const EAGER: u64 = 256 << 20;
/// Large allocations between two looks at the remote free list.
const LOOK: u64 = 64;

pub(crate) struct Request<'a> {
    pub(crate) op: &'static str,
    pub(crate) bytes: usize,
    /// A power of two, at most [`MOST_ALIGN`].
    pub(crate) align: usize,
    /// The stream that will use the memory first. None for memory that the host uses.
    pub(crate) stream: Option<&'a StreamCore>,
    pub(crate) stop: &'a dyn Fn() -> bool,
}

pub(crate) struct Cache {
    handle: Arc<DeviceHandle>,
    pub(crate) owner: Arc<Owner>,
    kind: ChunkKind,
    settings: Settings,
    limit: Option<u64>,
    eager: u64,
    backing: Box<dyn Backing>,
    regions: HashMap<u32, Arc<Region>>,
    heap: Heap<History>,
    small: Small,
    #[allow(clippy::vec_box, reason = "a header is a node of `Returns`, and stays where it is")]
    spare: Vec<Box<Block>>,
    dedicated: DedicatedChunks,
    stats: MemoryStats,
    ledger: Option<Box<Ledger>>,
    audit: Option<Box<Audit>>,
    watched: bool,
}

impl Cache {
    /// A cache without memory. `owned`: it belongs to a device thread; else to the holder of the lock around it.
    /// `probe`: a stream and a peer for tests of new memory.
    pub(crate) fn new(
        handle: &Arc<DeviceHandle>,
        kind: ChunkKind,
        owned: bool,
        settings: &Settings,
        probe: ProbeContext<'_>,
    ) -> Result<Self> {
        // Devices that share a GPU get equal parts of its memory.
        let total = handle.driver.info().total_memory / handle.sharers as u64;
        let part = (handle.sharers > 1 && kind == ChunkKind::Device).then_some(total);
        let limit = settings.limit.map(|limit| limit.of(total)).or(part);
        Ok(Cache {
            handle: handle.clone(),
            owner: Owner::new(handle, owned, settings.devices),
            kind,
            limit,
            eager: (limit.unwrap_or(total) / 16).min(EAGER),
            settings: settings.clone(),
            backing: backing::open(handle, kind, settings.choice, probe)?,
            regions: HashMap::new(),
            heap: Heap::default(),
            small: Small::new(),
            spare: Vec::new(),
            dedicated: DedicatedChunks::default(),
            stats: MemoryStats::default(),
            ledger: settings.records().then(|| Box::new(Ledger::new(handle.device, ledger::EVENTS))),
            audit: None,
            watched: settings.records() || handle.watch().is_some(),
        })
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Takes memory from the driver before it is needed. The builder has checked `bytes` against the device's memory.
    pub(crate) fn reserve(&mut self, op: &'static str, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let request = Request { op, bytes: bytes as usize, align: ALIGN, stream: None, stop: &|| false };
        let grain = GRAIN as u64;
        let most = self.limit.unwrap_or(u64::MAX) / grain * grain;
        self.map(op, bytes.div_ceil(grain).saturating_mul(grain).min(most)).map_err(|error| match error {
            // The driver's fault does not name the request.
            Error::OutOfMemory { .. } => {
                self.out_of_memory_report(&request, vec!["asked the driver for more"]).into_error()
            }
            other => other,
        })
    }

    /// A block of at least `request.bytes` bytes. The contents are undefined, and the hazards may hold old uses.
    // `allocate` and `put` inline all of the hot path: calls would be a third of its time.
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

    /// Serves a request when the stream's own list is empty, or a checker, a ledger or an audit watches.
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
        let stream = request.stream.map_or(0, |stream| stream.id);
        self.note(|ledger| ledger.allocated(block.address, request.bytes, block.bytes, stream, OpSite::current()));
        Ok(self.hand_out(block, request))
    }

    fn note(&mut self, note: impl FnOnce(&mut Ledger)) {
        if let Some(ledger) = &mut self.ledger {
            note(ledger);
        }
    }

    #[inline(always)]
    fn hand_out(&mut self, mut block: Box<Block>, request: &Request<'_>) -> BlockRef {
        block.requested = request.bytes;
        self.stats.allocations += 1;
        self.stats.requested += request.bytes as u64;
        self.stats.in_use += block.bytes as u64;
        self.stats.peak = self.stats.peak.max(self.stats.in_use);
        BlockRef::activate(block)
    }

    #[inline(always)]
    pub(crate) fn put(&mut self, block: Box<Block>) {
        if !self.watched && matches!(block.origin, Origin::Slab { .. }) {
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
        if block.origin == Origin::Region {
            return self.leave(block);
        }
        if let Some(audit) = &mut self.audit {
            let Some(looked_at) = audit.returned(block, remote) else { return };
            block = looked_at;
        }
        self.take_back(&block);
        self.note(|ledger| ledger.freed(block.address, remote));
        match block.origin {
            Origin::Slab { .. } => self.small.put(block),
            Origin::Piece { piece, .. } => {
                let history = block.hazards.history();
                history.settle();
                self.heap.free(piece, history.hand_on());
                if self.spare.len() < SPARE_HEADERS {
                    self.spare.push(block);
                }
            }
            Origin::Region => unreachable!("it has left above"),
        }
    }

    /// Returns whether there was any.
    #[cold]
    fn collect(&mut self) -> bool {
        let before = self.stats.remote_frees;
        let owner = self.owner.clone();
        for block in owner.returns.take() {
            self.stats.remote_frees += 1;
            self.sort_in(block, true);
        }
        self.stats.remote_frees > before
    }

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
        // A stream waits on the device for the users of a stolen block; the host would have to wait itself.
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
        self.count(!block.hazards.history().is_free_for(request.stream));
        Ok(block)
    }

    /// Counts memory that was handed out; `waits` if its new stream has to wait for earlier users.
    fn count(&mut self, waits: bool) {
        self.stats.steals += u64::from(waits);
        self.stats.waits += u64::from(waits);
    }

    fn cut(&mut self, class: usize) -> Option<Box<Block>> {
        let (slab, address, region, history) = self.small.cut(class)?;
        let bytes = classes::bytes(class);
        let origin = Origin::Slab { slab, class: class as u8 };
        Some(Block::new_free(&self.handle, self.kind, Some(&self.owner), region, origin, (address, bytes), history))
    }

    /// Makes a slab from free memory of the heap. It is smaller where there is no room for a full one.
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
                self.count(!taken.payload.is_free_for(request.stream));
                taken
            }
        };
        Ok(self.header(taken))
    }

    fn header(&mut self, taken: Taken<History>) -> Box<Block> {
        let Taken { piece, region, address, bytes, payload } = taken;
        let origin = Origin::Piece { piece, region };
        match self.spare.pop() {
            Some(mut block) => {
                if !matches!(block.origin, Origin::Piece { region: old, .. } if old == region) {
                    block.region = self.regions[&region].clone();
                }
                (block.address, block.bytes, block.origin) = (address, bytes, origin);
                block.hazards.history().receive(payload);
                block
            }
            None => {
                let region = &self.regions[&region];
                Block::new_free(&self.handle, self.kind, Some(&self.owner), region, origin, (address, bytes), payload)
            }
        }
    }
}
