//! Whose thread this is.

use std::cell::Cell;

thread_local! {
    static DEVICE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// From now on the calling thread is the thread of this device, by its ordinal in its pool: a device thread belongs to
/// one device for its whole life.
pub(crate) fn enter_device_thread(device: usize) {
    DEVICE.set(Some(device));
}

/// The device whose thread this is, of any pool. A thread that ends, and drops its other thread-locals, is nobody's any
/// more.
pub(crate) fn device() -> Option<usize> {
    DEVICE.try_with(Cell::get).ok().flatten()
}
