//! A piece of memory with its hazards. It goes owner when its last handle is dropped, on whatever thread.
//!
//! The header of a block is made once and used again and again: at rest it is a `Box<Block>` in its owner's lists, in
//! use a counted [`BlockRef`]. So to hand out a block is to pop a pointer and to set a count to one, without an
//! allocation on the host; and to free it from another thread is to push the header itself into its owner's
//! [`Returns`].

use super::{
    backing::Region,
    cache::Cache,
    handle::DeviceHandle,
    hazard::{Hazards, History},
    heap::Piece,
};
use crate::{
    driver::Address,
    mutation::Bug,
    sync::{CommitWord, Flag, Link as Node, Linked, Mirror, RefCount, Returns},
};
use std::{
    cell::{Cell, RefCell},
    marker::PhantomData,
    ops::{Deref, Range},
    ptr::{self, NonNull},
    sync::Arc,
};

/// Which call the memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChunkKind {
    Device,
    Pinned,
    Managed,
}

/// A block, in use or at rest.
pub(crate) struct Block {
    refs: RefCount,
    back: Node<Block>,
    pub(crate) handle: Arc<DeviceHandle>,
    pub(crate) kind: ChunkKind,
    pub(crate) address: Address,
    /// All of it, which may be more than was asked for.
    pub(super) bytes: usize,
    /// What was asked for.
    pub(super) requested: usize,
    pub(crate) hazards: Hazards,
    /// Where it lies in the owner's books.
    pub(super) origin: Origin,
    /// None for memory that is not pooled.
    owner: Option<Arc<Owner>>,
    /// Keeps the memory mapped, also when the pool is gone.
    pub(super) region: Arc<Region>,
    /// What was in it is elsewhere now, or gone: who still holds it is out of date.
    retired: Flag,
}

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// In a slab, which has blocks of one class.
    Slab { slab: u32, class: u8 },
    /// A piece of the heap by itself.
    Piece { piece: Piece, region: u32 },
    /// All of its region.
    Region,
}

// SAFETY: `back` returns the one field of that type, which only `Returns` touches.
unsafe impl Linked for Block {
    fn link(&self) -> &Node<Self> {
        &self.back
    }
}

impl Block {
    /// A header at rest.
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
        })
    }

    /// From now on graphs that name it are out of date, until it is handed out again.
    pub(crate) fn retire(&self) {
        self.retired.raise();
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.is_raised()
    }

    /// The device that the memory belongs to; none for memory that is at owner everywhere.
    pub(crate) fn device(&self) -> Option<usize> {
        (self.kind == ChunkKind::Device).then_some(self.handle.device)
    }

    /// Whether it goes there when it is dropped.
    pub(super) fn is_owned_by(&self, owner: &Arc<Owner>) -> bool {
        self.owner.as_ref().is_some_and(|own| Arc::ptr_eq(own, owner))
    }

    /// Lets go of it for good: its owner is gone, or it has none.
    pub(super) fn release(mut self) {
        let history = self.hazards.take();
        release_bytes(&self.region, &history, self.address..self.address + self.bytes as u64);
    }
}

/// Nobody will use these bytes any more. What may still be in use (a stream that got stuck) is leaked rather than given
/// back to the driver under a running copy.
pub(super) fn release_bytes(region: &Region, history: &History, range: Range<Address>) {
    let handle = &region.handle;
    handle.acquire(history.known());
    if history.all_completed() || handle.injected(Bug::ChunkReleasedEarly) {
        region.remember(handle.release());
    } else {
        event!(warn, device = handle.device, bytes = range.end - range.start, "memory still in use was leaked");
        region.leak(&range);
    }
}

/// A counted handle of a block in use.
pub(crate) struct BlockRef(NonNull<Block>);

// SAFETY: a handle gives shared access to the block, whose shared parts are `Sync` (checked below), and the last one
// gives it away, which needs `Send`.
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
    /// Wakes a block up. Its old uses stay: the first new use waits for them.
    #[inline]
    pub(super) fn wake(mut block: Box<Block>) -> Self {
        block.refs.reset();
        block.retired = Flag::new();
        BlockRef(NonNull::from(Box::leak(block)))
    }
}

impl Deref for BlockRef {
    type Target = Block;

