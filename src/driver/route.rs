//! How bytes go between two devices.

use std::time::Duration;

/// How one device reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// Over the link between the devices. Copy engines and kernels access the peer's memory.
    Direct,
    /// Through two page-locked host buffers. Kernels cannot access the peer's memory.
    Staged,
}

/// The probe's result for one ordered pair of devices when the pool was built.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeerReport {
    /// The device that accesses memory.
    pub from: usize,
    /// The owner of the memory.
    pub to: usize,
    /// Whether the hardware claims to support peer access.
    pub claimed: bool,
    /// Whether the probe found correct data by loads, by stores and by copy engines.
    pub verified: bool,
    /// How the pool copies between the two devices.
    pub route: Route,
    /// Time of a small copy by the copy engine, if it was measured.
    pub latency: Option<Duration>,
    /// Bandwidth of a larger copy in GB/s, if it was measured.
    pub gigabytes_per_second: Option<f64>,
    /// Why the route is not direct. Empty if it is.
    pub note: String,
}
