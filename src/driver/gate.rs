//! The process's launch gate: kernels that spin for each other, and driver calls that wait for running kernels, exclude
//! each other ([`LaunchGate`], DESIGN.md rule 12).

use crate::sync::LaunchGate;

/// The one gate. It knows nothing of pools: the driver's locks are the process's.
#[cfg(not(loom))]
pub(crate) fn launches() -> &'static LaunchGate {
    static GATE: LaunchGate = LaunchGate::new();
    &GATE
}

/// No model launches anything.
#[cfg(loom)]
pub(crate) fn launches() -> &'static LaunchGate {
    unreachable!("a model of the gate has one of its own")
}

/// Until the guard goes, the calling thread may be in a driver call that waits for kernels.
#[cfg(feature = "cuda")]
pub(crate) fn blocking() -> crate::sync::Blocking<'static> {
    launches().block()
}
