//! Virtual memory: windows of addresses, and physical memory that is mapped into them.
//!
//! The driver grants access per mapping, and not, as for `cuMemAlloc`, to all memory of a context (xla#40852 hung for
//! 56 minutes because a right was missing). So this module lists all mappings of the process: a new right is applied to
//! all of them, and a new mapping gets the rights of all peers.
//!
//! The structs are those of `cuda.h`, unchanged since 10.2; cudarc's differ from version to version of CUDA.

#[cfg(target_os = "linux")]
mod export;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{c_int, c_void};
use std::{ops::Range, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute, CUmemGenericAllocationHandle as Handle};
use once_cell::sync::Lazy;
use parking_lot::Mutex;

use super::{CudaGpu, fault};
use crate::driver::{Address, DriverResult, FaultKind};

/// Windows begin at a multiple of this.
const ALIGN: usize = 2 << 20;

#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location: Location,
    flags: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());
const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());

const ON_DEVICE: c_int = 1;
const PINNED: c_int = 1;
const POSIX_FD: c_int = 1;
const NO_ACCESS: c_int = 0;
const READ_WRITE: c_int = 3;

#[derive(Clone, Copy, Debug)]
pub(super) struct Virtual {
    pub granularity: usize,
    wishes: Wishes,
}

/// A wish that the driver refuses is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wishes {
    /// For other processes, and for NCCL's registration.
    exportable: bool,
    /// For network cards (xla#41652).
    rdma: bool,
}

impl Wishes {
    fn properties(self, device: CUdevice) -> Properties {
        Properties {
            kind: PINNED,
            handle_types: if self.exportable { POSIX_FD } else { 0 },
            location: Location { kind: ON_DEVICE, id: device },
            win32: ptr::null_mut(),
            compression: 0,
            rdma: u8::from(self.rdma),
            usage: 0,
            reserved: [0; 4],
        }
    }

    fn fewer(self) -> Option<Wishes> {
        match self {
            Wishes { rdma: true, .. } => Some(Wishes { rdma: false, ..self }),
            Wishes { exportable: true, .. } => Some(Wishes { exportable: false, ..self }),
            _ => None,
        }
    }
}

/// For all objects in the process.
#[derive(Default)]
pub(super) struct Space {
    /// Size in bytes, by first address.
    windows: BTreeMap<Address, u64>,
    mappings: BTreeMap<Address, Mapping>,
    pub(super) readers: BTreeSet<CUdevice>,
    /// CUDA's default pool of this device, which is never destroyed, and the devices that have access to it.
    admitted: Option<(usize, BTreeSet<CUdevice>)>,
}

#[derive(Clone, Copy)]
struct Mapping {
    bytes: usize,
    /// Kept, because a move maps the memory again.
    handle: Handle,
    shared: bool,
}

pub(super) fn space(device: CUdevice) -> Arc<Mutex<Space>> {
    static SPACES: Lazy<Mutex<HashMap<CUdevice, Arc<Mutex<Space>>>>> = Lazy::new(Mutex::default);
    SPACES.lock().entry(device).or_default().clone()
}

/// `None` if the device has no virtual memory management.
pub(super) fn probe(device: CUdevice) -> Option<Virtual> {
    let has = |what: Attribute| {
        let mut value = 0;
        // SAFETY: a device of this driver; the pointer is to a live integer.
        let asked = unsafe { sys::cuDeviceGetAttribute(&mut value, what, device) };
        fault::code(asked) == fault::SUCCESS && value != 0
    };
    if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED) {
        return None;
    }
    let wishes = Wishes {
        exportable: has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
        rdma: has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
    };
    std::iter::successors(Some(wishes), |wishes| wishes.fewer()).find_map(|wishes| {
        let (mut granularity, properties) = (0, wishes.properties(device));
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the pointers are to a live integer and to a struct of the layout that the driver reads.
        let asked =
            unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, (&raw const properties).cast(), minimum) };
        let known = fault::code(asked) == fault::SUCCESS && granularity.is_power_of_two();
        known.then_some(Virtual { granularity, wishes })
    })
}

impl CudaGpu {
    fn virtual_memory(&self) -> DriverResult<Virtual> {
        self.virtual_memory.lock().ok_or_else(|| fault::unsupported("no virtual memory management on this device"))
    }

    pub(super) fn vm_granularity(&self) -> Option<usize> {
        self.virtual_memory.lock().map(|v| v.granularity)
    }

    fn check_multiple(&self, address: Address, bytes: u64) -> DriverResult {
        let granularity = self.virtual_memory()?.granularity as u64;
        if bytes > 0 && bytes.is_multiple_of(granularity) && address.is_multiple_of(granularity) {
            return Ok(());
        }
        Err(fault::invalid(format!("{bytes} bytes at {address:#x}: not multiples of the granularity, {granularity}")))
    }

