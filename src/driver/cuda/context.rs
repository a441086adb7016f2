//! One opened GPU: its primary context, its properties, and the checks that all calls share.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, c_char, c_int},
    ptr,
    sync::Arc,
};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUresult};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::library::{self, Optional};
use super::vmm::{self, Virtual};
use super::{fault, graph::Graphs, interop::Interop, shared::Shared};
use crate::{
    driver::{DeviceInfo, DriverResult, Fault, FaultKind, gate},
    error::Error,
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Context(pub(super) CUcontext);

// SAFETY: the driver allows every thread to use a context's handle; this crate never dereferences it.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

/// A GPU behind the CUDA driver. Made by [`open`](super::open); reached from a
/// [`DriverRef`](crate::driver::DriverRef) by [`as_any`](crate::driver::Driver::as_any).
///
/// It retains the device's *primary* context, the one that the runtime API, cuBLAS, NCCL and cudarc use.
pub struct CudaGpu {
    pub(super) info: DeviceInfo,
    pub(super) device: CUdevice,
    pub(super) context: Context,
    pub(super) optional: &'static Optional,
    /// The last and the first to run.
    pub(super) priorities: (c_int, c_int),
    pub(super) virtual_memory: Mutex<Option<Virtual>>,
    /// Every later call reports it.
    lost: OnceCell<Fault>,
    /// Those whose memory this device may access because this object has asked for it.
    pub(super) peers: Mutex<HashSet<CUdevice>>,
    /// Functions with permission for more than 48 KiB of dynamic shared memory, and how much.
    pub(super) big_shared: Mutex<HashMap<u64, u32>>,
    /// Kernels whose code waits for the previous kernel of the stream.
    pub(super) waiting: Mutex<HashSet<u64>>,
    #[cfg(feature = "blas")]
    pub(super) blas: Mutex<Option<super::gemm::Blas>>,
    pub(super) interop: Interop,
    pub(super) graphs: Graphs,
    pub(super) shared: Arc<Shared>,
    /// The last field: it is dropped after the fields above, which need the context.
    _retained: Retained,
}

struct Retained(CUdevice);

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: balances the retain in `CudaGpu::open`; the handle is dropped together with this value.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.0) };
    }
}

/// How many GPUs the driver sees, after `CUDA_VISIBLE_DEVICES`. Errors: [`Error::NoDevice`] if there is no driver, the
/// driver is too old, or it sees no GPU.
pub fn device_count() -> Result<usize, Error> {
    library::ready()?;
    let mut count = 0;
    // SAFETY: the driver is initialised; the pointer is to a live integer.
    opened("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    match usize::try_from(count) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(library::no_device("the CUDA driver is there but sees no GPU (CUDA_VISIBLE_DEVICES may hide them)")),
    }
}

