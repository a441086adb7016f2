//! Things that are dear to make and can be used again, such as events.
//!
//! A lock around a `Vec`: it is held for a push or a pop, by threads that have just made a driver call that costs more.
//! What was given last is taken first, since it is the warmest. Making events while other threads do takes milliseconds
//! ([sglang#39960](https://github.com/sgl-project/sglang/issues/39960)), taking a spare one nanoseconds.
//!
//! # The rule for events
//!
//! An event is given back only after every wait on it was *enqueued* (not: is over). A wait captures the record that it
//! finds; an event that is recorded anew before would make the waiter wait for another stream's work, or for work that
//! never ends. The lock orders the enqueued wait before the next record. `loom_tests/memory_handles.rs` has it as a
//! model, with a thread that gives too early.

use super::shim::Mutex;
use std::fmt;

/// Spare things, for any thread. See the module's docs in `src/sync/spares.rs` for the rule that events need.
pub struct Spares<T>(Mutex<Vec<T>>);

impl<T> Default for Spares<T> {
    fn default() -> Self {
        Spares(Mutex::new(Vec::new()))
    }
}

impl<T> Spares<T> {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// One that was given back, if there is any. Everything done before it was given back is visible.
    pub fn take(&self) -> Option<T> {
        self.0.lock().pop()
    }

    /// Gives one back, whoever took it.
    pub fn give(&self, spare: T) {
        self.0.lock().push(spare);
    }
}

impl<T> fmt::Debug for Spares<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spares").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{collections::HashSet, thread};

    #[test]
    fn nobody_holds_what_another_holds() {
        let (spares, held) = (Spares::new(), parking_lot::Mutex::new(HashSet::new()));
        (0..3).for_each(|i| spares.give(i));
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..crate::sync::rounds(2000) {
                        let spare = spares.take().expect("three threads, three spares, one each");
                        assert!(held.lock().insert(spare));
                        assert!(held.lock().remove(&spare));
                        spares.give(spare);
                    }
                });
            }
        });
        let mut left: Vec<i32> = std::iter::from_fn(|| spares.take()).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 1, 2]);
    }

    #[test]
    fn the_warmest_first() {
        let spares = Spares::new();
        spares.give("cold");
        spares.give("warm");
        assert_eq!((spares.take(), spares.take(), spares.take()), (Some("warm"), Some("cold"), None));
    }
}