    pub(super) fn vm_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.check_multiple(0, bytes)?;
        self.enter()?;
        let length = usize::try_from(bytes).map_err(|_| fault::invalid("a window larger than all addresses"))?;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer; no address is requested.
        self.check(unsafe { sys::cuMemAddressReserve(&mut address, length, ALIGN, 0, 0) })?;
        space(self.device).lock().windows.insert(address, bytes);
        Ok(address)
    }

    pub(super) unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult {
        self.virtual_memory()?;
        let (alive, space) = (self.enter_anyhow(), space(self.device));
        let mut space = space.lock();
        if space.windows.get(&address) != Some(&bytes) {
            return alive.and_then(|()| Err(fault::invalid("no such window was reserved")));
        }
        if space.mappings.range(address..address + bytes).next().is_some() {
            return alive.and_then(|()| Err(fault::invalid("something is mapped in the window")));
        }
        // SAFETY: a window that was reserved with this size and contains no mapping.
        let freed = self.check(unsafe { sys::cuMemAddressFree(address, bytes as usize) });
        if freed.is_ok() {
            space.windows.remove(&address);
        }
        alive.and(freed)
    }

    pub(super) unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult {
        self.check_multiple(address, bytes as u64)?;
        self.enter()?;
        let space = space(self.device);
        let mut space = space.lock();
        space.check_place(address, bytes)?;
        let handle = self.create(bytes)?;
        // SAFETY: a place in a window, with nothing mapped there.
        if let Err(fault) = unsafe { self.attach(&space, address, bytes, handle) } {
            // SAFETY: the memory is not mapped.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(fault);
        }
        space.mappings.insert(address, Mapping { bytes, handle, shared: false });
        Ok(())
    }

    fn create(&self, bytes: usize) -> DriverResult<Handle> {
        loop {
            let Virtual { wishes, granularity } = self.virtual_memory()?;
            let (mut handle, properties) = (0, wishes.properties(self.device));
            // SAFETY: the pointers are to a live integer and to a struct of the layout that the driver reads.
            let created = unsafe { sys::cuMemCreate(&mut handle, bytes, (&raw const properties).cast(), 0) };
            let fault = match self.check(created) {
                Ok(()) => return Ok(handle),
                Err(fault) => fault,
            };
            // The attributes may promise too much (containers, MIG, WSL). From now on fewer wishes are made.
            let hopeless = matches!(fault.kind, FaultKind::OutOfMemory | FaultKind::DeviceLost);
            match wishes.fewer().filter(|_| !hopeless) {
                Some(wishes) => *self.virtual_memory.lock() = Some(Virtual { granularity, wishes }),
                None => return Err(fault),
            }
        }
    }

    /// With access for this device and its readers. A failure leaves nothing mapped.
    ///
    /// # Safety
    /// The range is in a window, and nothing is mapped there.
    unsafe fn attach(&self, space: &Space, address: Address, bytes: usize, handle: Handle) -> DriverResult {
        // SAFETY: the caller's promise; the handle has this size, and offset 0 is the only one that CUDA can map.
        self.check(unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) })?;
        let devices = std::iter::once(self.device).chain(space.readers.iter().copied());
        let rights: Vec<Access> = devices.map(|device| access(device, READ_WRITE)).collect();
        // SAFETY: mapped just now.
        let set = unsafe { set_access(address, bytes, &rights) };
        self.check_code(set, || "access to mapped memory could not be given".into()).inspect_err(|_| {
            // SAFETY: no other code uses the mapping yet.
            let _ = unsafe { sys::cuMemUnmap(address, bytes) };
        })
    }

    pub(super) unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult {
        self.virtual_memory()?;
        let (alive, space) = (self.enter_anyhow(), space(self.device));
        let mut space = space.lock();
        let mapping = match space.whole(address, bytes) {
            Ok(mapping) => mapping,
            Err(fault) => return alive.and(Err(fault)),
        };
        // SAFETY: the caller's promise: a whole mapping that no operation uses. CUDA does not wait (pytorch#196257).
        let unmapped = self.check(unsafe { sys::cuMemUnmap(address, bytes) });
        if unmapped.is_ok() {
            space.mappings.remove(&address);
            // SAFETY: this module owns the handle and does not use it again.
            let released = self.check(unsafe { sys::cuMemRelease(mapping.handle) });
            return alive.and(released);
        }
        alive.and(unmapped)
    }

    pub(super) unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult {
        self.check_multiple(to, bytes as u64)?;
        self.enter()?;
        let space = space(self.device);
        let mut space = space.lock();
        let mapping = space.whole(from, bytes)?;
        if mapping.shared {
            return Err(fault::invalid(format!("the mapping at {from:#x} is for other processes, and does not move")));
        }
        space.check_place(to, bytes)?;
        // The memory is mapped twice for a moment, so that a failure of either step leaves the old mapping. SAFETY: a
        // range in a window, with nothing mapped there.
        unsafe { self.attach(&space, to, bytes, mapping.handle)? };
        // SAFETY: the caller's promise: a whole mapping that no operation uses.
        if let Err(fault) = self.check(unsafe { sys::cuMemUnmap(from, bytes) }) {
            // SAFETY: mapped above; no other code uses it yet.
            let _ = unsafe { sys::cuMemUnmap(to, bytes) };
            return Err(fault);
        }
        space.mappings.remove(&from);
        space.mappings.insert(to, mapping);
        Ok(())
    }

    /// Also on a lost device: mappings belong to the process, and outlive the context.
    fn enter_anyhow(&self) -> DriverResult {
        self.enter().inspect_err(|_| {
            let _ = self.set_current();
        })
    }
}