    #[inline]
    fn deref(&self) -> &Block {
        // SAFETY: the block is leaked as long as there are handles.
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
            // SAFETY: this was the last handle, so the block is this thread's alone; it was a box before it was woken.
            free(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

/// Where blocks of one device (or pinned blocks of one pool) go when they are dropped.
pub(crate) struct Owner {
    pool: u64,
    /// The device whose thread owns the blocks. None: whoever holds the owner's lock.
    device: Option<usize>,
    /// Freed by other threads than the owner.
    pub(super) returns: Returns<Block>,
    /// The owner's counters, for everyone.
    pub(super) mirror: Mirror<{ super::stats::MIRRORED }>,
}

impl Owner {
    pub(super) fn new(handle: &DeviceHandle, owned: bool, devices: usize) -> Arc<Self> {
        Arc::new(Owner {
            pool: handle.pool,
            device: owned.then_some(handle.device),
            returns: Returns::new(1 + devices),
            mirror: Mirror::default(),
        })
    }
}

/// The device thread that this is, for frees.
#[derive(Clone, Copy)]
struct Here {
    pool: u64,
    device: usize,
    cache: *const RefCell<Cache>,
    /// Of the gang whose scope is running, if one is.
    gang: *const CommitWord,
}

thread_local! {
    static HERE: Cell<Option<Here>> = const { Cell::new(None) };
    /// What a member of a failed gang has freed.
    #[allow(clippy::vec_box, reason = "a header is a node of `Returns`, and stays where it is")]
    static PARKED: RefCell<Vec<Box<Block>>> = const { RefCell::new(Vec::new()) };
}

/// Until it is dropped, blocks of this cache that are freed on this thread go straight into its lists, and blocks of
/// other devices of the pool into this thread's lanes.
pub(crate) struct OwnerThread(());

impl OwnerThread {
    /// # Safety
    /// `cache` stays where it is until the guard is dropped.
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

/// While it lives, this device thread is a member of a gang: what it frees after the gang has failed is kept until
/// [`unpark`](Self::unpark). A peer's operation that failed half way may still write to memory without the memory's
/// knowing, so nothing that is freed may be handed out again before all members have drained.
pub(crate) struct InGang<'g>(PhantomData<&'g CommitWord>);

impl<'g> InGang<'g> {
    pub(crate) fn enter(word: &'g CommitWord) -> Self {
        HERE.set(HERE.get().map(|here| Here { gang: word, ..here }));
        InGang(PhantomData)
    }

    /// All members have drained: frees what was kept. With `forget`, streams got stuck and may use it for ever: it is
    /// never used again.
    pub(crate) fn unpark(self, forget: bool) {
        drop(self);
        for block in PARKED.take() {
            if forget {
                event!(warn, device = block.handle.device, bytes = block.bytes, "memory of a stuck gang was leaked");
                std::mem::forget(block);
            } else {
                return_to_owner(block);
            }
        }
    }
}

impl Drop for InGang<'_> {
    fn drop(&mut self) {
        HERE.set(HERE.get().map(|here| Here { gang: ptr::null(), ..here }));
    }
}

/// The last handle is gone. One function with all that it needs, and not a part of every origin where a buffer is
/// dropped.
#[inline(never)]
fn free(mut block: Box<Block>) {
    if block.handle.injected(Bug::UsesForgotten) {
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
    let Some(owner) = &block.owner else { return block.release() };
    let here = HERE.try_with(Cell::get).ok().flatten();
    let (mut lane, mut kept) = (0, false);
    if let Some(here) = here {
        // SAFETY: `InGang` keeps the pointer only while it borrows the word.
        if unsafe { here.gang.as_ref() }.is_some_and(CommitWord::is_aborted) {
            return PARKED.with_borrow_mut(|parked| parked.push(block));
        }
        if here.pool == owner.pool {
            lane = 1 + here.device;
            // The pool has its devices' homes, and this thread has the pool.
            kept = owner.device.is_some();
            if owner.device == Some(here.device) {
                // SAFETY: `OwnerThread` keeps the pointer only while the cache is there, and this is its thread.
                let cache = unsafe { &*here.cache };
                // If the owner is in its books already (a user's callback has dropped something), it goes the long way.
                if let Ok(mut cache) = cache.try_borrow_mut() {
                    return cache.put(block);
                }
            }
        }
    }
    // The block may be gone, with its share of the owner, as soon as it has been pushed.
    let share = (!kept).then(|| owner.clone());
    // SAFETY: either `share` keeps the owner, or `Shared::owners` does, which this device thread's worker holds.
    let owner = unsafe { &*Arc::as_ptr(owner) };
    if let Err(block) = owner.returns.push(lane, block) {
        block.release();
    }
    drop(share);
}
