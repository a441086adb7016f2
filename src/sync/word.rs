//! Single words of memory that somebody outside of Rust writes as well: a GPU's stream, another process.
//!
//! They cannot be borrowed as atomics of this crate's own, since they are not its memory; so they are reached by pointer, one
//! access at a time.

use super::site::ord;
#[cfg_attr(loom, allow(clippy::disallowed_types, reason = "memory of a device, of which a model has none"))]
use std::sync::atomic::{AtomicU64, Ordering::*};

/// The word's value. Who reads a value sees what was done before it was stored: by [`store_word`], or by a device that puts
/// a fence before its write, as stream memory operations do.
///
/// ```
/// use gpu_pool::sync::{load_word, store_word};
/// let mut word = 0u64;
/// // SAFETY: a live and aligned word of this thread alone.
/// unsafe { store_word(&mut word, 7) };
/// assert_eq!(unsafe { load_word(&word) }, 7);
/// ```
///
/// # Safety
/// `ptr` is an 8-byte aligned word that is live during the call and is written, meanwhile, only atomically.
#[inline]
#[cfg_attr(loom, allow(clippy::disallowed_types, reason = "as above"))]
pub unsafe fn load_word(ptr: *const u64) -> u64 {
    // SAFETY: the caller's promise; a load does not write, so that the pointer need not allow it.
    unsafe { AtomicU64::from_ptr(ptr.cast_mut()) }.load(ord("word.load", Acquire))
}

/// Sets the word.
///
/// # Safety
/// As for [`load_word`], and the word may be written through `ptr`.
#[inline]
#[cfg_attr(loom, allow(clippy::disallowed_types, reason = "as above"))]
pub unsafe fn store_word(ptr: *mut u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(ptr) }.store(value, ord("word.store", Release));
}
