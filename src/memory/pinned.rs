//! Page-locked host memory that knows which copies are in flight.

use super::{
    DeviceCopy,
    backing::Trial,
    block::{BlockRef, ChunkKind},
    cache::{Cache, Request, Settings, audit},
    fits_blocks,
    hazard::Access,
    link::Link,
};
use crate::{error::Result, plant::Bug};
use parking_lot::Mutex;
use std::{fmt, marker::PhantomData, panic::Location, slice, sync::Arc, time::Duration};

/// `len` elements of `T` in page-locked host memory. Copies to and from it do not wait, and run at the full speed of
/// the bus.
///
/// There is no `Deref<Target = [T]>`: a host access may have to wait for a copy, and waiting can fail.
/// [`as_slice`](Self::as_slice) waits for copies that write the memory, [`as_mut_slice`](Self::as_mut_slice) for all.
/// Dropping a buffer in flight defers its reuse. So the classic mistakes (reading before the copy has landed, freeing
/// during a copy: pytorch#130785, pytorch#127612) have no way to be written.
///
/// ```
/// # let pool = gpu_pool::GpuPool::builder().host(1).build()?;
/// let mut batch = pool.pinned::<f32>(1000)?;
/// batch.as_mut_slice()?.fill(2.0);
/// let sums = pool.run(|dev, _| {
///     let x = dev.upload_pinned(&batch)?; // does not wait
///     dev.download(&dev.sum(&x)?)
/// })?;
/// assert_eq!(sums[0], [2000.0]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub struct PinnedBuffer<T: DeviceCopy> {
    pub(crate) block: BlockRef,
    len: usize,
    deadline: Duration,
    of: PhantomData<T>,
}

impl<T: DeviceCopy> PinnedBuffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The contents; waits for copies that write them.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) when such a copy does not complete within the pool's deadline, and the
    /// driver's errors.
    #[track_caller]
    pub fn as_slice(&self) -> Result<&[T]> {
        self.ready("PinnedBuffer::as_slice", Access::Read)?;
        // SAFETY: the block holds `len` initialised elements of a Pod type, aligned to 256 bytes; no device writes them
        // any more, and none can start while `self` is borrowed, since such a copy needs `&mut self`.
        Ok(unsafe { slice::from_raw_parts(self.ptr(), self.len) })
    }

    /// The contents, to be changed; waits for all copies from and to them.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    #[track_caller]
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.ready("PinnedBuffer::as_mut_slice", Access::Write)?;
        // SAFETY: as above, and no device reads them any more.
        Ok(unsafe { slice::from_raw_parts_mut(self.ptr(), self.len) })
    }

    #[track_caller]
    fn ready(&self, op: &'static str, access: Access) -> Result<()> {
        let link = &self.block.link;
        let _here = link.enter(op, Location::caller());
        if !link.planted(Bug::HostDoesNotWait) {
            self.block.hazards.wait_host(link, op, access, self.deadline)?;
        }
        link.host_access(op, self.block.address, self.len * size_of::<T>(), access == Access::Write)
    }

    /// Whether a host access might have to wait.
    pub fn in_flight(&self) -> bool {
        self.block.hazards.in_flight()
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.block.address as *mut T
    }
}

impl<T: DeviceCopy> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

/// The pool's page-locked memory. Cold: a lock around the same cache that devices have.
pub(crate) struct PinnedPool {
    /// Pinned memory is portable, so any device will do: the first that is not lost.
    links: Vec<Arc<Link>>,
    /// The device that the cache's memory comes from, by its place in `links`.
    cache: Mutex<(usize, Cache)>,
    settings: Settings,
}

impl PinnedPool {
    pub(crate) fn new(links: &[Arc<Link>], settings: &Settings) -> Result<Self> {
        let settings = Settings { limit: None, ..settings.clone() };
        let cache = Self::cache(&links[0], &settings)?;
        Ok(PinnedPool { links: links.to_vec(), cache: Mutex::new((0, cache)), settings })
    }

    fn cache(link: &Arc<Link>, settings: &Settings) -> Result<Cache> {
        let mut cache = Cache::new(link, ChunkKind::Pinned, false, settings, Trial::default())?;
        cache.audited(None);
        Ok(cache)
    }

    /// A block that nobody uses any more.
    pub(crate) fn block(&self, op: &'static str, bytes: usize) -> Result<BlockRef> {
        self.look();
        let block = self.allocate(op, bytes)?;
        // The host writes it at once, so copies of a buffer that was dropped in flight must be over.
        block.hazards.wait_host(&block.link, op, Access::Write, self.settings.deadline)?;
        if self.settings.audit {
            self.cache.lock().1.lay_zone_here(&block);
        }
        Ok(block)
    }

    /// A lost device must not keep the others from their page-locked memory, so the next one provides it then.
    fn allocate(&self, op: &'static str, bytes: usize) -> Result<BlockRef> {
        let (of, cache) = &mut *self.cache.lock();
        let request = Request { op, bytes, align: 1, stream: None };
        loop {
            let allocated = if self.links[*of].is_lost() { None } else { Some(cache.allocate(&request)) };
            let next = match allocated {
                Some(done) if !self.links[*of].is_lost() => return done,
                _ => self.links.iter().position(|link| !link.is_lost()),
            };
            match next {
                Some(next) => {
                    *of = next;
                    *cache = Self::cache(&self.links[next], &self.settings)?;
                }
                // All are lost; the driver says so.
                None => return cache.allocate(&request),
            }
        }
    }

    /// With red zones: looks at those of the buffers that were dropped and that nothing uses any more.
    fn look(&self) {
        if !self.settings.audit {
            return;
        }
        let held = self.cache.lock().1.held();
        for block in held {
            let (link, hazards) = (&block.link, &block.hazards);
            // In steps nothing may depend on what happens to be over.
            if hazards.in_flight() && !link.stepped {
                self.cache.lock().1.hold(block);
                continue;
            }
            // With a checker, the host has to have waited to know it. Not under the lock, which others may want meanwhile.
            let over = hazards.wait_host(link, "audit", Access::Write, self.settings.deadline).is_ok();
            let found = if over { audit::look_here(&block) } else { None };
            self.cache.lock().1.looked_at(block, found);
        }
    }

    /// What was found in red zones.
    pub(crate) fn audit(&self, op: &'static str) -> Result<()> {
        self.look();
        if self.settings.audit { self.cache.lock().1.verdict(op) } else { Ok(()) }
    }

    /// Gives back what is free; how many bytes.
    pub(crate) fn trim(&self) -> u64 {
        self.cache.lock().1.trim("trim")
    }

    /// A zeroed buffer.
    #[track_caller]
    pub(crate) fn buffer<T: DeviceCopy>(&self, op: &'static str, len: usize) -> Result<PinnedBuffer<T>> {
        const { fits_blocks::<T>() };
        let bytes = len.saturating_mul(size_of::<T>());
        let _here = self.links[0].enter(op, Location::caller());
        let mut buffer =
            PinnedBuffer { block: self.block(op, bytes)?, len, deadline: self.settings.deadline, of: PhantomData };
        // A reused block holds old bytes, which are values of any Pod type, but nobody expects them.
        buffer.as_mut_slice()?.fill(T::zeroed());
        Ok(buffer)
    }
}
