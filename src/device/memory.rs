//! Memory of a device, and copies to it, from it and between devices.

use super::Device;
use crate::{
    error::{Error, Result, Site},
    memory::{
        AsView, AsViewMut, CopySource, DeviceBuffer, DeviceCopy, PinnedBuffer,
        block::BlockRef,
        cache::{self, Request},
        hazard::Access,
        pinned::Locality,
    },
};
use std::panic::Location;

/// Memory and copies.
impl Device {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn zeros<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let mut op = self.op_in_graph("zeros")?;
        let mut buffer = self.allocate("zeros", len)?;
        let view = buffer.view_mut();
        op.writes(&view)?;
        // SAFETY: the view lies in a live block of this device, ordered and noted by `op`.
        op.submit(|driver, stream| unsafe { driver.fill_u8(view.address(), 0, view.bytes().len(), stream) })?;
        Ok(buffer)
    }

    /// `len` elements of whatever was there before. Reading them before they were written yields old bytes (of this
    /// process's own earlier buffers, or of nobody).
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

    /// One function with the whole hot path of the pool in it, for all types.
    #[inline(never)]
    fn allocate_bytes(&self, op: &'static str, bytes: usize, align: usize, site: Site) -> Result<BlockRef> {
        // After an abort nothing is handed out: what is freed then may still be written to.
        self.session.gang.check()?;
        let _here = self.worker.handle.enter(op, site);
        let gang = &self.session.gang;
        let stop = || self.check().is_err();
        let request = Request { op, bytes, align, stream: Some(&self.stream), stop: &stop };
        // A peer's failure is the reason, not the want of memory that it has brought about.
        let mut cache = self.worker.cache.borrow_mut();
        let block = cache.allocate(&request).map_err(|e| gang.aborted().unwrap_or(e))?;
        // What a capture's stream is given runs with the graph, if ever: the zone is laid beside it.
        cache.lay_zone(&block, self.recording.is_none().then_some(&self.stream));
        Ok(block)
    }

    /// A buffer whose contents are unspecified until they are written.
    ///
    /// # Safety
    /// Nothing reads an element before it was written.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Aborted`].
    #[track_caller]
    pub unsafe fn uninit<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.allocate("uninit", len)
    }

    /// [`uninit`](Self::uninit) at a multiple of `align` bytes: a power of two, at most 2 MiB. Every buffer is aligned
    /// to 256 bytes anyway.
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

    /// A copy of host data. When the call returns, `src` has been read: it was copied into page-locked staging memory,
    /// two pieces at a time, so that filling one overlaps sending the other; large slices by several threads.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Aborted`], [`Error::Timeout`], the driver's.
    #[track_caller]
    pub fn upload<T: DeviceCopy>(&self, src: &[T]) -> Result<DeviceBuffer<T>> {
        let _here = self.worker.handle.enter("upload", Location::caller());
        let mut buffer = self.allocate("upload", src.len())?;
        self.upload_into(src, &mut buffer)?;
        Ok(buffer)
    }

    /// [`upload`](Self::upload) into memory that is there already; the lengths must agree.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, else as [`upload`](Self::upload).
    #[track_caller]
    pub fn upload_into<V: AsViewMut + ?Sized>(&self, src: &[V::Elem], dst: &mut V) -> Result<()> {
        let dst = dst.view_mut();
        let mut op = self.op("upload")?;
        op.writes(&dst)?;
        op.same_len(src.len(), dst.len())?;
        let done = crate::copy::host::upload(self, bytemuck::cast_slice(src), dst.address());
        // Pieces may be under way even if a later one failed, so the use is noted in any case.
        op.submitted();
        done
    }

    /// The contents, on the host. Waits for this stream only. What a collective that has failed leaves is not given out
    /// as its result: that is an error.
    ///
    /// # Errors
    /// [`Error::Aborted`], [`Error::Timeout`], the driver's.
    #[track_caller]
    pub fn download<V: AsView + ?Sized>(&self, src: &V) -> Result<Vec<V::Elem>> {
        let src = src.view();
        let _here = self.worker.handle.enter("download", Location::caller());
        let mut host = vec![bytemuck::Zeroable::zeroed(); src.len()];
        self.download_into(&src, &mut host)?;
        Ok(host)
    }

    /// [`download`](Self::download) into memory that is there already; the lengths must agree. After an error what is
    /// in `dst` is worth nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, else as [`download`](Self::download).
    #[track_caller]
    pub fn download_into<V: AsView + ?Sized>(&self, src: &V, dst: &mut [V::Elem]) -> Result<()> {
        let src = src.view();
        let mut op = self.op("download")?;
        op.reads(&src)?;
        op.same_len(src.len(), dst.len())?;
        let done = crate::copy::host::download(self, src.address(), bytemuck::cast_slice_mut(dst));
        op.submitted();
        done.and_then(|()| self.check())
    }

    /// Page-locked host memory, zeroed; the same as [`GpuPool::pinned`](crate::GpuPool::pinned).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], the driver's.
    #[track_caller]
    pub fn pinned<T: DeviceCopy>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.worker.shared.pinned.buffer("pinned", len, Locality::Device(self.index()))
    }

    /// A copy of page-locked memory; does not wait. `src` may be dropped at once; its next
    /// [`as_mut_slice`](PinnedBuffer::as_mut_slice) waits.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::WrongPool`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn upload_pinned<T: DeviceCopy>(&self, src: &PinnedBuffer<T>) -> Result<DeviceBuffer<T>> {
        let _here = self.worker.handle.enter("upload_pinned", Location::caller());
        let mut buffer = self.allocate("upload_pinned", src.len())?;
        self.upload_pinned_into(src, &mut buffer)?;
        Ok(buffer)
    }

    /// [`upload_pinned`](Self::upload_pinned) into memory that is there already; the lengths must agree.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, else as [`upload_pinned`](Self::upload_pinned).
    #[track_caller]
    pub fn upload_pinned_into<V: AsViewMut + ?Sized>(&self, src: &PinnedBuffer<V::Elem>, dst: &mut V) -> Result<()> {
        let dst = dst.view_mut();
        let mut op = self.op("upload_pinned")?;
        op.writes(&dst)?;
        op.same_len(src.len(), dst.len())?;
        let bytes = dst.bytes().len();
        op.touch(&src.block, 0..bytes, Access::Read, true)?;
        // SAFETY: both ranges are live blocks of `bytes` bytes, ordered and noted by `op`; the host waits for the noted
        // use before it writes the pinned memory.
        op.submit(|driver, stream| unsafe { driver.copy_to_device(dst.address(), src.ptr().cast(), bytes, stream) })
    }

    /// Copies to page-locked memory; does not wait. `dst`'s next [`as_slice`](PinnedBuffer::as_slice) waits; whether a
    /// collective before it has failed, [`check`](Self::check) says after that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, [`Error::WrongPool`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn download_pinned<V: AsView + ?Sized>(&self, src: &V, dst: &mut PinnedBuffer<V::Elem>) -> Result<()> {
        let src = src.view();
        let mut op = self.op("download_pinned")?;
        op.reads(&src)?;
        op.same_len(src.len(), dst.len())?;
        let bytes = src.bytes().len();
        op.touch(&dst.block, 0..bytes, Access::Write, true)?;
        // SAFETY: as above; the host waits for the noted use before it reads or writes the pinned memory.
        op.submit(|driver, stream| unsafe { driver.copy_to_host(dst.ptr().cast(), src.address(), bytes, stream) })
    }

    /// Copies device memory. One side at least is this device's; the other may be any device's of the pool (a source
    /// also through [`peer()`](DeviceBuffer::peer), which says so at the call). Between devices the copy is direct
    /// where the pair was verified, else staged through two page-locked buffers and two events, without a wait of the
    /// host between pieces (CUDA Handbook, listing 9.1). Asynchronous, ordered on both sides.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] when neither side is this device's, [`Error::InvalidArgument`] for different lengths,
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn copy<S, D>(&self, src: &S, dst: &mut D) -> Result<()>
    where
        S: CopySource + ?Sized,
        D: AsViewMut<Elem = S::Elem> + ?Sized,
    {
        let (src, dst) = (src.source(), dst.view_mut());
        let mut op = self.op_in_graph("copy")?;
        op.same_len(src.len(), dst.len())?;
        let here = |device: Option<usize>| device.is_none_or(|d| d == self.index());
        let (from, to) = (src.block.device(), dst.block.device());
        let foreign = here(from) || here(to);
        op.touch(src.block, src.bytes(), Access::Read, foreign)?;
        op.touch(dst.block, dst.bytes(), Access::Write, foreign)?;
        if let Some(recording) = &self.recording
            && let Some(other) =
                from.into_iter().chain(to).find(|&other| !self.worker.shared.is_direct(self.index(), other))
        {
            return Err(recording.refuse(op.site, "copy", &format!("one with device {other} has to be staged")));
        }
        let done = crate::copy::peer::copy(
            self,
            dst.address(),
            to.unwrap_or(self.index()),
            src.address(),
            from.unwrap_or(self.index()),
            src.bytes().len(),
        );
        op.done(&done);
        op.submitted();
        done
    }
}
