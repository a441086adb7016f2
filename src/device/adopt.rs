//! Memory and streams of other code as this crate's buffers and streams: tensors of other libraries, frames of
//! decoders, a library's own stream. Programs call it; it uses the memory room and the thread's streams.

use crate::{
    Device, DeviceCopy, Stream,
    driver::{Address, RawStream},
    error::{Error, Result, op_site::OpSite},
    memory::{DeviceBuffer, fits_blocks},
    thread::streams::PooledStream,
};

impl Device {
    /// `len` elements that other code has allocated on this device, as a buffer, without a copy. On a software GPU it
    /// is memory of the host.
    ///
    /// The buffer is used as all others are: the library orders its operations over streams and devices, collectives
    /// take it, the race checker knows it, [`stats`](Self::stats) counts it as
    /// [`adopted`](crate::memory::MemoryStats::adopted). `keep` owns the memory, or keeps it alive:
    /// an `Arc`, a tensor, a guard. It is dropped when the buffer has been dropped *and* its last use on any device is
    /// over: immediately, or later on this device's thread, at the latest when the pool ends. If work is stuck on the
    /// memory then, it is never dropped.
    ///
    /// The guide has an example on its page "Memory of other libraries".
    ///
    /// # Streams
    /// Earlier work of other code must be over, or be ordered before: wait for it, or use the buffer first on the
    /// [adopted stream](Self::adopt_stream) of that code. The same holds the other way round: other code may touch
    /// the memory after [`synchronize`](Self::synchronize), or on the stream of the buffer's last use.
    ///
    /// # Peers
    /// Collectives on GPUs with peer access need access for all peers. Memory of `cuMemAlloc` has it. To a memory pool
    /// of CUDA (`cuMemAllocAsync`), and to memory that other code has mapped (`cuMemMap`), this call gives all peers
    /// access. Where the driver refuses that, copy the memory into a buffer of this device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null or misaligned address; where the driver can tell, also for memory of
    /// another device, host or managed memory, or more bytes than the allocation has. [`Error::Driver`] for memory that
    /// peers cannot access. [`Error::Aborted`]. `keep` is dropped then.
    ///
    /// # Safety
    /// * `address` is the first of `len` live, initialised `T`s in memory of this device (on a software GPU: of the
    ///   host), and they stay live until `keep` is dropped.
    /// * Until then other code does not touch them, but in the order of streams as above, and no other buffer of any
    ///   pool names them.
    /// * `keep` may be dropped on any thread, and does not wait for a device or another thread.
    #[track_caller]
    pub unsafe fn adopt<T: DeviceCopy>(
        &self,
        address: Address,
        len: usize,
        keep: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        // SAFETY: the caller's promise.
        unsafe { self.adopt_as("adopt", address, len, keep) }
    }

    #[track_caller]
    pub(crate) unsafe fn adopt_as<T: DeviceCopy>(
        &self,
        op: &'static str,
        address: Address,
        len: usize,
        keep: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        const { fits_blocks::<T>() };
        let _here = OpSite::here(op);
        self.check()?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes.filter(|&bytes| address.checked_add(bytes as u64).is_some()) else {
            return Err(Error::invalid(op, format_args!("{len} elements are more than memory can hold")));
        };
        if bytes == 0 {
            return self.allocate(op, len);
        }
        if address == 0 || !address.is_multiple_of(align_of::<T>() as u64) {
            let why = if address == 0 { "a null address".into() } else { format!("{address:#x} is misaligned") };
            return Err(Error::invalid(op, format_args!("{why}, for {}", std::any::type_name::<T>())));
        }
        // SAFETY: the caller's promise.
        let block = unsafe { self.worker.cache.borrow_mut().adopt(op, (address, bytes), keep)? };
        Ok(DeviceBuffer::new(block, len))
    }

    /// A stream that other code has created, for [`on`](Self::on): operations are ordered on it as on a stream of this
    /// crate, after all work of that code so far. It is never destroyed here. The same handle gives the same
    /// stream. `raw` is a `CUstream` as a number (0 is CUDA's legacy default stream).
    ///
    /// The end of a scope waits for all work of the stream, also for other code's.
    ///
    /// The guide has an example on its page "Memory of other libraries".
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the driver can tell that it is not a stream of this device and its primary
    /// context; for the per-thread default stream (2); in a capture; [`Error::Aborted`]; the driver's.
    ///
    /// # Safety
    /// The stream is live until the pool has been closed and all its buffers are dropped: events and buffers name it.
    #[track_caller]
    pub unsafe fn adopt_stream(&self, raw: u64) -> Result<Stream> {
        let _here = OpSite::here("adopt_stream");
        self.not_in_graph("adopt_stream")?;
        self.check()?;
        // SAFETY: the caller's promise.
        let PooledStream { core, held, .. } = unsafe { self.worker.adopt_stream("adopt_stream", RawStream(raw))? };
        Ok(Stream { core, _held: held })
    }
}

#[cfg(test)]
#[path = "../../tests/unit/device/adopt_tests.rs"]
mod tests;
