//! Copies to a device, from it, and between devices.

use crate::copy::{host, peer};
use crate::error::{Result, op_site::OpSite};
use crate::memory::{
    Access, AsPinned, AsPinnedMut, AsView, AsViewMut, CopySource, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut,
};
use crate::{Device, token::op::Op};
#[cfg(doc)]
use crate::{Error, PinnedBuffer};

impl Device {
    /// A copy of host data. When the call returns, `src` is not needed any more: it was copied into page-locked staging
    /// memory. Two pieces alternate, so that filling one overlaps sending the other. Several threads copy large slices.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Aborted`], [`Error::Timeout`], the driver's.
    #[track_caller]
    pub fn upload<T: DeviceCopy>(&self, src: &[T]) -> Result<DeviceBuffer<T>> {
        let op = self.op("upload")?;
        let mut buffer = op.buffer("upload", src.len())?;
        op.upload(src, &buffer.view_mut())?;
        Ok(buffer)
    }

    /// [`upload`](Self::upload) into an existing buffer. The lengths must agree.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths; [`Error::Borrowed`] while another device is in a launch with
    /// collectives, of a graph that names `dst`; else as [`upload`](Self::upload).
    #[track_caller]
    pub fn upload_into<V: AsViewMut>(&self, src: &[V::Elem], dst: &mut V) -> Result<()> {
        let dst = dst.view_mut();
        self.op("upload_into")?.upload(src, &dst)
    }

    /// The contents, on the host. Waits for this stream only. If a collective before it has failed, this is an error,
    /// not an incomplete result.
    ///
    /// # Errors
    /// [`Error::Aborted`], [`Error::Timeout`], the driver's. [`Error::Borrowed`] while another device is in a launch
    /// with collectives, of a graph that writes `src`.
    #[track_caller]
    pub fn download<V: AsView>(&self, src: &V) -> Result<Vec<V::Elem>> {
        let src = src.view();
        let _here = OpSite::here("download");
        let mut host = vec![bytemuck::Zeroable::zeroed(); src.len()];
        self.download_into(&src, &mut host)?;
        Ok(host)
    }

    /// [`download`](Self::download) into an existing slice. The lengths must agree. After an error the contents of
    /// `dst` are unspecified.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, else as [`download`](Self::download).
    #[track_caller]
    pub fn download_into<V: AsView>(&self, src: &V, dst: &mut [V::Elem]) -> Result<()> {
        let src = src.view();
        let mut op = self.op("download_into")?;
        op.reads(&src)?;
        op.same_len(src.len(), dst.len())?;
        op.reserve()?;
        let done = host::download(self, src.address(), bytemuck::cast_slice_mut(dst));
        op.submitted();
        done.and_then(|()| self.check())
    }

