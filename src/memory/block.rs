//! A piece of memory with its hazards. It goes home when its last handle is dropped, on whatever thread.

use super::{
    hazard::{Hazards, History, all_completed},
    link::Link,
};
use crate::{
    driver::{Address, check::Token},
    plant::Bug,
    sync::{Inbox, Sequence},
};
use parking_lot::Mutex;
use std::sync::Arc;

/// Memory from the driver, given back when its last block is gone.
pub(crate) struct Chunk {
    pub(crate) link: Arc<Link>,
    pub(crate) address: Address,
    pub(crate) kind: ChunkKind,
    /// With a checker: what the threads knew that let go of its blocks.
    known: Mutex<Option<Box<Token>>>,
}

impl Chunk {
    pub(crate) fn new(link: &Arc<Link>, address: Address, kind: ChunkKind) -> Arc<Self> {
        Arc::new(Chunk { link: link.clone(), address, kind, known: Mutex::new(None) })
    }
}

/// Which call the memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChunkKind {
    Device,
    Pinned,
    Managed,
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let driver = &self.link.driver;
        self.link.acquire(self.known.get_mut().as_deref());
        // SAFETY: the memory came from this driver by the call of its kind, the last block of it is gone, and blocks go
        // only when their uses have completed or their device's streams have drained.
        let freed = unsafe {
            match self.kind {
                ChunkKind::Device => driver.mem_free(self.address),
                ChunkKind::Pinned => driver.host_free(self.address as *mut u8),
                ChunkKind::Managed => driver.managed_free(self.address as *mut u8),
            }
        };
        if let Err(fault) = freed {
            tracing::warn!(device = self.link.device, %fault, "memory could not be given back");
            if let Some(report) = fault.report {
                self.link.refuse(report);
            }
        }
    }
}

/// Where blocks of one device (or pinned blocks of one pool) go when they are dropped. On cache lines of its own: its
/// thread writes to it at every allocation, and so may another device's to what lies beside it.
#[repr(align(128))]
pub(crate) struct Home {
    /// Freed by any thread, taken by the owner.
    pub(crate) inbox: Inbox<FreeBlock>,
    /// Blocks handed out and blocks that came back, in bytes of their class.
    pub(crate) handed_out: Sequence,
    pub(crate) came_back: Sequence,
}

impl Home {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Home { inbox: Inbox::new(), handed_out: Sequence::new(), came_back: Sequence::new() })
    }

    /// Bytes in live blocks.
    pub(crate) fn in_use(&self) -> u64 {
        // Read in this order, so that a free between the two reads cannot make the difference negative.
        let back = self.came_back.get();
        self.handed_out.get().saturating_sub(back)
    }
}

/// A block at rest.
pub(crate) struct FreeBlock {
    pub(crate) chunk: Arc<Chunk>,
    pub(crate) address: Address,
    /// Bytes; the class's size.
    pub(crate) bytes: usize,
    pub(crate) history: History,
}

impl FreeBlock {
    /// Lets go of the memory for good. What may still be in use (a stream that got stuck) is leaked rather than given
    /// back to the driver under a running copy.
    pub(crate) fn release(self) {
        let link = &self.chunk.link;
        link.acquire(self.history.known());
        if !all_completed(&self.history.uses) && !link.planted(Bug::ChunkReleasedEarly) {
            tracing::warn!(device = self.chunk.link.device, bytes = self.bytes, "memory still in use was leaked");
            std::mem::forget(self.chunk);
        } else {
            Token::add(&mut self.chunk.known.lock(), link.release());
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.inbox.take().for_each(FreeBlock::release);
    }
}

/// A block in use.
pub(crate) struct Block {
    chunk: Option<Arc<Chunk>>,
    pub(crate) link: Arc<Link>,
    home: Arc<Home>,
    pub(crate) kind: ChunkKind,
    pub(crate) address: Address,
    bytes: usize,
    pub(crate) hazards: Hazards,
}

impl Block {
    /// Wakes a free block up. Its old uses stay: the first new use waits for them.
    pub(crate) fn new(free: FreeBlock, home: &Arc<Home>) -> Arc<Self> {
        home.handed_out.fetch_add(free.bytes as u64);
        Arc::new(Block {
            link: free.chunk.link.clone(),
            kind: free.chunk.kind,
            chunk: Some(free.chunk),
            home: home.clone(),
            address: free.address,
            bytes: free.bytes,
            hazards: Hazards::with(free.history),
        })
    }

    /// The device that the memory belongs to; none for memory that is at home everywhere.
    pub(crate) fn device(&self) -> Option<usize> {
        (self.kind == ChunkKind::Device).then_some(self.link.device)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            let (address, bytes, mut history) = (self.address, self.bytes, self.hazards.take());
            if self.link.planted(Bug::UsesForgotten) {
                history.uses.clear();
            }
            if let Some(watch) = self.link.watch() {
                history.remember(&self.link);
                watch.checker.freed(address);
            }
            self.home.inbox.push(FreeBlock { chunk, address, bytes, history });
            self.home.came_back.fetch_add(bytes as u64);
        }
    }
}
