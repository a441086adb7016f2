//! The launch gate of the process: launches of kernels that wait for each other, and driver calls that wait for running
//! kernels, exclude each other ([`LaunchGate`], rule 12 of `docs/src/design/rules.md`).

use crate::sync::LaunchGate;

/// All pools share it, because the driver's locks belong to the process.
#[cfg(not(loom))]
pub(crate) fn launches() -> &'static LaunchGate {
    static GATE: LaunchGate = LaunchGate::new();
    &GATE
}

/// A loom model launches nothing.
#[cfg(loom)]
pub(crate) fn launches() -> &'static LaunchGate {
    unreachable!("a model of the gate has one of its own")
}

/// Until the guard is dropped, the calling thread may make driver calls that wait for kernels.
#[cfg(feature = "cuda")]
pub fn blocking() -> crate::sync::Blocking<'static> {
    launches().block()
}
