//! A reference count of handles, stored inside the memory that they share.
//!
//! The last handle sends the value back to its owner (see [`Returns`](super::Returns)). There are no weak references,
//! so a thread that reads a count of one has the only handle, and no other can appear. So the drop of a buffer that was
//! never shared costs a load and a store, and no locked instruction, as in [folly's
//! `IOBuf::decrementRefcount`](https://github.com/facebook/folly/blob/main/folly/io/IOBuf.cpp). (`Arc::drop` cannot do
//! that: a `Weak` may be upgraded in between.)

use super::{
    shim::atomic::{AtomicU32, Ordering::*},
    site::{fence_at, flag, ord},
};

/// As with `Arc`, more are a leak in a loop, and the process is aborted. The distance to the true limit covers threads
/// that have added but not yet checked.
const MOST: u32 = u32::MAX / 2;

/// Counts handles. `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct RefCount(AtomicU32);

impl RefCount {
    pub fn new() -> Self {
        RefCount(AtomicU32::new(1))
    }

    /// Adds one handle. Only the holder of a handle may call it. Aborts the process at 2^31 handles.
    #[inline]
    pub fn acquire(&self) {
        // Relaxed: the new handle is made from an old one; the way to another thread has the stronger ordering.
        let before = self.0.fetch_add(1, Relaxed);
        debug_assert_ne!(before, 0, "a handle was made from none");
        if before > MOST {
            std::process::abort();
        }
    }

    /// Removes one handle. True for exactly one call, the last. Then everything done through other handles is visible.
    #[inline]
    pub fn release(&self) -> bool {
        // The only handle: the load acquires the release of all others, and no handle is left to make a new one from.
        if self.0.load(ord("refs.release.alone", Acquire)) == 1 {
            self.0.store(0, Relaxed);
            return true;
        }
        self.release_shared()
    }

    fn release_shared(&self) -> bool {
        if flag("refs.release.load_then_store") {
            let before = self.0.load(ord("refs.release.alone", Acquire));
            self.0.store(before - 1, ord("refs.release", Release));
            return before == 1;
        }
        let before = self.0.fetch_sub(1, ord("refs.release", Release));
        debug_assert_ne!(before, 0, "released more often than acquired");
        if before == 1 {
            fence_at("refs.release.fence", Acquire);
        }
        before == 1
    }

    /// Sets the count to one handle again, for a value that was returned and is used again.
    #[inline]
    pub fn reset(&mut self) {
        *self = Self::new();
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/sync/refs_tests.rs"]
mod tests;
