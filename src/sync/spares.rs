//! A pool of objects that are expensive to create and can be reused, such as events.
//!
//! A lock around a `Vec`, held for a push or a pop by threads that have just made a driver call, which costs more. The
//! object that was returned last is taken first, since it is likely in the cache. The creation of events by several
//! threads takes milliseconds ([sglang#39960](https://github.com/sgl-project/sglang/issues/39960)).
//!
//! An event is returned only after every wait on it was *enqueued* (the waits need not be over). A wait captures the
//! record that it finds. If the event were recorded again before, the waiter would wait for another stream's work, or
//! for work that never ends. The lock orders the enqueued wait before the next record. `loom_tests/memory_handles.rs`
//! contains a model of this, with a thread that returns the event too early.

use super::shim::Mutex;

/// Spare objects, for any thread. The head of `src/sync/spares.rs` has the rule for events.
pub struct Spares<T>(Mutex<Vec<T>>);

impl<T> Spares<T> {
    pub fn new() -> Self {
        Spares(Mutex::new(Vec::new()))
    }

    /// Takes a returned object, if there is one. Everything done before its return is visible.
    pub fn take(&self) -> Option<T> {
        self.0.lock().pop()
    }

    /// Returns an object; any thread may return it.
    pub fn give(&self, spare: T) {
        self.0.lock().push(spare);
    }
}

debug_as!(Spares<T> [T], |self| ..);
