//! A count-down latch in memory that may be freed right after the last count.
//!
//! The waiter leaves the stack frame with the latch when the count is zero. So the last setter must not touch the latch
//! after its decrement, not even to wake the waiter: [`CountLatch::set`] takes a raw pointer, because a reference would
//! assert that the latch lives to the end of the call, and clones the waker *before* the last decrement ([rayon's
//! rule](https://github.com/rayon-rs/rayon/blob/main/rayon-core/src/latch.rs), "WARNING"). Earlier ones clone nothing.

use super::EventCount;
use super::shim::{
    Arc, Tombstone,
    atomic::{AtomicUsize, Ordering::*},
};
use super::site::{flag, ord};
use std::time::Duration;

/// Counts from `count` to zero. `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct CountLatch {
    remaining: AtomicUsize,
    waker: Arc<EventCount>,
    tombstone: Tombstone,
}

impl CountLatch {
    /// A latch that `count` calls of [`set`](Self::set) bring to zero. The last call wakes the waiters of `waker`.
    pub fn new(count: usize, waker: Arc<EventCount>) -> Self {
        CountLatch { remaining: AtomicUsize::new(count), waker, tombstone: Tombstone::new() }
    }

    /// Counts down by one. Everything done before is visible to a thread that then finds the latch set.
    ///
    /// # Safety
    /// `this` points to a latch on which fewer than `count` calls have begun. (Such a latch is alive: its owner waits
    /// for the remaining calls.) During and after the last call the latch may be freed.
    pub unsafe fn set(this: *const Self) {
        // SAFETY: the caller's contract. This call has not been counted yet, so the owner still waits. The reference is
        // not used after the decrement of this call.
        let latch = unsafe { &*this };
        let mut remaining = latch.count().load(Relaxed);
        loop {
            debug_assert_ne!(remaining, 0, "set more often than counted");
            // The count only falls, so the call that brings it to zero has seen it at one, and has the clone.
            let waker = (remaining == 1).then(|| latch.waker().clone());
            match latch.count().compare_exchange_weak(remaining, remaining - 1, ord("latch.set", Release), Relaxed) {
                Ok(_) => {
                    if flag("latch.touches_after_set") {
                        latch.waker().notify();
                    } else if let Some(waker) = waker {
                        waker.notify();
                    }
                    return;
                }
                Err(now) => remaining = now,
            }
        }
    }

    /// Whether the count is zero. After true, everything done before the calls of [`set`](Self::set) is visible.
    pub fn is_set(&self) -> bool {
        self.count().load(ord("latch.is_set", Acquire)) == 0
    }

    /// False if the limit came first. It stays awake for at least `linger`, if there is a core for it.
    pub fn wait(&self, limit: Option<Duration>, linger: Duration) -> bool {
        self.waker().wait_lingering(limit, linger, || self.is_set().then_some(())).is_some()
    }

    // All accesses to the fields go through these two functions, so that a model sees every use of the latch's memory.

    #[inline(always)]
    fn count(&self) -> &AtomicUsize {
        self.tombstone.touch();
        &self.remaining
    }

    #[inline(always)]
    fn waker(&self) -> &Arc<EventCount> {
        self.tombstone.touch();
        &self.waker
    }

    /// At the end of the owner's frame. (The memory stays: a mutant's late touch is an error, no crash.)
    #[cfg(all(test, loom))]
    pub fn bury(&self) {
        self.tombstone.bury();
    }
}
