//! Eight-byte words that a device reads and writes too, such as the number that a stream stores when it has got
//! somewhere.
//!
//! The memory is not Rust's to lay out: it is page-locked memory of the driver, or a software GPU's, known by address.
//! So there is no atomic to hold, only one to make for the length of an access (`AtomicU64::from_ptr`).
//!
//! What this promises against other host threads is the language's: acquire and release. What it promises against a GPU
//! is the hardware's: `cuStreamWriteValue64` (without `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`) makes the stream's
//! earlier work visible before the word, an aligned 8-byte store arrives whole, and an acquiring load of the host is
//! followed, not preceded, by its later reads.
//!
//! loom cannot watch memory that it did not make, so under `cfg(loom)` the accesses are volatile ones, which is *not* a
//! model: no model contains such a word, and none may, since loom would neither see a race nor try an order. It is
//! listed in `README.md` under what loom cannot see.

#[cfg(not(loom))]
use super::shim::atomic::{AtomicU64, Ordering::*};

/// The word's value. Who reads a value sees what was done before the [`store_word`] that wrote it, or, if a stream
/// wrote it, what the stream had done.
///
/// # Safety
///
/// `ptr` points to eight bytes, aligned to 8, initialised, alive during the call. Host threads access them only through
/// atomics (of which this and [`store_word`] are) as long as another may write.
#[inline(always)]
pub unsafe fn load_word(ptr: *const u64) -> u64 {
    debug_assert!(ptr.is_aligned());
    #[cfg(not(loom))]
    // SAFETY: the caller's promise. The atomic is only read, so that the pointer may be to read-only memory.
    return unsafe { AtomicU64::from_ptr(ptr.cast_mut()) }.load(Acquire);
    #[cfg(loom)]
    // SAFETY: the caller's promise; see the module's docs for why this is no atomic.
    return unsafe { ptr.read_volatile() };
}

/// Stores `value` into the word. Whoever reads it by [`load_word`] sees what was done before.
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

/// Stores `value` unless the word is larger already: for a word that several threads raise. Whoever reads the value by
/// [`load_word`] sees what was done before.
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
        // SAFETY: alive, aligned, and this thread's.
        let seen = [7, 6].map(|value| unsafe {
            raise_word(at, value);
            load_word(at)
        });
        assert_eq!(seen, [7, 7]);
    }

    /// Message passing over a word and plain data beside it: what tsan and miri would call a race if an ordering were
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
                    // SAFETY: the words live beyond the scope, are accessed atomically, and hand the data back and
                    // forth.
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
