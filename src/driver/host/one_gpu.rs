//! Software GPUs that pass for several devices on one GPU, for tests of what goes by a GPU's identity.

use crate::sync::unique_id;
use std::cell::Cell;

thread_local! {
    static UUID: Cell<Option<[u8; 16]>> = const { Cell::new(None) };
}

pub(super) fn here() -> Option<[u8; 16]> {
    UUID.get()
}

/// The software GPUs that `build` makes have one UUID.
pub(crate) fn on_one_gpu<R>(build: impl FnOnce() -> R) -> R {
    let mut uuid = *b"shared\0\0\0\0\0\0\0\0\0\0";
    uuid[8..].copy_from_slice(&unique_id().to_be_bytes());
    UUID.set(Some(uuid));
    let built = build();
    UUID.set(None);
    built
}
