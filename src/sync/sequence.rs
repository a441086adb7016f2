//! Counters and flags that only go up, and numbers that are unique in the process.

use super::{
    shim::atomic::{AtomicBool, AtomicU64, Ordering::*},
    site::ord,
};

/// A number that only grows. Readers ask "has it reached n": this is right also for a reader that comes late or misses
/// values in between (for the same reason GPUs' timeline semaphores are numbers and not booleans).
///
/// A thread that reads `n` sees everything done before the calls that raised the number to `n`.
#[derive(Debug, Default)]
pub struct Sequence(AtomicU64);

impl Sequence {
    /// Starts at 0.
    pub fn new() -> Self {
        Sequence(AtomicU64::new(0))
    }

    /// Adds one and returns the new value, for any number of writers. Each value is returned once. Its receiver sees
    /// everything that the receivers of smaller values did before their calls.
    #[inline]
    pub fn fetch_advance(&self) -> u64 {
        self.fetch_add(1)
    }

    /// [`fetch_advance`](Self::fetch_advance) by `n`.
    #[inline]
    pub fn fetch_add(&self, n: u64) -> u64 {
        self.0.fetch_add(n, ord("sequence.fetch_advance", AcqRel)) + n
    }

    /// The value.
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
    /// Not raised.
    pub fn new() -> Self {
        Flag(AtomicBool::new(false))
    }

    /// Raises the flag for good.
    #[inline]
    pub fn raise(&self) {
        self.0.store(true, ord("flag.raise", Release));
    }

    /// Whether it is raised.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.0.load(ord("flag.is_raised", Acquire))
    }
}

/// A number that no other call in this process has returned or will return; never 0.
///
/// It is a plain std atomic: it orders nothing (Relaxed), no protocol reads it back, and loom has no statics. So in a
/// model the numbers keep growing from one execution to the next, and stay unique.
#[cfg_attr(loom, allow(clippy::disallowed_types, reason = "orders nothing; see above"))]
pub fn unique_id() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{collections::HashSet, thread};

    #[test]
    fn numbers_go_up_and_flags_stay_raised() {
        let sequence = Sequence::new();
        assert_eq!((sequence.get(), sequence.fetch_advance(), sequence.fetch_advance()), (0, 1, 2));
        assert_eq!((sequence.fetch_add(512), sequence.fetch_add(256)), (514, 770));
        sequence.raise_to(771);
        sequence.raise_to(3);
        assert_eq!(sequence.get(), 771);
        let flag = Flag::new();
        assert!(!flag.is_raised());
        flag.raise();
        flag.raise();
        assert!(flag.is_raised());
    }

    #[test]
    fn many_writers_each_get_their_own_number() {
        const EACH: usize = crate::sync::rounds(1000);
        let sequence = Sequence::new();
        let seen: Vec<u64> = thread::scope(|s| {
            let threads: Vec<_> =
                (0..4).map(|_| s.spawn(|| (0..EACH).map(|_| sequence.fetch_advance()).collect::<Vec<_>>())).collect();
            threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 4 * EACH);
        assert_eq!(sequence.get(), 4 * EACH as u64);
    }

    #[test]
    fn raise_to_never_lowers() {
        const EACH: u64 = crate::sync::rounds(1000) as u64;
        let sequence = Sequence::new();
        thread::scope(|s| {
            for t in 0..4u64 {
                let sequence = &sequence;
                s.spawn(move || {
                    for i in 0..EACH {
                        let before = sequence.get();
                        sequence.raise_to(i * 4 + t);
                        assert!(sequence.get() >= before.max(i * 4 + t));
                    }
                });
            }
        });
        assert_eq!(sequence.get(), 4 * EACH - 1);
    }

    #[test]
    fn ids_are_unique_over_threads_and_not_zero() {
        let ids: Vec<u64> = thread::scope(|s| {
            let threads: Vec<_> =
                (0..4).map(|_| s.spawn(|| (0..500).map(|_| unique_id()).collect::<Vec<_>>())).collect();
            threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
        });
        assert!(!ids.contains(&0));
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 2000);
    }
}
