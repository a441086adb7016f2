//! Copies and fills. A transfer of zero bytes makes no driver call.

use cudarc::driver::sys::{self, CUresult};

use super::{CudaGpu, fault, stream::stream};
use crate::driver::{Address, Driver, DriverResult, Fault, RawStream};

impl CudaGpu {
    fn transfer(&self, bytes: usize, call: impl FnOnce() -> CUresult) -> DriverResult {
        self.enter()?;
        if bytes == 0 { Ok(()) } else { self.check(call()) }
    }

    pub(super) unsafe fn copy_to_device(
        &self,
        dst: Address,
        src: *const u8,
        bytes: usize,
        s: RawStream,
    ) -> DriverResult {
        // SAFETY: the caller's promise: live ranges, `src` page-locked, both alive until the copy is done.
        self.transfer(bytes, || unsafe { sys::cuMemcpyHtoDAsync_v2(dst, src.cast(), bytes, stream(s)) })
    }

    pub(super) unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, s: RawStream) -> DriverResult {
        // SAFETY: the caller's promise: live ranges, `dst` page-locked, both alive until the copy is done.
        self.transfer(bytes, || unsafe { sys::cuMemcpyDtoHAsync_v2(dst.cast(), src, bytes, stream(s)) })
    }

    pub(super) unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, s: RawStream) -> DriverResult {
        // SAFETY: the caller's promise: live ranges that this device may access and that do not overlap.
        self.transfer(bytes, || unsafe { sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, stream(s)) })
    }

    pub(super) unsafe fn copy_between(
        &self,
        [(dst, dst_device), (src, src_device)]: [(Address, &dyn Driver); 2],
        bytes: usize,
        s: RawStream,
    ) -> DriverResult {
        self.enter()?;
        let (to, from) = (self.peer(dst_device)?, self.peer(src_device)?);
        if to.device == from.device && to.device == self.device {
            // SAFETY: both ranges are this device's; the rest is the caller's promise.
            return unsafe { self.copy_within(dst, src, bytes, s) };
        }
        if to.device != self.device && from.device != self.device {
            return Err(fault::invalid("a peer copy on a stream of a third device"));
        }
        let other = if to.device == self.device { from } else { to };
        // Without the right CUDA would silently copy through the host.
        if !self.peers.lock().contains(&other.device) {
            return Err(fault::fault(
                705,
                format!("GPU {} has no access to GPU {}", self.info.ordinal, other.info.ordinal),
            ));
        }
        if bytes == 0 {
            return Ok(());
        }
        let mut capturing = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a stream of this device; the pointer is to a live value.
        self.check(unsafe { sys::cuStreamIsCapturing(stream(s), &mut capturing) })?;
        if capturing != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            // The peer call cannot be captured (error 900). This call can, and it uses the same path, since the right
            // exists. SAFETY: the caller's promise for the ranges; the driver finds their devices by the addresses.
            return self.check_shared(s, unsafe { sys::cuMemcpyAsync(dst, src, bytes, stream(s)) });
        }
        let (to, from) = (to.context.0, from.context.0);
        // SAFETY: the caller's promise for the ranges; the contexts are retained by their live drivers.
        self.check_shared(s, unsafe { sys::cuMemcpyPeerAsync(dst, to, src, from, bytes, stream(s)) })
    }

    pub(super) unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, s: RawStream) -> DriverResult {
        // SAFETY: the caller's promise: a live range that this device may write.
        self.transfer(bytes, || unsafe { sys::cuMemsetD8Async(dst, value, bytes, stream(s)) })
    }

    pub(super) unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, s: RawStream) -> DriverResult {
        // SAFETY: the caller's promise: a live range that this device may write, aligned to 4 bytes.
        self.transfer(count, || unsafe { sys::cuMemsetD32Async(dst, value, count, stream(s)) })
    }

    pub(super) unsafe fn write_value(&self, address: Address, value: u64, s: RawStream) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        let f = self.optional.write_value.filter(|_| self.info.stream_values).ok_or_else(no_values)?;
        // SAFETY: the symbol's own type; the caller's promise: a live aligned word. Flags 0: with a memory barrier.
        self.check_code(unsafe { f(stream(s), address, value, 0) }, String::new)
    }

    pub(super) unsafe fn wait_value(&self, address: Address, value: u64, s: RawStream) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        let f = self.optional.wait_value.filter(|_| self.info.stream_values).ok_or_else(no_values)?;
        let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: as in `write_value`.
        self.check_code(unsafe { f(stream(s), address, value, at_least) }, String::new)
    }
}

fn no_values() -> Fault {
    fault::unsupported("no 64-bit stream memory operations on this device")
}
