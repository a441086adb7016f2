//! Physical memory in other processes' hands: descriptors of mappings, and mappings of descriptors.

use super::{Handle, Mapping, space, sys};
use crate::driver::{
    Address, DriverResult, Fault, FaultKind,
    cuda::{CudaGpu, fault},
};
use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl CudaGpu {
    pub(in super::super) unsafe fn vm_export(&self, address: Address, bytes: usize) -> DriverResult<OwnedFd> {
        if !self.virtual_memory()?.wishes.exportable {
            return Err(fault::unsupported("memory of this GPU cannot be given to other processes here"));
        }
        self.enter()?;
        let space = space(self.device);
        let mut space = space.lock();
        let mapping = space.whole(address, bytes)?;
        let mut descriptor = -1;
        let to = (&raw mut descriptor).cast::<c_void>();
        // SAFETY: a live handle; the pointer is to an integer, which is what this type of handle is.
        self.check(unsafe { sys::cuMemExportToShareableHandle(to, mapping.handle, DESCRIPTOR, 0) })?;
        // SAFETY: the driver has just opened it for the caller.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        space.mappings.insert(address, Mapping { shared: true, ..mapping });
        Ok(descriptor)
    }

    pub(in super::super) unsafe fn vm_import(
        &self,
        address: Address,
        bytes: usize,
        memory: BorrowedFd<'_>,
    ) -> DriverResult {
        self.check_multiple(address, bytes as u64)?;
        self.enter()?;
        let space = space(self.device);
        let mut space = space.lock();
        space.check_place(address, bytes)?;
        let mut handle: Handle = 0;
        let from = std::ptr::without_provenance_mut::<c_void>(memory.as_raw_fd() as usize);
        // SAFETY: the pointer is to a live integer; an open descriptor, which the driver does not close.
        self.check(unsafe { sys::cuMemImportFromShareableHandle(&mut handle, from, DESCRIPTOR) })?;
        // SAFETY: a place in a window, with nothing mapped there.
        if let Err(fault) = unsafe { self.attach(&space, address, bytes, handle) } {
            // SAFETY: the memory is not mapped.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(wrong_size(fault, bytes));
        }
        space.mappings.insert(address, Mapping { bytes, handle, shared: true });
        Ok(())
    }
}

/// A descriptor does not tell its memory's size. If that is smaller, `cuMemMap` is not supported (seen on an H200).
fn wrong_size(fault: Fault, bytes: usize) -> Fault {
    // A refusal of access has a detail.
    if fault.kind != FaultKind::Unsupported || !fault.detail.is_empty() {
        return fault;
    }
    let detail = format!("the descriptor is of memory that cannot be mapped with {bytes} bytes: has it fewer?");
    Fault { kind: FaultKind::InvalidArgument, detail, ..fault }
}
