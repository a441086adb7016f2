//! One value from one thread to another, which looks for it, or is woken by a [`Waker`].
//!
//! The value, or the waker until it comes, lies under a mutex. A flag says without it whether the value is there: the
//! getter spins on it. [`set`](OneShot::set) stores the value, raises the flag, releases the mutex, and then wakes. It
//! has no allocation of its own: the two threads share it as a part of a job.

use super::{Flag, shim::Mutex, site::flag};
use std::{
    mem,
    task::{Poll, Waker},
};

/// `src/sync/README.md` has the protocol.
pub struct OneShot<T> {
    set: Flag,
    slot: Mutex<Slot<T>>,
}

enum Slot<T> {
    Pending(Option<Waker>),
    Set(T),
    /// The value was taken, or is not wanted.
    Over,
}

impl<T> Default for OneShot<T> {
    fn default() -> Self {
        OneShot { set: Flag::new(), slot: Mutex::new(Slot::Pending(None)) }
    }
}

impl<T> OneShot<T> {
    /// Gives the value, and wakes the getter. The value comes back if there is one already, or the getter is gone.
    pub fn set(&self, value: T) -> Option<T> {
        if flag("one_shot.set.raises_first") {
            self.set.raise();
        }
        let mut slot = self.slot.lock();
        let waker = match &mut *slot {
            Slot::Pending(waker) => waker.take(),
            _ => return Some(value),
        };
        if flag("one_shot.set.wakes_first") {
            drop(slot);
            waker.into_iter().for_each(Waker::wake);
            *self.slot.lock() = Slot::Set(value);
            return None;
        }
        *slot = Slot::Set(value);
        self.set.raise();
        drop(slot);
        if let Some(waker) = waker.filter(|_| !flag("one_shot.set.silent")) {
            waker.wake();
        }
        None
    }

    pub fn is_set(&self) -> bool {
        self.set.is_raised()
    }

    /// The value, once; `None` afterwards. If there is none yet, the waker is woken when it comes, and no earlier one.
    pub fn poll(&self, waker: &Waker) -> Poll<Option<T>> {
        // User code clones and drops wakers: not under the lock.
        let mut waker = (!self.is_set()).then(|| waker.clone());
        let mut slot = self.slot.lock();
        match &mut *slot {
            Slot::Pending(before) => {
                mem::swap(before, &mut waker);
                drop(slot);
                Poll::Pending
            }
            Slot::Set(_) | Slot::Over => Poll::Ready(match mem::replace(&mut *slot, Slot::Over) {
                Slot::Set(value) => Some(value),
                _ => None,
            }),
        }
    }

    /// Returns the value if it came before.
    pub fn give_up(&self) -> Option<T> {
        // A statement of its own: a waker is not dropped under the lock.
        let before = mem::replace(&mut *self.slot.lock(), Slot::Over);
        match before {
            Slot::Set(value) => Some(value),
            _ => None,
        }
    }
}

debug_as!(OneShot<T> [T], |self| set = self.is_set());

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/sync/one_shot_tests.rs"]
mod tests;
