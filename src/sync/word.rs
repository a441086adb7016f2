//! Eight-byte words that host and devices share, such as the progress number that a stream stores.
//!
//! The memory is page-locked memory of the driver or of a software GPU, known by its address. So no atomic object can
//! live there; each access makes one for its duration (`AtomicU64::from_ptr`).
//!
//! Towards other host threads, the language guarantees acquire and release. Towards a GPU, the hardware does:
//! `cuStreamWriteValue64` (without `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`) makes the stream's earlier work visible
//! before the word, an aligned 8-byte store is never torn, and later reads of the host come after its acquiring load.
//!
//! loom cannot watch memory that it did not allocate. So under `cfg(loom)` the accesses are volatile, which is *not* a
//! model: no model may contain such a word, since loom would neither see a race nor try other orders. `README.md` lists
//! this under the limits of loom.

#[cfg(not(loom))]
use super::shim::atomic::{AtomicU64, Ordering::*};

/// Reads the word. Everything done before the [`store_word`] of the value is visible; if a stream wrote the value, the
/// stream's earlier work is visible.
///
/// # Safety
///
/// `ptr` points to eight bytes that are aligned to 8, initialised, and alive during the call. While another thread may
/// write them, host threads access them only atomically (as this function and [`store_word`] do).
#[inline(always)]
pub unsafe fn load_word(ptr: *const u64) -> u64 {
    debug_assert!(ptr.is_aligned());
    #[cfg(not(loom))]
    // SAFETY: the caller's promise. The atomic is only read, so the memory may be read-only.
    return unsafe { AtomicU64::from_ptr(ptr.cast_mut()) }.load(Acquire);
    #[cfg(loom)]
    // SAFETY: the caller's promise; see the module's docs for why this is no atomic.
    return unsafe { ptr.read_volatile() };
}

/// Stores `value` into the word. A thread that reads it by [`load_word`] sees everything done before.
///
/// # Safety
///
/// As for [`load_word`], and the bytes may be written.
#[inline(always)]
pub unsafe fn store_word(ptr: *mut u64, value: u64) {
    debug_assert!(ptr.is_aligned());
    #[cfg(not(loom))]
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(ptr) }.store(value, Release);
    #[cfg(loom)]
    // SAFETY: the caller's promise; see the module's docs for why this is no atomic.
    unsafe {
        ptr.write_volatile(value);
    }
}

/// Stores `value` unless the word is already larger, for a word that several threads raise. A thread that reads the
/// value by [`load_word`] sees everything done before.
///
/// # Safety
///
/// As for [`store_word`].
pub unsafe fn raise_word(ptr: *mut u64, value: u64) {
    debug_assert!(ptr.is_aligned());
    #[cfg(not(loom))]
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(ptr) }.fetch_max(value, Release);
    #[cfg(loom)]
    // SAFETY: the caller's promise; see the module's docs for why this is no atomic.
    unsafe {
        ptr.write_volatile(value.max(ptr.read_volatile()));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{hint, thread};

    #[test]
    fn a_word_is_raised_and_never_lowered() {
        let mut word = 5u64;
        let at = &raw mut word;
        // SAFETY: alive, aligned, and used only by this thread.
        let seen = [7, 6].map(|value| unsafe {
            raise_word(at, value);
            load_word(at)
        });
        assert_eq!(seen, [7, 7]);
    }

    /// Message passing through a word, with plain data beside it: tsan and Miri would report a race if an ordering were
    /// missing.
    #[test]
    fn what_was_stored_before_is_seen() {
        const ROUNDS: u64 = crate::sync::rounds(1000) as u64;
        let mut memory = [0u64; 3];
        let start = (&raw mut memory) as usize;
        let at = move |i: usize| (start as *mut u64).wrapping_add(i);
        // The word at 0 says that the data at 2 is full, the word at 1 that it was read.
        thread::scope(|s| {
            s.spawn(move || {
                for round in 1..=ROUNDS {
                    // SAFETY: the words outlive the scope, are accessed atomically, and hand the data back and forth.
                    unsafe {
                        at(2).write(round * 3);
                        store_word(at(0), round);
                        while load_word(at(1)) != round {
                            thread::yield_now();
                        }
                    }
                }
            });
            for round in 1..=ROUNDS {
                // SAFETY: as above.
                unsafe {
                    while load_word(at(0)) != round {
                        hint::spin_loop();
                        thread::yield_now();
                    }
                    assert_eq!(at(2).read(), round * 3);
                    store_word(at(1), round);
                }
            }
        });
    }
}
