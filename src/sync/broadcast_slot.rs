//! What one thread tells several others at once.
//!
//! With a [`ring`](super::ring) per reader there are a slot and an index per reader, in cache lines that have to be
//! fetched from the readers one by one. Here the writer writes one line, and all readers read it. The writer cannot run
//! ahead, and the slot does not say who has read it: the members that meet see to that.
//!
//! # Contract
//!
//! Broadcasts are numbered from 1 and posted in order by one thread. Two pages take them in turn, so a broadcast stays
//! until the next but one is posted. That is enough for members that meet again and again, where each member posts one
//! broadcast and goes on when it has read all members' broadcasts of that number: a member posts number `k + 2` when
//! all have posted `k + 1`, and they do that when they have read `k`. A reader that does not read in time misses some.
//! It finds out, since it sees the number of the broadcast that is there. It always reads one broadcast, never parts of
//! two (each page is a [`Mirror`]).

use super::{Mirror, site::flag};

/// The last two broadcasts of one thread, of `N` words each. `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct BroadcastSlot<const N: usize> {
    pages: [Mirror<N>; 2],
}

impl<const N: usize> Default for BroadcastSlot<N> {
    fn default() -> Self {
        Self::new()
    }
}

/// The page of a broadcast; how many broadcasts that page has had before; and a function from the number of broadcasts
/// that the page has had to the number of its last one.
fn place(number: u64) -> (usize, u64, impl Fn(u64) -> u64) {
    let pages = if flag("broadcast_slot.one_page") { 1 } else { 2 };
    let page = (number - 1) % pages;
    (page as usize, (number - 1) / pages, move |count| (count - 1) * pages + page + 1)
}

impl<const N: usize> BroadcastSlot<N> {
    /// A slot with no broadcast yet.
    pub fn new() -> Self {
        BroadcastSlot { pages: [Mirror::new(), Mirror::new()] }
    }

    /// Posts the next broadcast. Numbers are consecutive, from 1. By one thread at a time.
    #[inline]
    pub fn post(&self, number: u64, words: [u64; N]) {
        self.pages[place(number).0].write(words);
    }

    /// The broadcast with this number, or a later one that has taken its place; with its number. None if it was not
    /// posted yet, or if its page is being written.
    #[inline]
    pub fn read(&self, number: u64) -> Option<(u64, [u64; N])> {
        let (page, before, last) = place(number);
        self.pages[page].try_read_after(before).map(|(count, words)| (last(count), words))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicBool, sync::atomic::Ordering, thread};

    #[test]
    fn two_pages_are_remembered() {
        let slot = BroadcastSlot::new();
        assert_eq!(slot.read(1), None);
        (1..=4).for_each(|k| slot.post(k, [k]));
        assert_eq!([1, 2, 3, 5].map(|k| slot.read(k)), [Some((3, [3])), Some((4, [4])), Some((3, [3])), None]);
    }

    /// Of several members, with nothing in between: no member ever finds another number than the one it is at.
    #[test]
    fn members_in_step_miss_nothing() {
        const ROUNDS: u64 = crate::sync::rounds(3000) as u64;
        let all: [BroadcastSlot<7>; 3] = Default::default();
        thread::scope(|s| {
            for me in 0..3 {
                let all = &all;
                s.spawn(move || {
                    for k in 1..=ROUNDS {
                        all[me].post(k, [k * (me as u64 + 1); 7]);
                        for (peer, slot) in all.iter().enumerate() {
                            let read = loop {
                                if let Some(read) = slot.read(k) {
                                    break read;
                                }
                                thread::yield_now();
                            };
                            assert_eq!(read, (k, [k * (peer as u64 + 1); 7]));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn who_reads_now_and_then_finds_whole_broadcasts_and_their_numbers() {
        const LAST: u64 = crate::sync::rounds(100_000) as u64;
        let (slot, done) = (BroadcastSlot::<7>::new(), AtomicBool::new(false));
        thread::scope(|s| {
            s.spawn(|| {
                (1..=LAST).for_each(|k| slot.post(k, [k; 7]));
                done.store(true, Ordering::Release);
            });
            let mut next = 1;
            while !done.load(Ordering::Acquire) {
                if let Some((number, words)) = slot.read(next) {
                    assert!(number >= next && words == [number; 7], "{number} for {next}: {words:?}");
                    next = number + 1;
                }
            }
        });
        assert_eq!(slot.read(LAST), Some((LAST, [LAST; 7])));
    }
}
