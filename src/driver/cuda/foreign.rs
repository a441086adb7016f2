//! Memory and streams that other code has allocated on the device.

use std::ptr;

use cudarc::driver::sys::{self, CUpointer_attribute_enum as Attribute};

use super::{CudaGpu, fault, memory::nonzero, stream, vmm};
use crate::driver::{Address, DriverResult, RawStream};

/// `CU_MEMORYTYPE_DEVICE`.
const ON_DEVICE: u64 = 2;

impl CudaGpu {
    pub(super) unsafe fn adopt(&self, address: Address, bytes: usize) -> DriverResult<Address> {
        nonzero(bytes)?;
        self.enter()?;
        let (mut at, end) = (address, address.saturating_add(bytes as u64));
        while at < end {
            at = self.adopt_allocation(at, end).map_err(|fault| match at > address {
                true => fault::invalid(format!("{bytes} bytes at {address:#x}, where {} are: {fault}", at - address)),
                false => fault,
            })?;
        }
        Ok(address)
    }

    /// Checks the allocation at `at`, and gives peers access to it. Returns the end of its part before `end`. A tensor
    /// may span mappings that other code has put side by side.
    fn adopt_allocation(&self, at: Address, end: Address) -> DriverResult<Address> {
        let [kind, managed, owner, pool, plain, start, size] = attributes(
            at,
            [
                Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
                Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            ],
        );
        fail_if!(kind != ON_DEVICE, fault::invalid(format!("{at:#x} is not device memory of this process")));
        fail_if!(managed != 0, fault::invalid(format!("{at:#x} is managed memory, which belongs to no device")));
        if owner != self.info.ordinal as u64 {
            let own = self.info.ordinal;
            return Err(fault::invalid(format!("{at:#x} is memory of GPU {owner}, not of GPU {own}")));
        }
        let pool = Some(pool).filter(|&pool| pool != 0);
        // Memory of `cuMemAlloc`, which all peers can access.
        let plain = plain == 1;
        let mapped = !plain && pool.is_none();
        // Of mapped memory, the range is that of its whole window.
        let (start, size) = match mapped {
            true => (
                attribute(at, Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR),
                attribute(at, Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE),
            ),
            false => (start, size),
        };
        // Empty where the driver does not know the range.
        let range = Some(start..start + size).filter(|range| range.contains(&at)).unwrap_or(at..end);
        if range.end < end && !mapped {
            let room = range.end.saturating_sub(at);
            return Err(fault::invalid(format!("{} bytes at {at:#x}, where the allocation has {room}", end - at)));
        }
        // The devices with access to all memory of this context must have access to this memory, too: peers read what
        // collectives exchange. They have it to this crate's own memory, but not to other code's pools and mappings.
        let last = range.end.min(end);
        let space = vmm::space(self.device);
        let mut space = space.lock();
        if !plain && !space.readers.is_empty() && !space.maps(at) {
            // SAFETY: the driver has just named the pool and the range as those of live memory.
            let code = unsafe { space.admit_to(self.device, pool.map(|pool| pool as usize), range) };
            self.check_code(code, || format!("peers have no access to {at:#x}, which other code has mapped"))?;
        }
        Ok(last)
    }

    pub(super) unsafe fn disown(&self, _: Address) -> DriverResult {
        Ok(())
    }

    pub(super) unsafe fn stream_adopt(&self, s: RawStream) -> DriverResult {
        self.enter()?;
        let per_thread = "the per-thread default stream is another one on each thread";
        fail_if!(s.0 == CU_STREAM_PER_THREAD, fault::invalid(per_thread));
        let mut context = ptr::null_mut();
        // SAFETY: the caller's promise: a live stream; the pointer is to a live handle.
        self.check(unsafe { sys::cuStreamGetCtx(stream::stream(s), &mut context) })?;
        if context == self.context.0 {
            return Ok(());
        }
        Err(fault::invalid(format!("the stream is not of GPU {}, or not of its primary context", self.info.ordinal)))
    }
}

/// The number by which CUDA knows it, and `__dlpack__(stream=2)`.
const CU_STREAM_PER_THREAD: u64 = 2;

/// Attributes of an address, 0 where the driver does not know them. One call asks for all: each costs as much.
fn attributes<const N: usize>(address: Address, mut asked: [Attribute; N]) -> [u64; N] {
    let mut values = [0u64; N];
    let mut places = values.each_mut().map(|value| ptr::from_mut(value).cast());
    // SAFETY: `N` attributes of at most eight bytes each, and places for them; the rest stays zero.
    let code = unsafe { sys::cuPointerGetAttributes(N as u32, asked.as_mut_ptr(), places.as_mut_ptr(), address) };
    // A driver that does not know one of them refuses them all.
    if fault::code(code) == fault::SUCCESS { values } else { asked.map(|what| attribute(address, what)) }
}

fn attribute(address: Address, what: Attribute) -> u64 {
    let mut value = 0u64;
    // SAFETY: each attribute that is asked for has at most eight bytes; the rest stays zero.
    let asked = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), what, address) };
    if fault::code(asked) == fault::SUCCESS { value } else { 0 }
}
