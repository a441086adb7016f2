//! `src/sync/shim.rs` under `cfg(loom)`: loom's atomics, locks and threads with the interface of std's and
//! parking_lot's. No other build compiles it.

use std::ops::{Deref, DerefMut};

pub use loom::{cell::UnsafeCell, hint::spin_loop, sync::Arc};

/// loom's atomics and fences, with loads that loom's search reorders completely. loom remembers one access per
/// atomic: if thread A loads, and then B loads *and stores*, it compares B's store only with B's own load, and
/// never tries the order in which A loads after B's store (0.7.2, `rt/atomic.rs`, `last_dependent_access`). So a
/// relaxed no-op on a companion atomic comes before each load: it orders nothing, but makes any two loads
/// dependent. Without it, six mutants survived.
pub mod atomic {
    pub use loom::sync::atomic::{Ordering, fence};
    use std::ops::Deref;

    macro_rules! atomics {
        ($($name:ident $(<$t:ident>)?: $value:ty),+ $(,)?) => {$(
            #[derive(Debug)]
            pub struct $name $(<$t>)? {
                inner: loom::sync::atomic::$name $(<$t>)?,
                companion: loom::sync::atomic::AtomicBool,
            }

            impl $(<$t>)? $name $(<$t>)? {
                #[track_caller]
                pub fn new(value: $value) -> Self {
                    let companion = loom::sync::atomic::AtomicBool::new(false);
                    Self { inner: loom::sync::atomic::$name::new(value), companion }
                }

                #[track_caller]
                pub fn load(&self, order: Ordering) -> $value {
                    self.companion.store(false, Ordering::Relaxed);
                    self.inner.load(order)
                }

                #[allow(dead_code, reason = "used of some of the types")]
                #[track_caller]
                pub fn fetch_update(
                    &self,
                    set: Ordering,
                    fetch: Ordering,
                    mut f: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let mut before = self.load(fetch);
                    while let Some(next) = f(before) {
                        match self.inner.compare_exchange(before, next, set, fetch) {
                            Ok(before) => return Ok(before),
                            Err(now) => before = now,
                        }
                    }
                    Err(before)
                }
            }

            impl $(<$t>)? Deref for $name $(<$t>)? {
                type Target = loom::sync::atomic::$name $(<$t>)?;
                fn deref(&self) -> &Self::Target {
                    &self.inner
                }
            }
        )+};
    }

    atomics! {
        AtomicBool: bool, AtomicU32: u32, AtomicU64: u64, AtomicUsize: usize, AtomicPtr<T>: *mut T,
    }
}

/// Threads.
pub mod thread {
    pub use loom::thread::{JoinHandle, spawn, yield_now};
}

#[derive(Debug)]
pub struct InCrowd(());

impl InCrowd {
    pub fn enter() -> Self {
        InCrowd(())
    }
}

/// No spinning: two spinning threads that yield to each other make a model endless.
pub fn spin_rounds() -> u32 {
    0
}

/// No yielding either: models go straight to the condition variable.
pub fn yield_rounds() -> u32 {
    0
}

/// No lingering.
pub fn is_crowded() -> bool {
    true
}

/// Does nothing: a model has no caches.
pub fn prefetch_for_write<T>(_at: *const T) {}

/// Two, as in tokio's mock.
pub fn cores() -> usize {
    2
}

/// loom's mutex with parking_lot's interface.
#[derive(Debug)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

/// A locked [`Mutex`]. Holds an `Option` because loom's `Condvar::wait` takes the guard by value.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Mutex(loom::sync::Mutex::new(value))
    }

    /// Locks. A panic of an earlier holder is ignored, as by parking_lot.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(|poison| poison.into_inner())))
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

const HELD: &str = "a guard lacks its inner guard only inside `Condvar::wait`";

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect(HELD)
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect(HELD)
    }
}

/// In place of parking_lot's `WaitTimeoutResult`.
#[derive(Debug)]
pub struct NeverTimedOut;

impl NeverTimedOut {
    pub fn timed_out(&self) -> bool {
        false
    }
}

#[derive(Debug, Default)]
pub struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub fn new() -> Self {
        Condvar(loom::sync::Condvar::new())
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.0.take().expect(HELD);
        guard.0 = Some(self.0.wait(inner).unwrap_or_else(|poison| poison.into_inner()));
    }

    /// As [`wait`](Self::wait): loom knows no time, so this never times out.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _limit: std::time::Duration) -> NeverTimedOut {
        self.wait(guard);
        NeverTimedOut
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A `touch` that is not ordered before `bury` is a data race for loom.
#[derive(Debug)]
pub struct Tombstone(UnsafeCell<()>);

// SAFETY: loom reports accesses that race; there are no bytes behind it.
unsafe impl Sync for Tombstone {}

impl Tombstone {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Tombstone(UnsafeCell::new(()))
    }

    #[track_caller]
    pub fn touch(&self) {
        self.0.with(|_| ());
    }

    #[cfg(test)]
    #[track_caller]
    pub fn bury(&self) {
        self.0.with_mut(|_| ());
    }
}
