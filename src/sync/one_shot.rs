//! One value from one thread to another, which looks for it, or is woken by a [`Waker`].
//!
//! The value, or the waker until it comes, lies under a mutex. A flag says without it whether the value is there: the
//! getter spins on it. [`set`](OneShot::set) stores the value, then raises the flag, then releases the mutex, then
//! wakes. So a getter that has seen the flag, or was woken, finds the value.
//!
//! It has no allocation of its own: the two threads share it as a part of something else, a job.

use super::{Flag, shim::Mutex, site::flag};
use std::{
    fmt, mem,
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

    /// Whether [`poll`](Self::poll) has an answer.
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

    /// The getter is gone. Returns the value if it came before.
    pub fn give_up(&self) -> Option<T> {
        match mem::replace(&mut *self.slot.lock(), Slot::Over) {
            Slot::Set(value) => Some(value),
            _ => None,
        }
    }
}

impl<T> fmt::Debug for OneShot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OneShot").field("set", &self.is_set()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::rounds;
    use std::{
        sync::{Arc, mpsc},
        task::Wake,
        thread,
    };

    struct Tell(mpsc::Sender<()>);

    impl Wake for Tell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(());
        }
    }

    fn waker() -> (Waker, mpsc::Receiver<()>) {
        let (tell, told) = mpsc::channel();
        (Waker::from(Arc::new(Tell(tell))), told)
    }

    #[test]
    fn a_value_arrives_and_wakes() {
        for round in 0..rounds(2000) {
            let shot = OneShot::default();
            let (waker, told) = waker();
            thread::scope(|s| {
                s.spawn(|| assert_eq!(shot.set(round), None));
                let value = loop {
                    match shot.poll(&waker) {
                        Poll::Ready(value) => break value,
                        Poll::Pending => told.recv().unwrap(),
                    }
                };
                assert_eq!(value, Some(round));
            });
        }
    }

    #[test]
    fn only_the_last_waker_is_woken_and_the_first_value_counts() {
        let shot = OneShot::default();
        let wakers = [waker(), waker()];
        assert!(wakers.iter().all(|(waker, _)| shot.poll(waker).is_pending()));
        assert_eq!((shot.set(1), shot.set(2)), (None, Some(2)));
        assert!(wakers[0].1.try_recv().is_err() && wakers[1].1.try_recv().is_ok() && shot.is_set());
        assert_eq!(shot.poll(&wakers[0].0), Poll::Ready(Some(1)));
        assert_eq!(shot.poll(&wakers[0].0), Poll::Ready(None));
    }

    #[test]
    fn a_value_without_a_getter_comes_back_and_the_waker_goes() {
        let shot = OneShot::default();
        let (waker, told) = waker();
        assert!(shot.poll(&waker).is_pending());
        drop(waker);
        assert_eq!(shot.give_up(), None);
        assert!(matches!(told.try_recv(), Err(mpsc::TryRecvError::Disconnected)));
        assert_eq!(shot.set(1), Some(1));
        let shot = OneShot::default();
        assert_eq!((shot.set(1), shot.give_up()), (None, Some(1)));
    }
}
