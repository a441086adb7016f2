//! Counters and flags that only go up, and numbers that are unique in the process.

use super::{
    shim::atomic::{AtomicBool, AtomicU64, Ordering::*},
    site::ord,
};

/// A number that only grows. Readers ask "has it reached n", which is right also for a reader that is late.
///
/// A thread that reads `n` sees everything done before the calls that raised the number to `n`.
#[derive(Debug)]
pub struct Sequence(AtomicU64);

impl Sequence {
    pub fn new() -> Self {
        Sequence(AtomicU64::new(0))
    }

    /// Adds one and returns the new value, for any number of writers. Each value is returned once. Its receiver sees
    /// everything that the receivers of smaller values did before their calls.
    #[inline]
    pub fn fetch_advance(&self) -> u64 {
        self.0.fetch_add(1, ord("sequence.fetch_advance", AcqRel)) + 1
    }

    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(ord("sequence.get", Acquire))
    }

    /// Makes the value at least `value`. Any number of writers.
    #[inline]
    pub fn raise_to(&self, value: u64) {
        self.0.fetch_max(value, ord("sequence.raise_to", Release));
    }
}

/// A flag that is raised once. A thread that sees it raised sees everything done before.
#[derive(Debug)]
pub struct Flag(AtomicBool);

impl Flag {
    pub fn new() -> Self {
        Flag(AtomicBool::new(false))
    }

    /// Raises the flag for good.
    #[inline]
    pub fn raise(&self) {
        self.0.store(true, ord("flag.raise", Release));
    }

    #[inline]
    pub fn is_raised(&self) -> bool {
        self.0.load(ord("flag.is_raised", Acquire))
    }
}

/// A number that no other call in this process returns; never 0. Relaxed: it orders nothing. A plain std atomic, since
/// loom has no statics: in a model the numbers keep growing from one execution to the next.
#[cfg_attr(loom, allow(clippy::disallowed_types, reason = "orders nothing; see above"))]
pub fn unique_id() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}
