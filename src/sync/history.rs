//! A ring of records: one thread writes, other threads read the last ones, also after the writer has died.
//!
//! The recorder of device threads (`memory::calls`) keeps its records here. A seqlock over a ring: the writer never
//! waits for readers, and overwrites the oldest record. The words are atomics, so a failed read is no data race.

use super::{
    shim::atomic::{AtomicU64, Ordering::*},
    site::{fence_at, flag, ord},
};
use std::array;

/// The last records, of `N` words each. `src/sync/README.md` has the protocol.
// On its own cache lines, so that a record does not delay accesses to neighbouring data.
#[repr(align(128))]
pub struct History<const N: usize> {
    /// Records that were begun, and that are whole.
    begun: AtomicU64,
    whole: AtomicU64,
    records: Box<[[AtomicU64; N]]>,
}

impl<const N: usize> History<N> {
    /// Holds the last `len` records, 2 at least; rounded up to a power of two.
    pub fn new(len: usize) -> Self {
        let record = |_| array::from_fn(|_| AtomicU64::new(0));
        let len = len.next_power_of_two().max(2);
        History { begun: AtomicU64::new(0), whole: AtomicU64::new(0), records: (0..len).map(record).collect() }
    }

    fn record(&self, number: u64) -> &[AtomicU64; N] {
        &self.records[number as usize & (self.records.len() - 1)]
    }

    /// Writes a record, and returns its number: 0, 1, .. For a single writer.
    #[inline]
    pub fn push(&self, words: [u64; N]) -> u64 {
        let number = self.whole.load(Relaxed);
        self.begun.store(number + 1, Relaxed);
        // A reader that sees one of the words below also sees that this record was begun.
        fence_at("history.push.fence", Release);
        for (cell, word) in self.record(number).iter().zip(words) {
            cell.store(word, Relaxed);
        }
        // A reader that sees this number reads these words, or later ones.
        self.whole.store(number + 1, ord("history.push.store", Release));
        number
    }

    /// Replaces a word of a record, unless the record was overwritten. For its writer. Readers get the old or new word.
    #[inline]
    pub fn set(&self, number: u64, at: usize, word: u64) {
        if self.whole.load(Relaxed) - number <= self.records.len() as u64 || flag("history.set.overwritten") {
            self.record(number)[at].store(word, Relaxed);
        }
    }

    /// The words of a record; `None`: it is not there yet, or was overwritten.
    fn get(&self, number: u64) -> Option<[u64; N]> {
        if number >= self.whole.load(ord("history.read.load", Acquire)) {
            return None;
        }
        let words = array::from_fn(|i| self.record(number)[i].load(Relaxed));
        // If one of the words is from a later record, that record has begun for the load below, too.
        fence_at("history.read.fence", Acquire);
        let there = self.begun.load(Relaxed) <= number + self.records.len() as u64 || flag("history.read.torn");
        there.then_some(words)
    }

    /// Calls `f` with the records that are still there, and their numbers. Returns the number of the next record. A gap
    /// in the numbers, also before the first one: these records were overwritten.
    pub fn read(&self, mut f: impl FnMut(u64, [u64; N])) -> u64 {
        // Relaxed: `get` orders its reads.
        let end = self.whole.load(Relaxed);
        for number in end.saturating_sub(self.records.len() as u64)..end {
            if let Some(words) = self.get(number) {
                f(number, words);
            }
        }
        end
    }
}
