//! A seqlock for counters: one thread writes them often, other threads sometimes read all of them at once.
//!
//! A pool's numbers belong together: loaded one by one while the owner works, they contradict each other (more bytes in
//! use than reserved). With a lock the owner would pay at each change for a rare reader. So the owner writes the cells
//! between two stores of a sequence number, which is odd during the write; the reader tries again if it was odd or has
//! changed. This is Boehm's form of the seqlock ([*Can seqlocks get along with programming language memory
//! models?*](https://dl.acm.org/doi/10.1145/2247684.2247688)). The cells are atomics, so a failed read is no data race.

use super::shim::{
    atomic::{AtomicU64, Ordering::*},
    spin_loop, spin_rounds, thread,
};
use super::site::{fence_at, ord};
use std::{array, fmt};

/// `N` numbers of one writer. `src/sync/README.md` has the protocol.
// On its own cache lines, so that a write does not delay accesses to neighbouring data.
#[repr(align(128))]
pub struct Mirror<const N: usize> {
    sequence: AtomicU64,
    cells: [AtomicU64; N],
}

impl<const N: usize> Mirror<N> {
    pub fn new() -> Self {
        Mirror { sequence: AtomicU64::new(0), cells: array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Publishes `values`. For a single writer: plain stores, no locked instruction. Concurrent writers would mix their
    /// values, but no reader would wait for ever.
    #[inline]
    pub fn write(&self, values: [u64; N]) {
        // Not `+ 1`: two writers that break the contract still leave an even number.
        let odd = self.sequence.load(Relaxed) | 1;
        self.sequence.store(odd, Relaxed);
        // A reader that sees one of the values below also sees the odd number, or a later one.
        fence_at("mirror.write.fence", Release);
        for (cell, value) in self.cells.iter().zip(values) {
            cell.store(value, Relaxed);
        }
        // A reader that sees the even number reads these values, or later ones.
        self.sequence.store(odd.wrapping_add(1), ord("mirror.write.store", Release));
    }

    /// The values of one write. Tries again during a write: a few times at once, then with yields, since the writer may
    /// have lost its core in the middle.
    pub fn read(&self) -> [u64; N] {
        for round in 0..spin_rounds() {
            if let Some(values) = self.try_read() {
                return values;
            }
            (0..1 << round).for_each(|_| spin_loop());
        }
        loop {
            if let Some(values) = self.try_read() {
                return values;
            }
            thread::yield_now();
        }
    }

    /// One try: the values of one write, or `None` during a write.
    pub fn try_read(&self) -> Option<[u64; N]> {
        self.look().map(|(_, values)| values)
    }

    /// [`try_read`](Self::try_read) if there were more than `seen` writes: the number of writes, and the values of the
    /// last one. Without a new write, repeated calls read only one word, which stays in the reader's cache.
    #[inline]
    pub fn try_read_after(&self, seen: u64) -> Option<(u64, [u64; N])> {
        // Relaxed: `look` orders its reads.
        if self.sequence.load(Relaxed) / 2 <= seen { None } else { self.look() }
    }

    #[inline]
    fn look(&self) -> Option<(u64, [u64; N])> {
        let before = self.sequence.load(ord("mirror.read.load", Acquire));
        if before % 2 == 1 {
            return None;
        }
        let values = array::from_fn(|i| self.cells[i].load(Relaxed));
        // If one of the values is from a later write, the number read below is, too.
        fence_at("mirror.read.fence", Acquire);
        (self.sequence.load(Relaxed) == before).then_some((before / 2, values))
    }
}

impl<const N: usize> fmt::Debug for Mirror<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mirror").field(&self.try_read()).finish()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/sync/mirror_tests.rs"]
mod tests;
