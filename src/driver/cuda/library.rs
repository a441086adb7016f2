//! Finds libcuda and its symbols. Invariant: cudarc panics without one, so none is called before it was found here.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::{self, CUevent, CUfunction, CUmodule, CUstream};
use once_cell::sync::OnceCell;

use super::fault;
use crate::error::Error;

/// CUDA 12.2, which came with driver 535.
const OLDEST_DRIVER: c_int = 12020;

/// [`ready`] calls these before it knows the driver's version.
const ENTRY: &[&str] = &["cuInit", "cuDriverGetVersion"];

/// All other symbols that `driver::cuda` calls through cudarc.
#[rustfmt::skip]
const REQUIRED: &[&str] = &[
    "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute", "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent", "cuCtxGetCurrent", "cuCtxGetStreamPriorityRange", "cuCtxSynchronize", "cuMemGetInfo_v2",
    "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuMemAllocManaged", "cuMemsetD8_v2",
    "cuStreamCreateWithPriority", "cuStreamDestroy_v2", "cuStreamQuery", "cuStreamWaitEvent",
    "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery",
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyPeerAsync",
    "cuMemsetD8Async", "cuMemsetD32Async",
    "cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess", "cuCtxDisablePeerAccess",
    "cuModuleLoadDataEx", "cuModuleUnload", "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute",
    "cuLaunchKernel", "cuLaunchHostFunc",
    "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch",
    "cuGraphDestroy", "cuGraphExecDestroy",
];

/// The symbols of virtual memory management (CUDA 10.2, but not on every platform).
#[rustfmt::skip]
const VIRTUAL: &[&str] = &[
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap",
    "cuMemUnmap", "cuMemSetAccess", "cuMemGetAllocationGranularity",
];

/// Substitutes for functions that cudarc offers only if it loads the library at run time. Another crate of the build
/// may make cudarc link it instead (candle does). A glob import in an inner scope shadows the names of an outer one, so
/// [`present`], [`symbol`] and [`is_linked`] compile in both cases.
mod linked {
    #![allow(dead_code, reason = "shadowed when cudarc loads the library at run time")]

    pub(super) struct Linked;
    impl Linked {
        /// Has the signature of `libloading::Library::get`.
        pub(super) unsafe fn get<T>(&self, _: &[u8]) -> Result<&'static T, ()> {
            Err(())
        }
    }
    /// Always true: without the linked library the process would not start.
    pub(super) unsafe fn is_culib_present() -> bool {
        true
    }
    pub(super) unsafe fn culib() -> &'static Linked {
        &Linked
    }
    pub(super) const LINKED: Linked = Linked;
}
#[allow(unused_imports, reason = "shadowed when cudarc loads the library at run time")]
use linked::{culib, is_culib_present};

