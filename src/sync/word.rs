//! Eight-byte words that host and devices share, such as the progress number that a stream stores.
//!
//! Page-locked memory is known by its address, so each access makes an atomic for its duration (`AtomicU64::from_ptr`).
//!
//! Towards other host threads, the language guarantees acquire and release. Towards a GPU, the hardware does:
//! `cuStreamWriteValue64` makes the stream's earlier work visible before the word, an aligned 8-byte store is never
//! torn, and later reads of the host come after its acquiring load.
//!
//! loom cannot watch memory it did not allocate: under `cfg(loom)` accesses are volatile, and models have no such word.

#[cfg(not(loom))]
use super::shim::atomic::{AtomicU64, Ordering::*};

/// Reads the word. Everything done before the [`store_word`] of the value is visible; if a stream wrote the value, the
/// stream's earlier work is visible.
///
/// # Safety
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

/// Stores `value` unless the word is already larger, for a word that several threads raise. Readers as for
/// [`store_word`].
///
/// # Safety
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
