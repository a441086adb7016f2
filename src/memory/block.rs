//! A block: one piece of memory with its header, which keeps the block's last uses ([`hazard`](super::hazard)).
//!
//! The cache makes blocks, buffers hold them. When the last handle is dropped, on any thread, the block goes back to
//! its owner: the device thread's cache, or the lock that guards a cache of page-locked memory. A header is used again:
//! a free block is a `Box<Block>` in its owner's lists, a block in use a counted [`BlockRef`]. So an allocation pops a
//! pointer, and a free on another thread pushes the header into the owner's remote free list ([`Returns`]).

use super::{
    Access, Cache, DeviceHandle, History, Region, StreamCore, backing::ChunkKind, hazard::Hazards, heap::Piece,
};
use crate::{
    driver::{Address, DriverRef, FailPoint},
    error::Result,
    sync::{CommitWord, Flag, Link as Node, Linked, Mirror, RefCount, Returns},
};
use std::cell::{Cell, RefCell};
use std::ops::{Deref, Range};
use std::ptr::{self, NonNull};
use std::{marker::PhantomData, sync::Arc, time::Duration};

/// Refuses, at compile time, types with an alignment above 256 bytes: every block starts at a multiple of 256 bytes.
pub const fn fits_blocks<T>() {
    assert!(align_of::<T>() <= 256, "device memory is aligned to 256 bytes");
}

/// A block, in use or free.
pub struct Block {
    refs: RefCount,
    back: Node<Block>,
    pub(crate) handle: Arc<DeviceHandle>,
    pub(crate) kind: ChunkKind,
    pub(crate) address: Address,
    /// Size of the block. It may be larger than `requested`.
    pub(super) bytes: usize,
    pub(super) requested: usize,
    pub(crate) hazards: Hazards,
    pub(super) origin: Origin,
    /// None for memory that no cache owns.
    owner: Option<Arc<Owner>>,
    /// Keeps the memory mapped, also after the pool has ended.
    pub(super) region: Arc<Region>,
    /// Set when the contents have moved elsewhere or are gone. A graph that names the block is then out of date.
    retired: Flag,
    /// Set when a graph names the block: launches use it without a borrow. See [`turn`](super::turn).
    in_graph: Flag,
    /// Set when work that may never end uses the memory. The last handle then does not return the block.
    abandoned: Flag,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    Slab { slab: u32, class: u8 },
    Piece { piece: Piece, region: u32 },
    Region,
}

// SAFETY: `back` returns the one field of that type, which only `Returns` touches.
unsafe impl Linked for Block {
    fn link(&self) -> &Node<Self> {
        &self.back
    }
}

impl Block {
    pub(super) fn new_free(
        handle: &Arc<DeviceHandle>,
        kind: ChunkKind,
        owner: Option<&Arc<Owner>>,
        region: &Arc<Region>,
        origin: Origin,
        (address, bytes): (Address, usize),
        history: History,
    ) -> Box<Self> {
        Box::new(Block {
            refs: RefCount::new(),
            back: Default::default(),
            handle: handle.clone(),
            kind,
            address,
            bytes,
            requested: 0,
            hazards: Hazards::with(history),
            origin,
            owner: owner.cloned(),
            region: region.clone(),
            retired: Flag::new(),
            in_graph: Flag::new(),
            abandoned: Flag::new(),
        })
    }

    /// Graphs that name this block are out of date from now on, until the block is handed out again.
    pub(crate) fn retire(&self) {
        self.retired.raise();
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.is_raised()
    }

    /// A graph names the block from now on, until the block is handed out again.
    pub(crate) fn name_in_graph(&self) {
        self.in_graph.raise();
    }

    /// How a use counts on this stream. Other code may have written its memory on its own stream before, and may do so
    /// after it.
    pub fn access_on(&self, stream: &StreamCore, access: Access) -> Access {
        if stream.adopted && self.region().adopted { Access::Write } else { access }
    }

    /// Whether a graph names it.
    #[inline]
    pub fn is_in_graph(&self) -> bool {
        self.in_graph.is_raised()
    }

    /// Work of a stuck stream may use the memory at any time. It is never handed out again; a software GPU frees it
    /// when it ends, other drivers never.
    pub(crate) fn abandon(&self) {
        self.abandoned.raise();
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.is_raised()
    }

    pub(crate) fn is_apart(&self) -> bool {
        self.origin == Origin::Region
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.bytes
    }

    /// The memory that the block lies in.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The first byte.
    pub fn address(&self) -> Address {
        self.address
    }