macro_rules! probe {
    ($(#[$m:meta])* $name:ident, $library:path) => {
        $(#[$m])*
        pub(super) fn $name() -> bool {
            #[allow(unused_imports)]
            use $library::*;
            // SAFETY: opens and closes a library by name; its initialisers are NVIDIA's.
            unsafe { is_culib_present() }
        }
    };
}
probe!(present, cudarc::driver::sys);
#[cfg(feature = "blas")]
probe!(cublas_present, cudarc::cublas::sys);
#[cfg(feature = "nvrtc")]
probe!(nvrtc_present, cudarc::nvrtc::sys);

/// A symbol of libcuda; `None` if it is missing or if libcuda was linked.
///
/// # Safety
/// libcuda is present, and `F` is the function pointer type of `name`.
unsafe fn symbol<F: Copy + 'static>(name: &str) -> Option<F> {
    #[allow(unused_imports)]
    use cudarc::driver::sys::*;
    // SAFETY: the caller's promise.
    unsafe { culib().get::<F>(name.as_bytes()).ok().map(|f| *f) }
}

fn missing(names: &[&'static str]) -> Option<&'static str> {
    // SAFETY: called after `present`; every symbol is at least a pointer, which is not used.
    let found = |n: &&str| unsafe { symbol::<*const ()>(n) }.is_some();
    if is_linked() { None } else { names.iter().copied().find(|n| !found(n)) }
}

fn is_linked() -> bool {
    #[allow(unused_imports)]
    use cudarc::driver::sys::*;
    // SAFETY: called after `present`.
    let library = unsafe { culib() };
    std::any::type_name_of_val(library) == std::any::type_name_of_val(&linked::LINKED)
}

pub(super) type LaunchEx = unsafe extern "C" fn(*const Config, CUfunction, *mut *mut c_void, *mut *mut c_void) -> i32;

/// `CUlaunchConfig`. cudarc has it only where it was built for CUDA 11.8 or later.
#[repr(C)]
pub(super) struct Config {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    pub(super) stream: CUstream,
    pub(super) attributes: *const Attribute,
    pub(super) count: u32,
}

/// `CUlaunchAttribute`: a value has 64 bytes, of which an integer takes the first four.
#[repr(C, align(8))]
pub(super) struct Attribute {
    pub(super) id: u32,
    pub(super) pad: u32,
    pub(super) value: [i32; 16],
}

/// Entry points that driver 535 or cudarc's bindings may lack. They return plain integers.
#[derive(Clone, Copy)]
pub(super) struct Optional {
    /// The driver's CUDA version, as 1000 * major + 10 * minor.
    pub version: c_int,
    /// In every driver, but not in cudarc's bindings for CUDA before 11.8.
    pub launch_ex: Option<LaunchEx>,
    /// 12.4, as the next two.
    pub module_function_count: Option<unsafe extern "C" fn(*mut u32, CUmodule) -> i32>,
    pub module_enumerate: Option<unsafe extern "C" fn(*mut CUfunction, u32, CUmodule) -> i32>,
    pub func_load: Option<unsafe extern "C" fn(CUfunction) -> i32>,
    pub write_value: Option<unsafe extern "C" fn(CUstream, u64, u64, u32) -> i32>,
    pub wait_value: Option<unsafe extern "C" fn(CUstream, u64, u64, u32) -> i32>,
    /// In every driver, but not in cudarc's bindings for CUDA 13.
    pub elapsed: Option<unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> i32>,
    /// Whether all symbols in [`VIRTUAL`] exist. They are called through cudarc.
    pub virtual_memory: bool,
}

impl Optional {
    fn find(version: c_int) -> Self {
        // SAFETY: `ready` has seen the library; the types are those of cuda.h.
        unsafe {
            Optional {
                version,
                launch_ex: symbol("cuLaunchKernelEx"),
                module_function_count: symbol("cuModuleGetFunctionCount"),
                module_enumerate: symbol("cuModuleEnumerateFunctions"),
                func_load: symbol("cuFuncLoad"),
                write_value: symbol("cuStreamWriteValue64_v2"),
                wait_value: symbol("cuStreamWaitValue64_v2"),
                elapsed: symbol("cuEventElapsedTime"),
                virtual_memory: missing(VIRTUAL).is_none(),
            }
        }
    }
}

pub(super) fn no_device(reason: impl Into<String>) -> Error {
    Error::NoDevice { reason: reason.into() }
}

pub(super) fn open_failed(call: &str, code: i32) -> Error {
    let words = match code {
        3 => "the driver is not initialised in this process; CUDA does not survive a fork",
        34 => {
            "libcuda is the stub that comes with the toolkit, for linking; the driver's own library is not found first"
        }
        46 => "the GPU is unavailable: it is broken, or another process holds it exclusively",
        100 => "the CUDA driver is there but sees no GPU (CUDA_VISIBLE_DEVICES may hide them)",
        101 => "there is no GPU of this ordinal",
        802 => "the GPUs are not ready (on NVSwitch machines the fabric manager must run)",
        803 => "libcuda and the kernel module are of different driver versions",
        804 => "libcuda is a forward-compatibility package that does not support this GPU",
        2 => "no memory for a context on the GPU",
        999 => "the driver failed for a reason it does not tell (see dmesg)",
        _ => "the CUDA driver failed",
    };
    no_device(format!("{words}: {call} returned {} ({code})", fault::name(code)))
}

fn too_old(version: c_int) -> Option<String> {
    let dotted = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
    (version < OLDEST_DRIVER).then(|| {
        format!(
            "driver >= 535 needed (CUDA {}); the driver here supports CUDA {} only",
            dotted(OLDEST_DRIVER),
            dotted(version)
        )
    })
}

/// Initialises the driver once, or returns an error that says what is missing. A failure is not remembered.
pub(super) fn ready() -> Result<&'static Optional, Error> {
    static READY: OnceCell<Optional> = OnceCell::new();
    READY.get_or_try_init(|| {
        fail_if!(!present(), no_device("libcuda was not found; it comes with the NVIDIA driver"));
        if let Some(symbol) = missing(ENTRY) {
            return Err(no_device(format!("libcuda was found but has no {symbol}: it is not a CUDA driver")));
        }
        // SAFETY: the symbol is there; no precondition.
        let r = fault::code(unsafe { sys::cuInit(0) });
        fail_if!(r != fault::SUCCESS, open_failed("cuInit", r));
        let mut version = 0;
        // SAFETY: the symbol is there; the pointer is to a live integer.
        let r = fault::code(unsafe { sys::cuDriverGetVersion(&mut version) });
        fail_if!(r != fault::SUCCESS, open_failed("cuDriverGetVersion", r));
        if let Some(words) = too_old(version) {
            return Err(no_device(words));
        }
        if let Some(symbol) = missing(REQUIRED) {
            return Err(no_device(format!("libcuda has no {symbol}: driver >= 535 needed")));
        }
        Ok(Optional::find(version))
    })
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/library_tests.rs"]
mod tests;
