//! The driver's error codes: their names, and the [`FaultKind`] of each.
//!
//! The names come from this table and never from the library: formatting cudarc's `DriverError` calls
//! `cuGetErrorString`, which panics without libcuda.
//!
//! One hazard of cudarc remains: `CUresult` is a Rust enum that a C function returns, so a code that its bindings do
//! not know is undefined behaviour. The table below therefore lists every code of the newest bindings, and the symbols
//! that this crate loads itself (`library.rs`) return plain integers.

use cudarc::driver::sys::CUresult;

use crate::driver::{Fault, FaultKind};

/// `CUDA_SUCCESS`.
pub(super) const SUCCESS: i32 = 0;
/// `CUDA_ERROR_NOT_READY`: a query's answer "not complete".
pub(super) const NOT_READY: i32 = 600;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub(super) const PEER_ALREADY_ENABLED: i32 = 704;

macro_rules! codes {
    ($($code:literal $name:ident $kind:ident),+ $(,)?) => {
        /// Name and kind of a code. The kind of a code that the table lacks is `Other`.
        fn entry(code: i32) -> (&'static str, FaultKind) {
            match code {
                $($code => (stringify!($name), FaultKind::$kind),)+
                _ => ("an unknown CUDA error", FaultKind::Other),
            }
        }
        #[cfg(test)]
        const CODES: &[i32] = &[$($code),+];
    };
}

