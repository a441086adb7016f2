//! Memory of a device: allocation, page-locked host memory, statistics.

use crate::error::{Error, Result, Site, op_site::OpSite};
use crate::memory::{
    AsViewMut, BlockRef, DeviceBuffer, DeviceCopy, Locality, MemorySnapshot, MemoryStats, PinnedBuffer, Request, cache,
};
use crate::{Device, token::op::Op};
use std::panic::Location;

impl Device {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn zeros<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let mut op = self.op_in_graph("zeros")?;
        let mut buffer = op.buffer("zeros", len)?;
        let view = buffer.view_mut();
        op.writes(&view)?;
        // SAFETY: the view lies in a live block of this device, which `op` orders and records.
        op.submit(|driver, stream| unsafe { driver.fill_u8(view.address(), 0, view.bytes().len(), stream) })?;
        Ok(buffer)
    }

    /// At least `bytes` zeros in a chunk of their own, with a descriptor by which other processes map it.
    #[cfg(target_os = "linux")]
    #[track_caller]
    pub(crate) fn apart(
        &self,
        op: &'static str,
        bytes: usize,
        lending: &std::sync::Arc<crate::memory::hazard::Lending>,
    ) -> Result<(DeviceBuffer<u8>, std::os::fd::OwnedFd)> {
        let (block, memory) = self.worker.cache.borrow_mut().exportable(op, bytes, lending)?;
        let chunk = block.size();
        let mut whole = DeviceBuffer::<u8>::new(block, chunk);
        let mut op = self.op(op)?;
        let view = whole.view_mut();
        op.writes(&view)?;
        // SAFETY: the view lies in a live block of this device, which `op` orders and records.
        op.submit(|driver, stream| unsafe { driver.fill_u8(view.address(), 0, chunk, stream) })?;
        Ok((whole, memory))
    }

    /// `len` elements with unspecified contents: old bytes of this process's earlier buffers, or of none.
    #[track_caller]
    pub(crate) fn allocate<T: DeviceCopy>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        const { crate::memory::fits_blocks::<T>() };
        self.allocate_aligned(op, len, align_of::<T>())
    }

    #[inline]
    #[track_caller]
    fn allocate_aligned<T: DeviceCopy>(&self, op: &'static str, len: usize, align: usize) -> Result<DeviceBuffer<T>> {
        let block = self.allocate_bytes(op, len.saturating_mul(size_of::<T>()), align, Location::caller())?;
        Ok(DeviceBuffer::new(block, len))
    }

    /// One function for all types: the hot path of the memory pool for what is not zeroed or uploaded.
    #[inline(never)]
    fn allocate_bytes(&self, op: &'static str, bytes: usize, align: usize, site: Site) -> Result<BlockRef> {
        // After an abort nothing is allocated: memory that is freed then may still be written.
        self.session.gang.check()?;
        let _here = OpSite { op, site }.enter();
        self.allocate_in(op, bytes, align)
    }

    fn allocate_in(&self, op: &'static str, bytes: usize, align: usize) -> Result<BlockRef> {
        let gang = &self.session.gang;
        let stop = || self.check().is_err();
        let request = Request { op, bytes, align, stream: Some(&self.stream), stop: &stop };
        // If a peer has failed, that is the cause, not the lack of memory that it has led to.
        let mut cache = self.worker.cache.borrow_mut();
        let block = cache.allocate(&request).map_err(|e| gang.aborted().unwrap_or(e))?;
        // A capture's work runs at a launch of the graph, if ever. So the zone is written on another stream.
        cache.lay_zone(&block, self.recording.is_none().then_some(&self.stream));
        Ok(block)
    }

    /// A buffer whose contents are unspecified until they are written.
    ///
    /// # Safety
    /// No element is read before it was written.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Aborted`].
    #[track_caller]
    pub unsafe fn uninit<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.allocate("uninit", len)
    }

    /// [`uninit`](Self::uninit) at a multiple of `align` bytes: a power of two, at most 2 MiB. Every buffer is aligned
    /// to at least 256 bytes.
    ///
    /// # Safety
    /// As [`uninit`](Self::uninit).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other alignments; else as [`uninit`](Self::uninit).
    #[track_caller]
    pub unsafe fn uninit_aligned<T: DeviceCopy>(&self, len: usize, align: usize) -> Result<DeviceBuffer<T>> {
        if !align.is_power_of_two() || align > cache::MOST_ALIGN {
            let most = cache::MOST_ALIGN;
            return Err(Error::invalid("uninit_aligned", format_args!("{align} is not a power of two up to {most}")));
        }
        self.allocate_aligned("uninit_aligned", len, align)
    }

    /// Page-locked host memory, zeroed, as from [`GpuPool::pinned`](crate::GpuPool::pinned).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], the driver's.
    #[track_caller]
    pub fn pinned<T: DeviceCopy>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.worker.shared.pinned.buffer("pinned", len, Locality::Device(self.index()))
    }

    /// Counts of the device's memory pool, including memory that other threads have freed.
    pub fn stats(&self) -> MemoryStats {
        self.worker.cache.borrow_mut().stats()
    }

    /// Gives free memory back to the driver, in whole mappings of 2 MiB or more each. Returns the number of bytes.
    /// Memory that streams may still use stays with the pool, so call [`synchronize`](Self::synchronize) first.
    ///
    /// Later allocations then cost driver calls. Use this when other libraries or processes need the memory, like
    /// `torch.cuda.empty_cache`.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        let _here = OpSite::here("trim");
        self.check()?;
        let given = self.worker.cache.borrow_mut().trim(&|| self.check().is_err());
        self.check().map(|()| given)
    }

    /// The device's memory at this moment: every chunk, every block, and events. If the pool
    /// [records](crate::Builder::record_memory), they have their places in the program.
    pub fn memory_snapshot(&self) -> MemorySnapshot {
        self.worker.cache.borrow_mut().snapshot()
    }
}

impl Op<'_> {
    pub(super) fn buffer<T: DeviceCopy>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        const { crate::memory::fits_blocks::<T>() };
        let block = self.dev.allocate_in(op, len.saturating_mul(size_of::<T>()), align_of::<T>())?;
        Ok(DeviceBuffer::new(block, len))
    }
}
