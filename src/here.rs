//! The device of the calling thread, if it is a device thread.

use std::cell::Cell;

thread_local! {
    static DEVICE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// By the device's ordinal in its pool, for the thread's whole life.
pub(crate) fn enter_device_thread(device: usize) {
    DEVICE.set(Some(device));
}

/// The device of the calling thread, of any pool. `None` in a thread that is ending and drops its thread-locals.
pub fn device() -> Option<usize> {
    DEVICE.try_with(Cell::get).ok().flatten()
}
