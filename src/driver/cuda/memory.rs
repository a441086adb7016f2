//! Device, page-locked and managed memory.

use std::ptr;

use cudarc::driver::sys::{self, CUmemAttach_flags};

use super::{CudaGpu, fault};
use crate::driver::{Address, DriverResult};

impl CudaGpu {
    pub(super) fn mem_alloc(&self, bytes: usize) -> DriverResult<Address> {
        nonzero(bytes)?;
        self.enter()?;
        let mut address = 0;
        // SAFETY: the context is current; the pointer is to a live integer.
        self.check(unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        Ok(address)
    }

    pub(super) unsafe fn mem_free(&self, address: Address) -> DriverResult {
        self.enter()?;
        // SAFETY: the caller's promise: memory of `mem_alloc`, freed once, unused.
        self.check(unsafe { sys::cuMemFree_v2(address) })
    }

    pub(super) fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        nonzero(bytes)?;
        self.enter()?;
        let mut p = ptr::null_mut();
        // Not write-combined, since the host reads the memory, too.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the pointer is to a live pointer.
        self.check(unsafe { sys::cuMemHostAlloc(&mut p, bytes, flags) })?;
        // SAFETY: `bytes` fresh bytes that no other code uses.
        unsafe { ptr::write_bytes(p.cast::<u8>(), 0, bytes) };
        Ok(p.cast())
    }

    pub(super) unsafe fn host_free(&self, p: *mut u8) -> DriverResult {
        self.enter()?;
        // SAFETY: the caller's promise; portable memory may be freed in any context.
        self.check(unsafe { sys::cuMemFreeHost(p.cast()) })
    }

    pub(super) fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        nonzero(bytes)?;
        self.enter()?;
        let mut address = 0;
        let flags = CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: the context is current; the pointer is to a live integer.
        self.check(unsafe { sys::cuMemAllocManaged(&mut address, bytes, flags) })?;
        let p = ptr::with_exposed_provenance_mut::<u8>(address as usize);
        if self.info.concurrent_managed {
            // SAFETY: `bytes` fresh bytes that no other code uses; the host may access them at any time.
            unsafe { ptr::write_bytes(p, 0, bytes) };
            return Ok(p);
        }
        // On this device the host must not access managed memory while the device works, so the device clears it.
        // SAFETY: `bytes` fresh bytes; the context is current.
        let cleared = self.check(unsafe { sys::cuMemsetD8_v2(address, 0, bytes) }).and_then(|()| {
            // SAFETY: the context is current.
            self.check(unsafe { sys::cuCtxSynchronize() })
        });
        if let Err(f) = cleared {
            // SAFETY: no other code uses the memory.
            let _ = unsafe { sys::cuMemFree_v2(address) };
            return Err(f);
        }
        Ok(p)
    }

    pub(super) unsafe fn managed_free(&self, p: *mut u8) -> DriverResult {
        self.enter()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { sys::cuMemFree_v2(p.expose_provenance() as u64) })
    }
}

pub(super) fn nonzero(bytes: usize) -> DriverResult {
    if bytes == 0 { Err(fault::invalid("an allocation of 0 bytes")) } else { Ok(()) }
}
