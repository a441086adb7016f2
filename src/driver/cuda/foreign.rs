//! Memory and streams that other code has allocated on the device.

use std::ptr;

use cudarc::driver::sys::{self, CUmemoryPool, CUpointer_attribute_enum as Attribute};

use super::{CudaGpu, fault, memory::nonzero, stream, vmm};
use crate::driver::{Address, DriverResult, RawStream};

/// `CU_MEMORYTYPE_DEVICE`.
const ON_DEVICE: u64 = 2;

impl CudaGpu {
    /// # Safety
    /// See [`Driver::adopt`](crate::driver::Driver::adopt).
    pub(super) unsafe fn adopt(&self, address: Address, bytes: usize) -> DriverResult<Address> {
        nonzero(bytes)?;
        self.enter()?;
        let ask = |what: Attribute| attribute(address, what).unwrap_or(0);
        if ask(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) != ON_DEVICE {
            return Err(fault::invalid(format!("{address:#x} is not device memory of this process")));
        }
        if ask(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED) != 0 {
            return Err(fault::invalid(format!("{address:#x} is managed memory, which belongs to no device")));
        }
        let owner = ask(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
        if owner != self.info.ordinal as u64 {
            let own = self.info.ordinal;
            return Err(fault::invalid(format!("{address:#x} is memory of GPU {owner}, not of GPU {own}")));
        }
        let start = ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
        let end = start + ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE);
        // Zero where the driver does not know the range.
        if end > start && !(start..=end).contains(&address.saturating_add(bytes as u64)) {
            let room = end.saturating_sub(address);
            return Err(fault::invalid(format!("{bytes} bytes at {address:#x}, where the allocation has {room}")));
        }
        self.share(address)?;
        Ok(address)
    }

    /// The devices with access to all memory of this context must have access to this memory, too: peers read what
    /// collectives exchange. They have it for memory of `cuMemAlloc`, but not for memory of pools and mappings.
    fn share(&self, address: Address) -> DriverResult {
        let space = vmm::space(self.device);
        let space = space.lock();
        if !space.has_readers()
            || attribute(address, Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) == Some(1)
        {
            return Ok(());
        }
        match attribute(address, Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE).filter(|&pool| pool != 0) {
            // SAFETY: the driver has just named the pool as that of live memory.
            Some(pool) => self.check_code(unsafe { space.admit_to(pool as usize as CUmemoryPool) }, || {
                format!("no access for peers to the memory pool of {address:#x}")
            }),
            None => Err(fault::unsupported(format!(
                "peers have no access to {address:#x}, which other code has mapped: copy it to a buffer of this device"
            ))),
        }
    }

    /// # Safety
    /// See [`Driver::disown`](crate::driver::Driver::disown).
    pub(super) unsafe fn disown(&self, _: Address) -> DriverResult {
        Ok(())
    }

    /// # Safety
    /// See [`Driver::stream_adopt`](crate::driver::Driver::stream_adopt).
    pub(super) unsafe fn stream_adopt(&self, s: RawStream) -> DriverResult {
        self.enter()?;
        let mut context = ptr::null_mut();
        // SAFETY: the caller's promise: a live stream; the pointer is to a live handle.
        self.check(unsafe { sys::cuStreamGetCtx(stream::stream(s), &mut context) })?;
        if self.is_context(context) {
            return Ok(());
        }
        Err(fault::invalid(format!("the stream is not of GPU {}, or not of its primary context", self.info.ordinal)))
    }
}

/// An attribute of an address; `None` if the driver does not know it.
fn attribute(address: Address, what: Attribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: each attribute that is asked for has at most eight bytes; the rest stays zero.
    let asked = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), what, address) };
    (fault::code(asked) == fault::SUCCESS).then_some(value)
}