    /// An operation of a stream waits for all uses that conflict with it. Errors:
    /// [`Error::Borrowed`](crate::Error::Borrowed); the driver's.
    pub fn order(&self, op: &'static str, stream: &StreamCore, bytes: &Range<usize>, access: Access) -> Result<()> {
        self.hazards.lock().order(op, stream, bytes, access)
    }

    /// Notes a use by an operation that was submitted.
    pub fn note(&self, stream: &Arc<StreamCore>, sequence: u64, bytes: Range<usize>, access: Access) {
        self.hazards.note(stream, sequence, bytes, access);
    }

    /// The driver of its device.
    pub fn driver(&self) -> &DriverRef {
        &self.handle.driver
    }

    /// The calling thread waits for all uses that conflict with such an access of the host, for no longer than `limit`.
    /// Errors: [`Error::Timeout`](crate::Error::Timeout); the driver's.
    pub fn wait_host(&self, op: &'static str, access: Access, limit: Duration) -> Result<()> {
        self.hazards.wait_host(&self.handle, op, access, limit)
    }

    /// The device that the memory belongs to. None for host memory and managed memory, which all devices may use.
    pub(crate) fn device(&self) -> Option<usize> {
        (self.kind == ChunkKind::Device).then_some(self.handle.device)
    }

    pub(super) fn is_owned_by(&self, owner: &Arc<Owner>) -> bool {
        self.owner.as_ref().is_some_and(|own| Arc::ptr_eq(own, owner))
    }

    /// The owner has ended, or there is none.
    pub(super) fn release(mut self) {
        let history = self.hazards.take();
        release_bytes(&self.region, &history, self.range());
    }

    fn range(&self) -> Range<Address> {
        self.address..self.address + self.bytes as u64
    }
}

/// These bytes are not used again. If work may still be running on them (a stuck stream), they are leaked: the driver
/// must not get memory back while a copy still writes it.
pub(super) fn release_bytes(region: &Region, history: &History, range: Range<Address>) {
    let handle = &region.handle;
    handle.acquire(history.known());
    if history.all_completed() || handle.injected(FailPoint::ChunkReleasedEarly) {
        region.remember(handle.release());
    } else {
        let bytes = range.end - range.start;
        event!(warn, "memory_leaked", device = handle.device, bytes, "memory still in use was leaked");
        region.leak(&range);
    }
}

/// A counted handle of a block that is in use.
pub struct BlockRef(NonNull<Block>);

// SAFETY: a handle gives shared access to the block; the shared fields are `Sync` (checked below). The last handle
// gives the block away, which needs `Send`.
unsafe impl Send for BlockRef {}
// SAFETY: as above.
unsafe impl Sync for BlockRef {}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<DeviceHandle>();
    shared::<Hazards>();
    shared::<Region>();
    shared::<Owner>();
};

impl BlockRef {
    /// Puts a free block into use. The block keeps its old uses: the first new use waits for them.
    #[inline]
    pub(super) fn activate(mut block: Box<Block>) -> Self {
        block.refs.reset();
        block.retired = Flag::new();
        block.in_graph = Flag::new();
        BlockRef(NonNull::from(Box::leak(block)))
    }
}

impl Deref for BlockRef {
    type Target = Block;

    #[inline]
    fn deref(&self) -> &Block {
        // SAFETY: the block stays leaked as long as a handle exists.
        unsafe { self.0.as_ref() }
    }
}

impl Clone for BlockRef {
    #[inline]
    fn clone(&self) -> Self {
        self.refs.acquire();
        BlockRef(self.0)
    }
}

