//! How the host reaches the contents of page-locked and managed buffers: written once for both types.
//!
//! Invariant: a host access waits for every conflicting use by a device first, and the checker learns of it.

use super::{Access, DeviceCopy, PinnedBuffer, UnifiedBuffer};
use crate::{
    driver::FailPoint,
    error::{Error, Result, op_site::OpSite},
};
use std::slice;

macro_rules! host_access {
    ($($buffer:ident)+) => {$(
        impl<T: DeviceCopy> $buffer<T> {
            /// The contents. Waits for devices that write them.
            ///
            /// # Errors
            /// [`Error::Timeout`] when such a write does not complete within the pool's deadline; [`Error::Borrowed`]
            /// when work of a failed scope that never ended may still write; the driver's errors.
            #[track_caller]
            pub fn as_slice(&self) -> Result<&[T]> {
                self.ready(concat!(stringify!($buffer), "::as_slice"), Access::Read)?;
                // SAFETY: the block holds `len` initialised elements of a Pod type, aligned to 256 bytes. No device
                // writes them any more, and none can start while `self` is borrowed: it needs `&mut self`.
                Ok(unsafe { slice::from_raw_parts(self.ptr(), self.len) })
            }

            /// The contents, for writing. Waits for all devices that use them.
            ///
            /// # Errors
            /// As [`as_slice`](Self::as_slice).
            #[track_caller]
            pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
                self.ready(concat!(stringify!($buffer), "::as_mut_slice"), Access::Write)?;
                // SAFETY: as above, and no device reads them any more.
                Ok(unsafe { slice::from_raw_parts_mut(self.ptr(), self.len) })
            }

            #[track_caller]
            fn ready(&self, op: &'static str, access: Access) -> Result<()> {
                let handle = &self.block.handle;
                let _here = OpSite::here(op);
                fail_if!(self.block.is_abandoned(), Error::borrowed(op, handle.device));
                if !handle.injected(FailPoint::HostDoesNotWait) {
                    self.block.hazards.wait_host(handle, op, access, self.deadline)?;
                }
                handle.host_access(op, self.address(), self.len * size_of::<T>(), access == Access::Write)
            }

            pub(crate) fn ptr(&self) -> *mut T {
                self.address() as *mut T
            }
        }
    )+};
}
host_access! { PinnedBuffer UnifiedBuffer }
