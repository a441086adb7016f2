//! Calls that errors list.

use super::Site;

/// A call that a device's thread has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCall {
    /// Ordinal in the pool.
    pub device: usize,
    /// The operation; "scope begin" if the device has made no call in its scope yet.
    pub op: &'static str,
    /// Where in the caller's code.
    pub site: Site,
}

display_as!(DeviceCall, |self, f| {
    let DeviceCall { device, op, site } = self;
    write!(f, "device {device}: {op} at {site}")
});

/// A call of another process, or of this one, in [`Error::WorldMismatch`](super::Error::WorldMismatch).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldCall {
    /// The number of the process in the cluster.
    pub host: usize,
    /// The ordinal of the device in that process's pool.
    pub device: usize,
    /// The call, with its arguments.
    pub call: String,
    /// File, line and column in that process's program.
    pub site: String,
}

display_as!(WorldCall, |self, f| {
    let WorldCall { host, device, call, site } = self;
    write!(f, "device {device} of host {host} called {call} at {site}")
});

pub(crate) fn listed(calls: &[DeviceCall]) -> String {
    calls.iter().map(DeviceCall::to_string).collect::<Vec<_>>().join(", ")
}

pub(super) fn also_calls(calls: &[DeviceCall]) -> String {
    if calls.is_empty() { String::new() } else { format!("; last calls: {}", listed(calls)) }
}
