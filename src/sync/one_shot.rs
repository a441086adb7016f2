//! One value from one thread to another, which waits for it or is woken by a [`Waker`].
//!
//! ```text
//!   state = SET | WAKER
//!
//!   setter                                   getter
//!   ------                                   ------
//!   write the value                          write the waker
//!   fetch_or(SET): WAKER was there?      X   fetch_or(WAKER): SET was there?
//!     yes: take the waker, wake                yes: take the value
//!     no:  done                                no:  return; it will be woken
//! ```
//!
//! Both sides change one word, so one of them comes second and sees the other's write. A getter that wants to replace
//! its waker takes WAKER back first; if SET came before, the waker belongs to the setter. It is the protocol of
//! [tokio's `oneshot`](https://github.com/tokio-rs/tokio/blob/master/tokio/src/sync/oneshot.rs), without the way back.

use super::{
    shim::{
        Arc, UnsafeCell,
        atomic::{AtomicU32, Ordering::*},
    },
    site::{flag, ord},
};
use std::{
    fmt,
    task::{Poll, Waker},
};

const SET: u32 = 1;
const WAKER: u32 = 2;

struct Slot<T> {
    state: AtomicU32,
    value: UnsafeCell<Option<T>>,
    waker: UnsafeCell<Option<Waker>>,
}

// SAFETY: the value and the waker move from one thread to the other and are never shared; `state` says whose they are.
unsafe impl<T: Send> Send for Slot<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Slot<T> {}

/// The side that gives the value. If it is dropped without one, the getter gets `None`.
pub struct Setter<T>(Arc<Slot<T>>);

/// The side that gets the value.
pub struct Getter<T>(Arc<Slot<T>>);

/// A setter and its getter. `src/sync/README.md` has the protocol.
pub fn one_shot<T: Send>() -> (Setter<T>, Getter<T>) {
    let slot = Slot { state: AtomicU32::new(0), value: UnsafeCell::new(None), waker: UnsafeCell::new(None) };
    let slot = Arc::new(slot);
    (Setter(slot.clone()), Getter(slot))
}

impl<T> Setter<T> {
    /// Gives the value and wakes the getter.
    pub fn set(self, value: T) {
        // SAFETY: SET is not there, so the getter does not touch the value; and there is one setter.
        self.0.value.with_mut(|slot| unsafe { *slot = Some(value) });
    }
}

impl<T> Drop for Setter<T> {
    fn drop(&mut self) {
        let before = self.0.state.fetch_or(SET, ord("one_shot.set", AcqRel));
        if before & WAKER != 0 && !flag("one_shot.set.silent") {
            // SAFETY: WAKER came before SET, so the waker belongs to this side: the getter touches it no more.
            let waker = self.0.waker.with_mut(|slot| unsafe { (*slot).take() });
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl<T> Getter<T> {
    /// Whether [`poll`](Self::poll) has an answer.
    pub fn is_set(&self) -> bool {
        self.0.state.load(Relaxed) & SET != 0
    }

    /// The value, once; `None` if the setter had none, or the value was taken before. Otherwise the waker is woken when
    /// the setter is done.
    pub fn poll(&mut self, waker: &Waker) -> Poll<Option<T>> {
        let mut state = self.0.state.load(ord("one_shot.poll", Acquire));
        if state & (SET | WAKER) == WAKER {
            state = self.0.state.fetch_and(!WAKER, ord("one_shot.take_back", Acquire));
        }
        if state & SET == 0 {
            // SAFETY: WAKER is not there, so the setter does not touch the waker; and there is one getter.
            self.0.waker.with_mut(|slot| unsafe { *slot = Some(waker.clone()) });
            state = self.0.state.fetch_or(WAKER, ord("one_shot.register", AcqRel));
        }
        if state & SET == 0 && !flag("one_shot.never_pending") {
            return Poll::Pending;
        }
        // SAFETY: SET is there, so the setter touches the value no more.
        Poll::Ready(self.0.value.with_mut(|slot| unsafe { (*slot).take() }))
    }
}

impl<T> fmt::Debug for Getter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Getter").field("set", &self.is_set()).finish()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/sync/one_shot_tests.rs"]
mod tests;
