//! Counters that show whether a device makes progress: a deadline expires only when no counter has moved. The device's
//! thread advances them, and so do threads that poll its streams.

use crate::sync::Sequence;

/// On cache lines of its own, because the device's thread writes it at every operation.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// Counts operations begun on the device, and polls that found completed operations.
    own: Sequence,
    /// Counts progress of other devices that this device waits for.
    relayed: Sequence,
}

impl Progress {
    pub fn advance(&self) {
        self.own.fetch_advance();
    }

    pub fn relay(&self) {
        self.relayed.fetch_advance();
    }

    pub fn own(&self) -> u64 {
        self.own.get()
    }

    pub fn any(&self) -> u64 {
        self.own.get() + self.relayed.get()
    }
}
