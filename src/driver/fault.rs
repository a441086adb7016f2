//! Faults that this crate makes itself, with CUDA's codes and names.

use super::{Fault, FaultKind};
use crate::error::misuse::Report;
use std::sync::Arc;

pub(crate) fn fault(kind: FaultKind, code: i32, name: impl Into<String>, detail: impl Into<String>) -> Fault {
    Fault { kind, code, name: name.into(), detail: detail.into(), report: None }
}

/// Constructors of faults that have a detail: `name => kind, code, CUDA's name;`.
macro_rules! faults {
    ($($constructor:ident => $kind:ident, $code:literal, $name:literal;)*) => {
        $(pub(crate) fn $constructor(detail: impl Into<String>) -> Fault {
            fault(FaultKind::$kind, $code, $name, detail)
        })*
    };
}

faults! {
    invalid => InvalidArgument, 1, "CUDA_ERROR_INVALID_VALUE";
    no_memory => OutOfMemory, 2, "CUDA_ERROR_OUT_OF_MEMORY";
    peer_not_enabled => PeerDenied, 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
    peer_unsupported => PeerDenied, 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
    not_found => NotFound, 500, "CUDA_ERROR_NOT_FOUND";
    unsupported => Unsupported, 801, "CUDA_ERROR_NOT_SUPPORTED";
    not_ready => Other, 600, "CUDA_ERROR_NOT_READY";
    exhausted => Other, 304, "CUDA_ERROR_OPERATING_SYSTEM";
    illegal_address => DeviceLost, 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    launch_failed => DeviceLost, 719, "CUDA_ERROR_LAUNCH_FAILED";
}

pub(crate) fn invalid_handle(what: &str) -> Fault {
    fault(FaultKind::InvalidArgument, 400, "CUDA_ERROR_INVALID_HANDLE", format!("no such {what} on this device"))
}

pub(crate) fn out_of_memory(asked: u64, free: u64) -> Fault {
    no_memory(format!("{asked} bytes asked for, {free} free"))
}

pub(crate) fn misuse(report: Report) -> Fault {
    let detail = report.to_string();
    Fault { report: Some(Arc::new(report)), ..fault(FaultKind::Misuse, 0, "GPU_POOL_MISUSE", detail) }
}

pub(crate) fn deadlock(report: &str) -> Fault {
    fault(FaultKind::Deadlock, 0, "GPU_POOL_DEADLOCK", report)
}
