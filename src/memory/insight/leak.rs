//! [`LeakReport`]: the buffers that are still live, by device and call site. A closing pool logs it.

use super::{CallSite, HOW_TO_RECORD, site::Name, units::count};
use crate::memory::Bytes;
use std::fmt;

/// Live buffers of one call site on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leak {
    /// The device's ordinal in the pool.
    pub device: usize,
    /// The call that asked for them. None without recording, or for buffers that are older than the recording.
    pub site: Option<CallSite>,
    /// Number of buffers.
    pub blocks: usize,
    /// Bytes, rounded up to size classes.
    pub bytes: u64,
}

/// Buffers that are still live, by device and call site, from [`GpuPool::leaks`](crate::GpuPool::leaks). A buffer may
/// outlive its pool, so a listed buffer need not be a leak. The `Display` form is meant for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakReport {
    /// By device, the most bytes first.
    pub leaks: Vec<Leak>,
}

impl LeakReport {
    /// Whether nothing is live.
    pub fn is_empty(&self) -> bool {
        self.leaks.is_empty()
    }

    /// Bytes of all leaks on all devices: the sum of [`Leak::bytes`], which are rounded up to size classes.
    pub fn bytes(&self) -> u64 {
        self.leaks.iter().map(|leak| leak.bytes).sum()
    }
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("no buffer is live");
        }
        let blocks = self.leaks.iter().map(|leak| leak.blocks).sum();
        write!(f, "{} in {} still live", Bytes(self.bytes()), count(blocks, "buffer"))?;
        for Leak { device, site, blocks, bytes } in &self.leaks {
            let (bytes, blocks) = (Bytes(*bytes), count(*blocks, "buffer"));
            write!(f, "\n  device {device}: {bytes:>10} in {blocks:<12} {}", Name(site.as_ref()))?;
        }
        if self.leaks.iter().all(|leak| leak.site.is_none()) {
            write!(f, "\n  call sites are recorded with {HOW_TO_RECORD}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/insight/leak_tests.rs"]
mod tests;
