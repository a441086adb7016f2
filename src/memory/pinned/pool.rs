//! The pool's page-locked memory: one cache per NUMA node, behind a lock, because its use is rare. Invariant: a block
//! that is handed out is not used by any operation any more.

use super::{DeviceCopy, PinnedBuffer};
use crate::error::{Error, Result, op_site::OpSite};
use crate::memory::{
    Access, BlockRef, Cache, DeviceHandle, OnOutOfMemory, ProbeContext, Request,
    backing::ChunkKind,
    cache::{ATTEMPTS, Settings, audit},
    fits_blocks,
    numa::Nodes,
};
use parking_lot::Mutex;
use std::{marker::PhantomData, sync::Arc};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Locality {
    Device(usize),
    CallingThread,
}

pub(crate) struct PinnedPool {
    handles: Vec<Arc<DeviceHandle>>,
    nodes: Nodes,
    caches: Vec<NodeCache>,
    /// The user's callback. It runs without a lock, since it may use this pool.
    on_out_of_memory: Option<OnOutOfMemory>,
}

impl PinnedPool {
    pub(crate) fn new(handles: &[Arc<DeviceHandle>], settings: &Settings) -> Result<Self> {
        let nodes = Nodes::of(handles);
        let cache = |node| {
            // The bounds are for devices' memory. Page-locked memory does not move.
            let bare = Settings { limit: None, slack: None, on_out_of_memory: None, ..settings.clone() };
            let settings = Settings { node: nodes.place(node), ..bare };
            // A device near the node. Pinned memory is portable, so any device will do.
            let first = (0..handles.len()).find(|&device| nodes.of_device(device) == node).unwrap_or(0);
            Ok(NodeCache { inner: Mutex::new((first, NodeCache::cache(&handles[first], &settings)?)), settings })
        };
        let caches = (0..nodes.count()).map(cache).collect::<Result<_>>()?;
        Ok(PinnedPool { handles: handles.to_vec(), nodes, caches, on_out_of_memory: settings.on_out_of_memory.clone() })
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(crate) fn block(&self, op: &'static str, bytes: usize, near: Locality) -> Result<BlockRef> {
        let node = match near {
            Locality::Device(device) => self.nodes.of_device(device),
            Locality::CallingThread => self.nodes.here(),
        };
        let mut attempts = ATTEMPTS;
        loop {
            let refused = match (self.caches[node].block(&self.handles, op, bytes), &self.on_out_of_memory) {
                (Err(Error::OutOfMemory { report, .. }), Some(callback)) if attempts > 0 && callback.0(&report) => {
                    report
                }
                (done, _) => return done,
            };
            let requested = refused.requested;
            event!(debug, "pinned_memory_retried", op, requested, "page-locked memory is asked for again");
            attempts -= 1;
        }
    }

    #[track_caller]
    pub(crate) fn buffer<T: DeviceCopy>(&self, op: &'static str, len: usize, at: Locality) -> Result<PinnedBuffer<T>> {
        let mut buffer = self.reused(op, len, at)?;
        // A reused block holds old bytes. They are values of any Pod type, but no reader expects them.
        buffer.as_mut_slice()?.fill(T::zeroed());
        Ok(buffer)
    }

    /// [`buffer`](Self::buffer) without zeros, for a caller that copies to all of it. Zeros take longer than the copy.
    #[track_caller]
    pub(crate) fn reused<T: DeviceCopy>(&self, op: &'static str, len: usize, at: Locality) -> Result<PinnedBuffer<T>> {
        const { fits_blocks::<T>() };
        let bytes = len.saturating_mul(size_of::<T>());
        let _here = OpSite::here(op);
        let (block, deadline) = (self.block(op, bytes, at)?, self.caches[0].settings.deadline);
        Ok(PinnedBuffer { block, start: 0, len, deadline, of: PhantomData })
    }

    pub(crate) fn audit(&self, op: &'static str) -> Result<()> {
        self.caches.iter().map(|cache| cache.audit(op)).fold(Ok(()), Result::and)
    }

    pub(crate) fn trim(&self) -> u64 {
        self.caches.iter().map(|cache| cache.inner.lock().1.trim(&|| false)).sum()
    }

    #[cfg(test)]
    pub(crate) fn owners(&self) -> Vec<Arc<super::super::block::Owner>> {
        self.caches.iter().map(|cache| cache.inner.lock().1.owner.clone()).collect()
    }

    #[cfg(test)]
    pub(crate) fn in_use(&self) -> Vec<u64> {
        self.caches.iter().map(|cache| cache.inner.lock().1.stats().in_use).collect()
    }
}

struct NodeCache {
    inner: Mutex<(usize, Cache)>,
    settings: Settings,
}

impl NodeCache {
    fn cache(handle: &Arc<DeviceHandle>, settings: &Settings) -> Result<Cache> {
        let mut cache = Cache::new(handle, ChunkKind::Pinned, false, settings, ProbeContext::default())?;
        cache.audited(None);
        Ok(cache)
    }

    fn block(&self, handles: &[Arc<DeviceHandle>], op: &'static str, bytes: usize) -> Result<BlockRef> {
        self.look();
        let block = self.allocate(handles, op, bytes)?;
        // The host writes the block at once, so copies of a buffer that was dropped in flight must be over.
        block.hazards.wait_host(&block.handle, op, Access::Write, self.settings.deadline)?;
        if self.settings.audit {
            self.inner.lock().1.lay_zone_here(&block);
        }
        Ok(block)
    }

    /// Others still need page-locked memory.
    fn allocate(&self, handles: &[Arc<DeviceHandle>], op: &'static str, bytes: usize) -> Result<BlockRef> {
        let (of, cache) = &mut *self.inner.lock();
        let request = Request { op, bytes, align: 1, stream: None, stop: &|| false };
        loop {
            let allocated = if handles[*of].is_lost() { None } else { Some(cache.allocate(&request)) };
            let next = match allocated {
                Some(done) if !handles[*of].is_lost() => return done,
                _ => handles.iter().position(|handle| !handle.is_lost()),
            };
            match next {
                Some(next) => {
                    *of = next;
                    *cache = Self::cache(&handles[next], &self.settings)?;
                }
                None => return cache.allocate(&request),
            }
        }
    }

    /// With red zones: checks those of dropped buffers that nothing uses any more.
    fn look(&self) {
        if !self.settings.audit {
            return;
        }
        let held = self.inner.lock().1.held();
        for block in held {
            let (handle, hazards) = (&block.handle, &block.hazards);
            // When stepped, nothing may depend on which operations happen to be over.
            if hazards.in_flight() && !handle.stepped {
                self.inner.lock().1.hold(block);
                continue;
            }
            // A wait teaches the checker that the block is idle. Without the lock, which others may need meanwhile.
            let over = hazards.wait_host(handle, "audit", Access::Write, self.settings.deadline).is_ok();
            let found = if over { audit::look_here(&block) } else { None };
            self.inner.lock().1.looked_at(block, found);
        }
    }

    fn audit(&self, op: &'static str) -> Result<()> {
        self.look();
        if self.settings.audit { self.inner.lock().1.verdict(op) } else { Ok(()) }
    }
}