// `DeviceLost` is for codes after which, by NVIDIA's documentation, "any further CUDA work will return the same error"
// or the context is destroyed. 46 is the answer of a broken device or one in exclusive use; 4 comes while the process
// exits. 702 makes the context unusable, too. 708 and 704 answer calls that come too late or twice: nothing is lost.
codes! {
    1 CUDA_ERROR_INVALID_VALUE InvalidArgument,
    2 CUDA_ERROR_OUT_OF_MEMORY OutOfMemory,
    3 CUDA_ERROR_NOT_INITIALIZED Other,
    4 CUDA_ERROR_DEINITIALIZED DeviceLost,
    5 CUDA_ERROR_PROFILER_DISABLED Other,
    6 CUDA_ERROR_PROFILER_NOT_INITIALIZED Other,
    7 CUDA_ERROR_PROFILER_ALREADY_STARTED Other,
    8 CUDA_ERROR_PROFILER_ALREADY_STOPPED Other,
    34 CUDA_ERROR_STUB_LIBRARY Unsupported,
    46 CUDA_ERROR_DEVICE_UNAVAILABLE DeviceLost,
    100 CUDA_ERROR_NO_DEVICE NotFound,
    101 CUDA_ERROR_INVALID_DEVICE NotFound,
    102 CUDA_ERROR_DEVICE_NOT_LICENSED Unsupported,
    200 CUDA_ERROR_INVALID_IMAGE InvalidArgument,
    201 CUDA_ERROR_INVALID_CONTEXT Other,
    202 CUDA_ERROR_CONTEXT_ALREADY_CURRENT Other,
    205 CUDA_ERROR_MAP_FAILED Other,
    206 CUDA_ERROR_UNMAP_FAILED Other,
    207 CUDA_ERROR_ARRAY_IS_MAPPED Other,
    208 CUDA_ERROR_ALREADY_MAPPED Other,
    209 CUDA_ERROR_NO_BINARY_FOR_GPU NotFound,
    210 CUDA_ERROR_ALREADY_ACQUIRED Other,
    211 CUDA_ERROR_NOT_MAPPED Other,
    212 CUDA_ERROR_NOT_MAPPED_AS_ARRAY Other,
    213 CUDA_ERROR_NOT_MAPPED_AS_POINTER Other,
    214 CUDA_ERROR_ECC_UNCORRECTABLE DeviceLost,
    215 CUDA_ERROR_UNSUPPORTED_LIMIT Unsupported,
    216 CUDA_ERROR_CONTEXT_ALREADY_IN_USE Other,
    217 CUDA_ERROR_PEER_ACCESS_UNSUPPORTED PeerDenied,
    218 CUDA_ERROR_INVALID_PTX InvalidArgument,
    219 CUDA_ERROR_INVALID_GRAPHICS_CONTEXT Other,
    220 CUDA_ERROR_NVLINK_UNCORRECTABLE DeviceLost,
    221 CUDA_ERROR_JIT_COMPILER_NOT_FOUND Unsupported,
    222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION Unsupported,
    223 CUDA_ERROR_JIT_COMPILATION_DISABLED Unsupported,
    224 CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY Unsupported,
    225 CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC Unsupported,
    226 CUDA_ERROR_CONTAINED DeviceLost,
    300 CUDA_ERROR_INVALID_SOURCE InvalidArgument,
    301 CUDA_ERROR_FILE_NOT_FOUND NotFound,
    302 CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND NotFound,
    303 CUDA_ERROR_SHARED_OBJECT_INIT_FAILED Other,
    304 CUDA_ERROR_OPERATING_SYSTEM Other,
    400 CUDA_ERROR_INVALID_HANDLE InvalidArgument,
    401 CUDA_ERROR_ILLEGAL_STATE Other,
    402 CUDA_ERROR_LOSSY_QUERY Other,
    500 CUDA_ERROR_NOT_FOUND NotFound,
    600 CUDA_ERROR_NOT_READY Other,
    700 CUDA_ERROR_ILLEGAL_ADDRESS DeviceLost,
    701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES InvalidArgument,
    702 CUDA_ERROR_LAUNCH_TIMEOUT DeviceLost,
    703 CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING InvalidArgument,
    704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED Other,
    705 CUDA_ERROR_PEER_ACCESS_NOT_ENABLED PeerDenied,
    708 CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE Other,
    709 CUDA_ERROR_CONTEXT_IS_DESTROYED DeviceLost,
    710 CUDA_ERROR_ASSERT DeviceLost,
    711 CUDA_ERROR_TOO_MANY_PEERS PeerDenied,
    712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED InvalidArgument,
    713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED InvalidArgument,
    714 CUDA_ERROR_HARDWARE_STACK_ERROR DeviceLost,
    715 CUDA_ERROR_ILLEGAL_INSTRUCTION DeviceLost,
    716 CUDA_ERROR_MISALIGNED_ADDRESS DeviceLost,
    717 CUDA_ERROR_INVALID_ADDRESS_SPACE DeviceLost,
    718 CUDA_ERROR_INVALID_PC DeviceLost,
    719 CUDA_ERROR_LAUNCH_FAILED DeviceLost,
    720 CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE InvalidArgument,
    721 CUDA_ERROR_TENSOR_MEMORY_LEAK DeviceLost,
    800 CUDA_ERROR_NOT_PERMITTED Other,
    801 CUDA_ERROR_NOT_SUPPORTED Unsupported,
    802 CUDA_ERROR_SYSTEM_NOT_READY Other,
    803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH Unsupported,
    804 CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE Unsupported,
    805 CUDA_ERROR_MPS_CONNECTION_FAILED Other,
    806 CUDA_ERROR_MPS_RPC_FAILURE Other,
    807 CUDA_ERROR_MPS_SERVER_NOT_READY Other,
    808 CUDA_ERROR_MPS_MAX_CLIENTS_REACHED Other,
    809 CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED Other,
    810 CUDA_ERROR_MPS_CLIENT_TERMINATED DeviceLost,
    811 CUDA_ERROR_CDP_NOT_SUPPORTED Unsupported,
    812 CUDA_ERROR_CDP_VERSION_MISMATCH Unsupported,
    900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED Other,
    901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED Other,
    902 CUDA_ERROR_STREAM_CAPTURE_MERGE Other,
    903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED Other,
    904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED Other,
    905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION Other,
    906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT Other,
    907 CUDA_ERROR_CAPTURED_EVENT Other,
    908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD Other,
    909 CUDA_ERROR_TIMEOUT Other,
    910 CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE Other,
    911 CUDA_ERROR_EXTERNAL_DEVICE DeviceLost,
    912 CUDA_ERROR_INVALID_CLUSTER_SIZE InvalidArgument,
    913 CUDA_ERROR_FUNCTION_NOT_LOADED Other,
    914 CUDA_ERROR_INVALID_RESOURCE_TYPE InvalidArgument,
    915 CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION InvalidArgument,
    916 CUDA_ERROR_KEY_ROTATION Other,
    917 CUDA_ERROR_STREAM_DETACHED Other,
    918 CUDA_ERROR_GRAPH_RECAPTURE_FAILURE Other,
    919 CUDA_ERROR_FABRIC_NOT_READY Other,
    999 CUDA_ERROR_UNKNOWN Other,
}

pub(super) fn code(result: CUresult) -> i32 {
    result as u32 as i32
}

pub(super) fn name(code: i32) -> &'static str {
    entry(code).0
}

/// The fault of a code, with a detail (which may be empty).
pub(super) fn fault(code: i32, detail: impl Into<String>) -> Fault {
    let (name, kind) = entry(code);
    Fault { kind, code, name: name.to_owned(), detail: detail.into(), report: None }
}

/// `CUDA_ERROR_INVALID_VALUE` from a check of this crate, before any driver call.
pub(super) fn invalid(detail: impl Into<String>) -> Fault {
    fault(1, detail)
}

/// `CUDA_ERROR_NOT_SUPPORTED` from a check of this crate, before any driver call.
pub(super) fn unsupported(detail: impl Into<String>) -> Fault {
    fault(801, detail)
}

/// The text of a log buffer, up to its NUL.
pub(super) fn text(log: &[u8]) -> String {
    let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim().to_owned()
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/fault_tests.rs"]
mod tests;