impl CudaGpu {
    pub(super) fn open(ordinal: usize) -> Result<Self, Error> {
        let optional = library::ready()?;
        let count = device_count()?;
        let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count).ok_or_else(|| {
            library::no_device(format!("GPU {ordinal} was asked for, but the CUDA driver sees {count} (from 0)"))
        })?;
        let mut device = 0;
        // SAFETY: `ready` came first; the pointer is to a live integer.
        opened("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, index) })?;
        let mut info = describe(ordinal, device)?;
        info.stream_values &= optional.write_value.is_some() && optional.wait_value.is_some();
        let mut context = ptr::null_mut();
        // SAFETY: a device of this driver; the pointer is to a live handle.
        opened("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        let retained = Retained(device);
        let mut gpu = CudaGpu {
            info,
            device,
            context: Context(context),
            optional,
            priorities: (0, 0),
            virtual_memory: Mutex::new(optional.virtual_memory.then(|| vmm::probe(device)).flatten()),
            lost: OnceCell::new(),
            peers: Mutex::new(HashSet::new()),
            big_shared: Mutex::new(HashMap::new()),
            waiting: Mutex::new(HashSet::new()),
            #[cfg(feature = "blas")]
            blas: Mutex::new(None),
            interop: Interop::default(),
            graphs: Graphs::default(),
            shared: Shared::of(device),
            _retained: retained,
        };
        gpu.enter().map_err(|f| library::open_failed("cuCtxSetCurrent", f.code))?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current; the pointers are to live integers.
        opened("cuCtxGetStreamPriorityRange", unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) })?;
        gpu.priorities = (greatest, least);
        Ok(gpu)
    }

    pub(super) fn alive(&self) -> DriverResult {
        self.lost.get().map_or(Ok(()), |f| Err(f.clone()))
    }

    pub(super) fn enter(&self) -> DriverResult {
        self.alive()?;
        let mut now = ptr::null_mut();
        // SAFETY: the driver is initialised; the pointer is to a live handle.
        self.check(unsafe { sys::cuCtxGetCurrent(&mut now) })?;
        if now == self.context.0 { Ok(()) } else { self.set_current() }
    }

    pub(super) fn set_current(&self) -> DriverResult {
        // SAFETY: the context is retained as long as `self` lives.
        self.check(unsafe { sys::cuCtxSetCurrent(self.context.0) })
    }

    pub(super) fn bind(&self) -> DriverResult {
        self.alive()?;
        self.set_current()
    }

    pub(super) fn check(&self, result: CUresult) -> DriverResult {
        self.check_code(fault::code(result), String::new)
    }

    /// [`check`](Self::check) for a plain number, with a detail. A fault of a lost device gets no detail: most likely
    /// an earlier operation has lost the device, and this call only reports it.
    pub(super) fn check_code(&self, code: i32, detail: impl FnOnce() -> String) -> DriverResult {
        if code == fault::SUCCESS {
            return Ok(());
        }
        let mut f = fault::fault(code, "");
        if f.kind != FaultKind::DeviceLost {
            f.detail = detail();
        }
        Err(self.remember(f))
    }

    /// That one is reported from then on.
    pub(super) fn remember(&self, fault: Fault) -> Fault {
        if fault.kind == FaultKind::DeviceLost { self.lost.get_or_init(|| fault).clone() } else { fault }
    }

    pub(super) fn memory_info(&self) -> DriverResult<(u64, u64)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the pointers are to live integers.
        self.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for CudaGpu {
    /// Never panics, and ignores errors of the driver: the device may be lost, or the driver shut down.
    fn drop(&mut self) {
        // Other pools' kernels may wait for each other.
        let _blocking = gate::blocking();
        // The calls below must not run in another device's context, also when this device is lost.
        let current = self.set_current().is_ok();
        #[cfg(feature = "blas")]
        if let Some(blas) = self.blas.get_mut().take().filter(|_| current) {
            blas.destroy(self);
        }
        for peer in std::mem::take(self.peers.get_mut()) {
            let _ = self.give_back(peer, current);
        }
        self.interop.clear();
    }
}

pub(super) fn opened(call: &str, result: CUresult) -> Result<(), Error> {
    match fault::code(result) {
        fault::SUCCESS => Ok(()),
        code => Err(library::open_failed(call, code)),
    }
}

fn describe(ordinal: usize, device: CUdevice) -> Result<DeviceInfo, Error> {
    let attribute = |what: Attribute| {
        let mut value = 0;
        // SAFETY: a device of this driver; the pointer is to a live integer.
        opened("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, what, device) })?;
        Ok::<u32, Error>(value.max(0) as u32)
    };
    let mut text: [c_char; 256] = [0; 256];
    // SAFETY: the buffer is as long as told.
    opened("cuDeviceGetName", unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int, device) })?;
    let name = words(&text);
    text = [0; 256];
    // SAFETY: the buffer is as long as told.
    opened("cuDeviceGetPCIBusId", unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as c_int, device) })?;
    let pci_bus_id = words(&text);
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the pointer is to a live value.
    opened("cuDeviceGetUuid_v2", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) })?;
    let mut total_memory = 0;
    // SAFETY: the pointer is to a live integer.
    opened("cuDeviceTotalMem_v2", unsafe { sys::cuDeviceTotalMem_v2(&mut total_memory, device) })?;
    Ok(DeviceInfo {
        ordinal,
        name,
        uuid: uuid.bytes.map(|b| b as u8),
        total_memory: total_memory as u64,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        pci_bus_id,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // Since CUDA 12.0 this name means the attribute of the `_v2` calls.
        stream_values: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)? != 0,
        concurrent_managed: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)? != 0,
    })
}

fn words(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&c| c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}
