//! Counters that show whether a device gets on. Waits read them: a deadline means that nothing has moved.

use crate::sync::Sequence;

/// The progress of one device.
///
/// On cache lines of its own: the device's thread writes to it at every operation.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// Operations begun on the device, and looks that have found that operations have completed there.
    own: Sequence,
    /// Progress of other devices, passed on by a device that waits for them.
    relayed: Sequence,
}

impl Progress {
    /// Notes that the device has got further.
    pub fn advance(&self) {
        self.own.fetch_advance();
    }

    /// Notes that a device for which this one waits has got further.
    pub fn relay(&self) {
        self.relayed.fetch_advance();
    }

    /// Grows while the device itself gets on.
    pub fn own(&self) -> u64 {
        self.own.get()
    }

    /// Grows while the device gets on, or a device for which it waits.
    pub fn any(&self) -> u64 {
        self.own.get() + self.relayed.get()
    }
}