impl Drop for BlockRef {
    #[inline]
    fn drop(&mut self) {
        if self.refs.release() {
            // SAFETY: this was the last handle, so only this thread has the block. It was a box before `activate`.
            free(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

/// The part of a cache that other threads reach. Each device has one, and so has each cache of page-locked memory.
pub(crate) struct Owner {
    pool: u64,
    /// The device whose thread owns the blocks. None: the holder of the cache's lock owns them.
    device: Option<usize>,
    pub(super) returns: Returns<Block>,
    pub(crate) mirror: Mirror<{ super::stats::MIRRORED }>,
}

impl Owner {
    pub(super) fn new(handle: &DeviceHandle, owned: bool, devices: usize) -> Arc<Self> {
        let (device, returns) = (owned.then_some(handle.device), Returns::new(1 + devices));
        Arc::new(Owner { pool: handle.pool, device, returns, mirror: Mirror::default() })
    }
}

#[derive(Clone, Copy)]
struct Here {
    pool: u64,
    device: usize,
    cache: *const RefCell<Cache>,
    gang: *const CommitWord,
}

thread_local! {
    static HERE: Cell<Option<Here>> = const { Cell::new(None) };
    #[allow(clippy::vec_box, reason = "a header is a node of `Returns`, and stays where it is")]
    static PARKED: RefCell<Vec<Box<Block>>> = const { RefCell::new(Vec::new()) };
}

/// Frees on this thread go directly into the cache's lists, and blocks of other devices of the pool go into this
/// thread's lanes of their remote free lists.
pub(crate) struct OwnerThread(());

impl OwnerThread {
    /// `cache` does not move and is not dropped before the guard.
    pub(crate) unsafe fn enter(handle: &DeviceHandle, cache: *const RefCell<Cache>) -> Self {
        HERE.set(Some(Here { pool: handle.pool, device: handle.device, cache, gang: ptr::null() }));
        OwnerThread(())
    }
}

impl Drop for OwnerThread {
    fn drop(&mut self) {
        HERE.set(None);
    }
}

/// While the guard lives, blocks freed after the gang has failed are parked until [`unpark`](Self::unpark): an
/// operation of a peer that failed half way may still write to that memory, and the memory's header does not know it.
pub(crate) struct InGang<'g>(PhantomData<&'g CommitWord>);

impl<'g> InGang<'g> {
    pub(crate) fn enter(word: &'g CommitWord) -> Self {
        HERE.set(HERE.get().map(|here| Here { gang: word, ..here }));
        InGang(PhantomData)
    }

    /// Whether this thread is in a gang: it runs a closure.
    pub(crate) fn is_here() -> bool {
        HERE.get().is_some_and(|here| !here.gang.is_null())
    }

    /// With `stuck`, streams may use them for ever: abandons them.
    pub(crate) fn unpark(self, stuck: bool) {
        drop(self);
        for block in PARKED.take() {
            if stuck {
                let (device, bytes) = (block.handle.device, block.bytes);
                event!(warn, "memory_leaked", device, bytes, "memory of a stuck gang was leaked");
                block.abandon();
            }
            return_to_owner(block);
        }
    }
}

impl Drop for InGang<'_> {
    fn drop(&mut self) {
        HERE.set(HERE.get().map(|here| Here { gang: ptr::null(), ..here }));
    }
}

/// Frees a block whose last handle is gone. Not inlined, so that a buffer's drop is small at every call site.
#[inline(never)]
fn free(mut block: Box<Block>) {
    if block.handle.injected(FailPoint::UsesForgotten) {
        block.hazards.take();
    }
    if let Some(watch) = block.handle.watch() {
        block.hazards.remember(&block.handle);
        watch.checker.freed(block.address);
    }
    return_to_owner(block);
}

#[inline(always)]
fn return_to_owner(block: Box<Block>) {
    if block.is_abandoned() {
        block.region.leak(&block.range());
        return block.handle.keep_context();
    }
    let Some(owner) = &block.owner else { return block.release() };
    let here = HERE.try_with(Cell::get).ok().flatten();
    let (mut lane, mut kept) = (0, false);
    if let Some(here) = here {
        // SAFETY: `InGang` keeps the pointer only while it borrows the commit word.
        if unsafe { here.gang.as_ref() }.is_some_and(CommitWord::is_aborted) {
            return PARKED.with_borrow_mut(|parked| parked.push(block));
        }
        if here.pool == owner.pool {
            lane = 1 + here.device;
            // The pool keeps its devices' owners alive, and this thread keeps the pool alive.
            kept = owner.device.is_some();
            if owner.device == Some(here.device) {
                // SAFETY: `OwnerThread` keeps the pointer only while the cache exists, and this is the cache's thread.
                let cache = unsafe { &*here.cache };
                // In a user's callback the owner may be using the cache now: then the block takes the remote path.
                if let Ok(mut cache) = cache.try_borrow_mut() {
                    return cache.put(block);
                }
            }
        }
    }
    // After the push the block may be gone, together with its reference to the owner.
    let share = (!kept).then(|| owner.clone());
    // SAFETY: either `share` keeps the owner alive, or `Shared::owners` does, which this device thread's worker holds.
    let owner = unsafe { &*Arc::as_ptr(owner) };
    if let Err(block) = owner.returns.push(lane, block) {
        block.release();
    }
    drop(share);
}
