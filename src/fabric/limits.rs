//! Limits on the devices for the kernels of one call.
//!
//! The sizes and numbers of blocks that were best on H200s are constants of the algorithms, which ask [`Limits`] how
//! many blocks there may be. Invariant: **no measured number decides over bits.** An LL kernel and a kernel with
//! barriers add up in one order.

#[cfg(test)]
#[path = "../../tests/unit/fabric/limits/tests.rs"]
mod tests;
pub(crate) mod traffic;

use super::BLOCKS;
use crate::memory::DeviceHandle;
use std::sync::Arc;

/// Most blocks of a kernel that overlaps with other work.
const OVERLAPPED: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Blocks that are on the smallest device at once. All blocks of a kernel that waits for its peers' must be, and
    /// one multiprocessor has room for at least one of them.
    resident: u32,
    /// The call overlaps with other work. Copy engines may be slower, but leave the multiprocessors to that work.
    pub overlapped: bool,
}

impl Limits {
    pub(crate) fn new(multiprocessors: u32) -> Limits {
        Limits { resident: multiprocessors.clamp(1, BLOCKS), overlapped: false }
    }

    pub(crate) fn overlapping(self) -> Limits {
        Limits { overlapped: true, ..self }
    }

    pub(crate) fn blocks(self, most: u32) -> u32 {
        self.of_one_trip(if self.overlapped { most.min(OVERLAPPED) } else { most })
    }

    /// As [`blocks`](Self::blocks), for two kinds that keep theirs beside other work: kernels of one trip, which are
    /// over in microseconds, and kernels that go through the host's memory, whose delays few blocks do not cover.
    pub(crate) fn of_one_trip(self, most: u32) -> u32 {
        most.clamp(1, self.resident)
    }
}

/// Multiprocessors of the smallest device. Devices that share a GPU have its multiprocessors in equal parts: then
/// kernels of all of them fit on the GPU at once, one block on a multiprocessor. A software GPU counts as large, since
/// its kernels wait for no others.
pub(crate) fn multiprocessors(handles: &[Arc<DeviceHandle>]) -> u32 {
    let hardware = handles.iter().filter(|handle| handle.driver.info().compute_capability != (0, 0));
    part(hardware.map(|handle| (handle.driver.info().multiprocessors, handle.sharers)))
}

fn part(devices: impl Iterator<Item = (u32, usize)>) -> u32 {
    devices.map(|(multiprocessors, sharers)| multiprocessors / sharers as u32).min().unwrap_or(u32::MAX)
}
