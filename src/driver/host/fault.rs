//! Faults with CUDA's codes and names.

use crate::driver::{Fault, FaultKind, check::Report};
use std::sync::Arc;

fn fault(kind: FaultKind, code: i32, name: &str, detail: impl Into<String>) -> Fault {
    Fault { kind, code, name: name.into(), detail: detail.into(), report: None }
}

pub(super) fn invalid(detail: impl Into<String>) -> Fault {
    fault(FaultKind::InvalidArgument, 1, "CUDA_ERROR_INVALID_VALUE", detail)
}

pub(super) fn invalid_handle(what: &str) -> Fault {
    fault(FaultKind::InvalidArgument, 400, "CUDA_ERROR_INVALID_HANDLE", format!("no such {what} on this device"))
}

pub(super) fn out_of_memory(asked: u64, free: u64) -> Fault {
    fault(FaultKind::OutOfMemory, 2, "CUDA_ERROR_OUT_OF_MEMORY", format!("{asked} bytes asked for, {free} free"))
}

pub(super) fn peer_not_enabled(detail: impl Into<String>) -> Fault {
    fault(FaultKind::PeerDenied, 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", detail)
}

pub(super) fn peer_unsupported(detail: impl Into<String>) -> Fault {
    fault(FaultKind::PeerDenied, 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", detail)
}

pub(super) fn not_found(detail: impl Into<String>) -> Fault {
    fault(FaultKind::NotFound, 500, "CUDA_ERROR_NOT_FOUND", detail)
}

pub(super) fn unsupported(detail: impl Into<String>) -> Fault {
    fault(FaultKind::Unsupported, 801, "CUDA_ERROR_NOT_SUPPORTED", detail)
}

pub(super) fn not_ready(detail: impl Into<String>) -> Fault {
    fault(FaultKind::Other, 600, "CUDA_ERROR_NOT_READY", detail)
}

pub(super) fn exhausted(detail: impl Into<String>) -> Fault {
    fault(FaultKind::Other, 304, "CUDA_ERROR_OPERATING_SYSTEM", detail)
}

pub(super) fn illegal_address(detail: impl Into<String>) -> Fault {
    fault(FaultKind::DeviceLost, 700, "CUDA_ERROR_ILLEGAL_ADDRESS", detail)
}

pub(super) fn launch_failed(detail: impl Into<String>) -> Fault {
    fault(FaultKind::DeviceLost, 719, "CUDA_ERROR_LAUNCH_FAILED", detail)
}

/// The fault of a kernel that wrote to a read-only argument; see [`watch`](super::watch).
pub(super) fn misuse(report: Report) -> Fault {
    let detail = report.to_string();
    Fault { report: Some(Arc::new(report)), ..fault(FaultKind::Misuse, 0, "GPU_POOL_MISUSE", detail) }
}

pub(super) fn deadlock(report: &str) -> Fault {
    fault(FaultKind::Deadlock, 0, "GPU_POOL_DEADLOCK", report)
}