    /// A copy of page-locked memory: of a [`PinnedBuffer`] or of a [part](PinnedBuffer::range) of it. It does not wait.
    /// The buffer may be dropped immediately; its next [`as_mut_slice`](PinnedBuffer::as_mut_slice) waits for the copy.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::WrongPool`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn upload_pinned<P: AsPinned>(&self, src: &P) -> Result<DeviceBuffer<P::Elem>> {
        let src = src.pinned_view();
        let _here = OpSite::here("upload_pinned");
        let mut buffer = self.allocate("upload_pinned", src.len())?;
        self.upload_pinned_into(&src, &mut buffer)?;
        Ok(buffer)
    }

    /// [`upload_pinned`](Self::upload_pinned) into an existing buffer. The lengths must agree.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, else as [`upload_pinned`](Self::upload_pinned).
    #[track_caller]
    pub fn upload_pinned_into<V: AsViewMut>(&self, src: &impl AsPinned<Elem = V::Elem>, dst: &mut V) -> Result<()> {
        let (src, dst) = (src.pinned_view(), dst.view_mut());
        let mut op = self.op("upload_pinned_into")?;
        op.writes(&dst)?;
        op.same_len(src.len(), dst.len())?;
        op.touch(src.block, src.bytes(), Access::Read, true)?;
        let (from, bytes) = (src.address() as *const u8, src.bytes().len());
        // SAFETY: both ranges are live blocks of `bytes` bytes, which `op` orders and records. The host waits for the
        // recorded use before it writes the pinned memory.
        op.submit(|driver, stream| unsafe { driver.copy_to_device(dst.address(), from, bytes, stream) })
    }

    /// Copies to page-locked memory: to a [`PinnedBuffer`], or to a [part](PinnedBuffer::range_mut) of it. It does not
    /// wait; the next [`as_slice`](PinnedBuffer::as_slice) of the buffer waits for the copy. After that,
    /// [`check`](Self::check) says whether a collective before the copy has failed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths, [`Error::WrongPool`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn download_pinned<V: AsView>(&self, src: &V, dst: &mut impl AsPinnedMut<Elem = V::Elem>) -> Result<()> {
        let (src, dst) = (src.view(), dst.pinned_view_mut().0);
        let mut op = self.op("download_pinned")?;
        op.reads(&src)?;
        op.same_len(src.len(), dst.len())?;
        op.touch(dst.block, dst.bytes(), Access::Write, true)?;
        let (to, bytes) = (dst.address() as *mut u8, dst.bytes().len());
        // SAFETY: as above. The host waits for the recorded use before it reads or writes the pinned memory.
        op.submit(|driver, stream| unsafe { driver.copy_to_host(to, src.address(), bytes, stream) })
    }

    /// Copies device memory. Source or destination must belong to this device; the other may belong to any device of
    /// the pool. (A source may be passed as [`peer()`](DeviceBuffer::peer), to say so at the call.)
    ///
    /// Between devices the copy is direct if the pool has verified the pair. Otherwise it is staged through two
    /// page-locked buffers and two events, and the host does not wait between pieces (CUDA Handbook, listing 9.1).
    /// Asynchronous, ordered on both devices.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] when neither side belongs to this device, [`Error::InvalidArgument`] for different
    /// lengths, [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn copy<S: CopySource>(&self, src: &S, dst: &mut impl AsViewMut<Elem = S::Elem>) -> Result<()> {
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
        let (to, from) = (to.unwrap_or(self.index()), from.unwrap_or(self.index()));
        let (dst, src, bytes) = (dst.address(), src.address(), src.bytes().len());
        op.submit_by(|| peer::copy(&self.worker, &self.stream, dst, to, src, from, bytes))
    }
}

impl<T: DeviceCopy> DeviceBuffer<T> {
    /// A copy of this buffer in the memory of `dev`. The copy is direct if the pair of devices allows it, and staged
    /// through pinned host memory otherwise. Asynchronous, ordered on `dev`'s current stream.
    ///
    /// # Errors
    /// `OutOfMemory`, `WrongPool`, and the driver's.
    #[track_caller]
    pub fn copy_to(&self, dev: &Device) -> Result<DeviceBuffer<T>> {
        self.view().copy_to(dev)
    }
}

impl<T: DeviceCopy> DeviceView<'_, T> {
    /// As [`DeviceBuffer::copy_to`], of a part.
    #[track_caller]
    pub fn copy_to(self, dev: &Device) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("copy_to");
        let mut here = dev.allocate("copy_to", self.len)?;
        dev.copy(&self.peer(), &mut here)?;
        Ok(here)
    }
}

impl Op<'_> {
    #[track_caller]
    fn upload<T: DeviceCopy>(mut self, src: &[T], dst: &DeviceViewMut<'_, T>) -> Result<()> {
        self.writes(dst)?;
        self.same_len(src.len(), dst.len())?;
        self.reserve()?;
        let done = host::upload(self.dev, bytemuck::cast_slice(src), dst.address());
        // Earlier pieces may be in flight even if a later one failed, so the use is recorded in any case.
        self.submitted();
        done
    }
}
