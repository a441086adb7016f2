//! Counters that one thread writes all the time and others look at now and then, all at once.
//!
//! A pool's numbers belong together: bytes reserved, in use, resting. Read one by one while the owner works they
//! contradict each other (more in use than reserved). A lock would make the owner pay at each change for a reader that
//! comes once a second. So the owner writes into plain cells between two stores of a sequence number, odd while it
//! writes, and the reader looks again if the number was odd or has changed: a seqlock, in Boehm's form for memory
//! models ([*Can seqlocks get along with programming language memory
//! models?*](https://dl.acm.org/doi/10.1145/2247684.2247688);
//! [crossbeam's](https://github.com/crossbeam-rs/crossbeam/blob/master/crossbeam-utils/src/atomic/seq_lock.rs) has the
//! same fences). The cells are atomics, so that what the reader reads in vain is old, but no data race.

use super::{
    shim::{
        atomic::{AtomicU64, Ordering::*},
        spin_loop, spin_rounds, thread,
    },
    site::{fence_at, ord},
};
use std::{array, fmt};

/// `N` numbers of one writer. `src/sync/README.md` has the protocol.
// On cache lines of its own: what lies beside it need not wait when its writer writes.
#[repr(align(128))]
pub struct Mirror<const N: usize> {
    /// Odd while the cells change.
    sequence: AtomicU64,
    cells: [AtomicU64; N],
}

impl<const N: usize> Default for Mirror<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Mirror<N> {
    /// All zero.
    pub fn new() -> Self {
        Mirror { sequence: AtomicU64::new(0), cells: array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Shows `values` from now on. For a single writer: plain stores, no locked instruction. Writers at the same time
    /// would mix their values; they would not make a reader wait for ever.
    #[inline]
    pub fn write(&self, values: [u64; N]) {
        // Not `+ 1`: two writers that break the contract still leave an even number.
        let odd = self.sequence.load(Relaxed) | 1;
        self.sequence.store(odd, Relaxed);
        // Who reads one of the values below finds the odd number, or a later one.
        fence_at("mirror.write.fence", Release);
        for (cell, value) in self.cells.iter().zip(values) {
            cell.store(value, Relaxed);
        }
        // Who finds the even number reads these values, or later ones.
        self.sequence.store(odd.wrapping_add(1), ord("mirror.write.store", Release));
    }

    /// The values of one write. Looks again while the writer writes: a few times at once, then after yielding, since
    /// the writer may have been taken off its core in the middle.
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

    /// One look: the values of one write, or nothing if the writer was writing.
    pub fn try_read(&self) -> Option<[u64; N]> {
        self.look().map(|(_, values)| values)
    }

    /// As [`try_read`](Self::try_read), if there were more than `seen` writes: how many, and the values of the last
    /// one. Who asks again and again in vain looks at one word, which nobody takes away from its cache.
    #[inline]
    pub fn try_read_after(&self, seen: u64) -> Option<(u64, [u64; N])> {
        // Relaxed: the look orders what is read.
        if self.sequence.load(Relaxed) / 2 <= seen { None } else { self.look() }
    }

    /// How many writes there were, and the values of the last one.
    #[inline]
    fn look(&self) -> Option<(u64, [u64; N])> {
        let before = self.sequence.load(ord("mirror.read.load", Acquire));
        if before % 2 == 1 {
            return None;
        }
        let values = array::from_fn(|i| self.cells[i].load(Relaxed));
        // If one of the values is of a later write, then so is the number.
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
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn readers_see_whole_writes_in_order() {
        const LAST: u64 = crate::sync::rounds(200_000) as u64;
        let (mirror, done) = (Mirror::<8>::new(), AtomicBool::new(false));
        std::thread::scope(|s| {
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    s.spawn(|| {
                        let mut newest = 0;
                        while !done.load(Ordering::Relaxed) {
                            let values = mirror.read();
                            assert_eq!(values, array::from_fn(|i| values[0] * (i as u64 + 1)), "torn");
                            assert!(values[0] >= newest, "older than what was seen before");
                            newest = values[0];
                        }
                    })
                })
                .collect();
            for value in 1..=LAST {
                mirror.write(array::from_fn(|i| value * (i as u64 + 1)));
            }
            done.store(true, Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        assert_eq!(mirror.read()[0], LAST);
    }

    #[test]
    fn what_was_seen_is_not_read_again() {
        let mirror = Mirror::new();
        assert_eq!((mirror.read(), mirror.try_read_after(0)), ([0], None));
        mirror.write([7]);
        assert_eq!((mirror.try_read_after(0), mirror.try_read_after(1)), (Some((1, [7])), None));
    }

    /// The sequence comes round, and a writer who was one of two does not leave readers waiting.
    #[test]
    fn the_number_of_a_finished_write_is_even() {
        for start in [u64::MAX - 1, u64::MAX, 1, 2] {
            let mirror = Mirror { sequence: AtomicU64::new(start), cells: [AtomicU64::new(0)] };
            mirror.write([5]);
            assert_eq!(mirror.try_read(), Some([5]), "from {start}");
        }
    }
}
