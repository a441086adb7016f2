//! The driver's error codes: their names, and the [`FaultKind`] of each.
//!
//! Names come from this table: formatting a `DriverError` calls `cuGetErrorString`, which panics without libcuda.
//!
//! `CUresult` is a Rust enum that a C function returns: a code unknown to the bindings is undefined behaviour. So
//! the table lists every code of the newest bindings, and the symbols that `library.rs` loads return plain integers.

use cudarc::driver::sys::CUresult;

pub(super) use crate::driver::fault::{invalid, unsupported};
use crate::driver::{self, Fault, FaultKind};

pub(super) const SUCCESS: i32 = 0;
/// `CUDA_ERROR_NOT_READY`: a query's answer "not complete".
pub(super) const NOT_READY: i32 = 600;
pub(super) const PEER_ALREADY_ENABLED: i32 = 704;

macro_rules! codes {
    ($($kind:ident: $($code:literal $name:ident),+;)+) => {
        /// The kind of a code that the table lacks is `Other`.
        fn entry(code: i32) -> (&'static str, FaultKind) {
            match code {
                $($($code => (concat!("CUDA_ERROR_", stringify!($name)), FaultKind::$kind),)+)+
                _ => ("an unknown CUDA error", FaultKind::Other),
            }
        }
        #[cfg(test)]
        const CODES: &[i32] = &[$($($code),+),+];
    };
}

// `DeviceLost` is for codes after which, by NVIDIA's documentation, "any further CUDA work will return the same error"
// or the context is destroyed or unusable. 46 is the answer of a broken device or one in exclusive use; 4 comes while
// the process exits. 708 and 704 answer calls that come too late or twice: nothing is lost.
codes! {
    InvalidArgument:
        1 INVALID_VALUE, 200 INVALID_IMAGE, 218 INVALID_PTX, 300 INVALID_SOURCE, 400 INVALID_HANDLE,
        701 LAUNCH_OUT_OF_RESOURCES, 703 LAUNCH_INCOMPATIBLE_TEXTURING, 712 HOST_MEMORY_ALREADY_REGISTERED,
        713 HOST_MEMORY_NOT_REGISTERED, 720 COOPERATIVE_LAUNCH_TOO_LARGE, 912 INVALID_CLUSTER_SIZE,
        914 INVALID_RESOURCE_TYPE, 915 INVALID_RESOURCE_CONFIGURATION;
    OutOfMemory:
        2 OUT_OF_MEMORY;
    Other:
        3 NOT_INITIALIZED, 5 PROFILER_DISABLED, 6 PROFILER_NOT_INITIALIZED, 7 PROFILER_ALREADY_STARTED,
        8 PROFILER_ALREADY_STOPPED, 201 INVALID_CONTEXT, 202 CONTEXT_ALREADY_CURRENT, 205 MAP_FAILED, 206 UNMAP_FAILED,
        207 ARRAY_IS_MAPPED, 208 ALREADY_MAPPED, 210 ALREADY_ACQUIRED, 211 NOT_MAPPED, 212 NOT_MAPPED_AS_ARRAY,
        213 NOT_MAPPED_AS_POINTER, 216 CONTEXT_ALREADY_IN_USE, 219 INVALID_GRAPHICS_CONTEXT,
        303 SHARED_OBJECT_INIT_FAILED, 304 OPERATING_SYSTEM, 401 ILLEGAL_STATE, 402 LOSSY_QUERY, 600 NOT_READY,
        704 PEER_ACCESS_ALREADY_ENABLED, 708 PRIMARY_CONTEXT_ACTIVE, 800 NOT_PERMITTED, 802 SYSTEM_NOT_READY,
        805 MPS_CONNECTION_FAILED, 806 MPS_RPC_FAILURE, 807 MPS_SERVER_NOT_READY, 808 MPS_MAX_CLIENTS_REACHED,
        809 MPS_MAX_CONNECTIONS_REACHED, 900 STREAM_CAPTURE_UNSUPPORTED, 901 STREAM_CAPTURE_INVALIDATED,
        902 STREAM_CAPTURE_MERGE, 903 STREAM_CAPTURE_UNMATCHED, 904 STREAM_CAPTURE_UNJOINED,
        905 STREAM_CAPTURE_ISOLATION, 906 STREAM_CAPTURE_IMPLICIT, 907 CAPTURED_EVENT, 908 STREAM_CAPTURE_WRONG_THREAD,
        909 TIMEOUT, 910 GRAPH_EXEC_UPDATE_FAILURE, 913 FUNCTION_NOT_LOADED, 916 KEY_ROTATION, 917 STREAM_DETACHED,
        918 GRAPH_RECAPTURE_FAILURE, 919 FABRIC_NOT_READY, 999 UNKNOWN;
    DeviceLost:
        4 DEINITIALIZED, 46 DEVICE_UNAVAILABLE, 214 ECC_UNCORRECTABLE, 220 NVLINK_UNCORRECTABLE, 226 CONTAINED,
        700 ILLEGAL_ADDRESS, 702 LAUNCH_TIMEOUT, 709 CONTEXT_IS_DESTROYED, 710 ASSERT, 714 HARDWARE_STACK_ERROR,
        715 ILLEGAL_INSTRUCTION, 716 MISALIGNED_ADDRESS, 717 INVALID_ADDRESS_SPACE, 718 INVALID_PC, 719 LAUNCH_FAILED,
        721 TENSOR_MEMORY_LEAK, 810 MPS_CLIENT_TERMINATED, 911 EXTERNAL_DEVICE;
    Unsupported:
        34 STUB_LIBRARY, 102 DEVICE_NOT_LICENSED, 215 UNSUPPORTED_LIMIT, 221 JIT_COMPILER_NOT_FOUND,
        222 UNSUPPORTED_PTX_VERSION, 223 JIT_COMPILATION_DISABLED, 224 UNSUPPORTED_EXEC_AFFINITY,
        225 UNSUPPORTED_DEVSIDE_SYNC, 801 NOT_SUPPORTED, 803 SYSTEM_DRIVER_MISMATCH, 804 COMPAT_NOT_SUPPORTED_ON_DEVICE,
        811 CDP_NOT_SUPPORTED, 812 CDP_VERSION_MISMATCH;
    NotFound:
        100 NO_DEVICE, 101 INVALID_DEVICE, 209 NO_BINARY_FOR_GPU, 301 FILE_NOT_FOUND,
        302 SHARED_OBJECT_SYMBOL_NOT_FOUND, 500 NOT_FOUND;
    PeerDenied:
        217 PEER_ACCESS_UNSUPPORTED, 705 PEER_ACCESS_NOT_ENABLED, 711 TOO_MANY_PEERS;
}

pub(super) fn code(result: CUresult) -> i32 {
    result as u32 as i32
}

pub(super) fn name(code: i32) -> &'static str {
    entry(code).0
}

pub(super) fn fault(code: i32, detail: impl Into<String>) -> Fault {
    let (name, kind) = entry(code);
    driver::fault::fault(kind, code, name, detail)
}

pub(super) fn text(log: &[u8]) -> String {
    let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim().to_owned()
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/fault_tests.rs"]
mod tests;