impl Space {
    fn check_place(&self, address: Address, bytes: usize) -> DriverResult {
        let end = address.checked_add(bytes as u64);
        let window = self.windows.range(..=address).next_back();
        let inside = window.zip(end).is_some_and(|((start, size), end)| end <= start + size);
        let taken = end.and_then(|end| self.mappings.range(..end).next_back());
        match taken {
            _ if !inside => Err(fault::invalid(format!("no window was reserved for {bytes} bytes at {address:#x}"))),
            Some((start, mapping)) if start + mapping.bytes as u64 > address => {
                Err(fault::invalid(format!("something is mapped at {:#x} already", (*start).max(address))))
            }
            _ => Ok(()),
        }
    }

    fn whole(&self, address: Address, bytes: usize) -> DriverResult<Mapping> {
        let found = self.mappings.get(&address).filter(|mapping| mapping.bytes == bytes).copied();
        found.ok_or_else(|| fault::invalid(format!("{bytes} bytes at {address:#x} are not what was mapped there")))
    }

    /// Access to all mappings, present and future. A failure changes nothing.
    pub(super) fn admit(&mut self, device: CUdevice) -> Result<(), i32> {
        for (n, (&address, mapping)) in self.mappings.iter().enumerate() {
            // SAFETY: a whole mapping.
            let set = unsafe { set_access(address, mapping.bytes, &[access(device, READ_WRITE)]) };
            if set != fault::SUCCESS {
                self.revoke(device, n);
                return Err(set);
            }
        }
        self.readers.insert(device);
        Ok(())
    }

    /// For memory of other code: a whole memory pool, or one mapping. Returns the code of a failure.
    ///
    /// # Safety
    /// Live memory of this device: the pool, or the whole range of a mapping.
    pub(super) unsafe fn admit_to(&mut self, own: CUdevice, pool: Option<usize>, mapping: Range<Address>) -> i32 {
        if pool.is_some() && self.admitted.as_ref().is_some_and(|(of, to)| Some(*of) == pool && *to == self.readers) {
            return fault::SUCCESS;
        }
        let rights: Vec<Access> = self.readers.iter().map(|&reader| access(reader, READ_WRITE)).collect();
        let Some(pool) = pool else {
            // SAFETY: the caller's promise.
            return unsafe { set_access(mapping.start, (mapping.end - mapping.start) as usize, &rights) };
        };
        let mut default = ptr::null_mut();
        // SAFETY: the caller's promise; the pointers are to `rights.len()` structs with the driver's layout, and to a
        // live handle.
        let (code, asked) = unsafe {
            let code = sys::cuMemPoolSetAccess(pool as sys::CUmemoryPool, rights.as_ptr().cast(), rights.len());
            (fault::code(code), fault::code(sys::cuDeviceGetDefaultMemPool(&mut default, own)))
        };
        if code == fault::SUCCESS && asked == fault::SUCCESS && default as usize == pool {
            self.admitted = Some((pool, self.readers.clone()));
        }
        code
    }

    pub(super) fn maps(&self, at: Address) -> bool {
        self.mappings.range(..=at).next_back().is_some_and(|(start, mapping)| at - start < mapping.bytes as u64)
    }

    /// Returns the code of the first failure.
    pub(super) fn expel(&mut self, device: CUdevice) -> i32 {
        self.readers.remove(&device);
        self.revoke(device, usize::MAX)
    }

    fn revoke(&self, device: CUdevice, first: usize) -> i32 {
        let mut result = fault::SUCCESS;
        for (&address, mapping) in self.mappings.iter().take(first) {
            // SAFETY: a whole mapping.
            let set = unsafe { set_access(address, mapping.bytes, &[access(device, NO_ACCESS)]) };
            if result == fault::SUCCESS {
                result = set;
            }
        }
        result
    }
}

fn access(device: CUdevice, flags: c_int) -> Access {
    Access { location: Location { kind: ON_DEVICE, id: device }, flags }
}

/// # Safety
/// The range is whole mappings.
unsafe fn set_access(address: Address, bytes: usize, rights: &[Access]) -> i32 {
    // SAFETY: the caller's promise; the pointer is to `rights.len()` structs with the driver's layout.
    fault::code(unsafe { sys::cuMemSetAccess(address, bytes, rights.as_ptr().cast(), rights.len()) })
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/vmm_tests.rs"]
mod tests;
