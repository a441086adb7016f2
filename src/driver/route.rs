//! Which way bytes go between two devices.

use std::time::Duration;

/// How one device reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// Over the link between them: copies by the copy engines, and kernels that name the peer's memory.
    Direct,
    /// Through two page-locked host buffers. Kernels cannot name the peer's memory.
    Staged,
}

/// What was found out about one ordered pair of devices when the pool was built.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// The device that reaches out.
    pub from: usize,
    /// The owner of the memory.
    pub to: usize,
    /// Whether the hardware claims that it works.
    pub claimed: bool,
    /// Whether the probe found the data right by load, by store and by copy engine.
    pub verified: bool,
    /// How the pool goes about it.
    pub route: Route,
    /// Time of a small copy by the copy engine, where it was measured.
    pub latency: Option<Duration>,
    /// Bandwidth of a larger copy in GB/s, where it was measured.
    pub gigabytes_per_second: Option<f64>,
    /// Why the route is not direct, in words; empty if it is.
    pub note: String,
}
