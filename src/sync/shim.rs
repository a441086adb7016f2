//! Atomics, locks and threads: std's and parking_lot's, or loom's under `cfg(loom)`.
//!
//! `sync/` and `gang/` take these names only from here, so that loom sees every operation of the code that it checks: a
//! model over un-shimmed `once_cell` passes without a proof. `cargo loom-lint` finds such bypasses.
//!
//! The signatures are parking_lot's ([`Mutex::lock`] cannot fail, [`Condvar::wait`] takes the guard by reference).
//! [`UnsafeCell`] passes its content to a closure.

pub use imp::*;

#[cfg(not(loom))]
mod imp {
    pub use parking_lot::{Condvar, Mutex};
    pub use std::{hint::spin_loop, sync::Arc};

    /// Atomics and fences.
    pub mod atomic {
        pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    }

    /// Threads.
    pub mod thread {
        pub use std::thread::yield_now;
    }

    /// Number of live device threads, of all pools.
    static CROWD: atomic::AtomicUsize = atomic::AtomicUsize::new(0);

    /// While it lives, the calling thread counts as a device thread, which waits for other device threads.
    #[derive(Debug)]
    pub struct InCrowd(());

    impl InCrowd {
        pub fn enter() -> Self {
            CROWD.fetch_add(1, atomic::Ordering::Relaxed);
            InCrowd(())
        }
    }

    impl Drop for InCrowd {
        fn drop(&mut self) {
            CROWD.fetch_sub(1, atomic::Ordering::Relaxed);
        }
    }

    /// Rounds of doubling pauses before a waiter yields: 1 + 2 + .. + 32 pauses, some microseconds. None if there are
    /// as many device threads as cores: on 2 cores a scope over 4 devices took 11.4 us with the pauses, 5.8 us without.
    #[inline]
    pub fn spin_rounds() -> u32 {
        if is_crowded() { 0 } else { 6 }
    }

    #[inline]
    pub fn is_crowded() -> bool {
        CROWD.load(atomic::Ordering::Relaxed) >= cores()
    }

    /// Yields before a waiter blocks, as in rayon: fewer often pay for a futex, more waste a core.
    #[inline(always)]
    pub fn yield_rounds() -> u32 {
        32
    }

    /// Prefetches the cache line at `at` for a write. A hint: it never faults and orders nothing.
    #[inline(always)]
    pub fn prefetch_for_write<T>(at: *const T) {
        // Not `_mm_prefetch::<_MM_HINT_ET0>`: for the baseline x86-64 LLVM makes that a prefetch for *reading*.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch accesses nothing; processors without PREFETCHW take its encoding as a no-op.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = at;
    }

    /// Number of processors that this process may run on, queried once.
    pub fn cores() -> usize {
        use std::sync::OnceLock;
        static CORES: OnceLock<usize> = OnceLock::new();
        *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// `std::cell::UnsafeCell` with loom's interface.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct UnsafeCell<T: ?Sized>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub const fn new(value: T) -> Self {
            UnsafeCell(std::cell::UnsafeCell::new(value))
        }

        pub fn into_inner(self) -> T {
            self.0.into_inner()
        }
    }

    impl<T: ?Sized> UnsafeCell<T> {
        #[inline(always)]
        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// Part of memory whose use after its end a model sees. Does nothing outside loom.
    #[derive(Debug, Default)]
    pub struct Tombstone;

    impl Tombstone {
        pub const fn new() -> Self {
            Tombstone
        }

        #[inline(always)]
        pub fn touch(&self) {}
    }
}

#[cfg(loom)]
#[path = "../../loom_tests/loomed/shim.rs"]
mod imp;
