//! Faults of a backing.

use crate::driver::{Fault, FaultKind};

pub(super) fn fault(kind: FaultKind, code: i32, name: &str, detail: String) -> Fault {
    Fault { kind, code, name: name.to_owned(), detail, report: None }
}

pub(super) fn invalid(detail: String) -> Fault {
    fault(FaultKind::InvalidArgument, 1, "CUDA_ERROR_INVALID_VALUE", detail)
}

pub(super) fn out_of_memory(detail: String) -> Fault {
    fault(FaultKind::OutOfMemory, 2, "CUDA_ERROR_OUT_OF_MEMORY", detail)
}

pub(super) fn unsupported(detail: &str) -> Fault {
    fault(FaultKind::Unsupported, 801, "CUDA_ERROR_NOT_SUPPORTED", detail.to_owned())
}
