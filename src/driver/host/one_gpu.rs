//! Software GPUs with one common UUID, for tests of code that identifies the physical GPU.

use crate::sync::unique_id;
use std::cell::Cell;

thread_local! {
    static UUID: Cell<Option<[u8; 16]>> = const { Cell::new(None) };
}

pub(super) fn here() -> Option<[u8; 16]> {
    UUID.get()
}

/// All software GPUs that `build` makes get one UUID.
pub fn on_one_gpu<R>(build: impl FnOnce() -> R) -> R {
    let mut uuid = *b"shared\0\0\0\0\0\0\0\0\0\0";
    uuid[8..].copy_from_slice(&unique_id().to_be_bytes());
    UUID.set(Some(uuid));
    let built = build();
    UUID.set(None);
    built
}
