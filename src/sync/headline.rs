//! What one thread says to several at once.
//!
//! A [`ring`](super::ring) for each listener means a slot and an index for each, in cache lines that have to be fetched
//! from their listeners one by one. Here the speaker writes one line, which all of them read. There is no room to run
//! ahead, and nothing says who has listened: that is for those who meet.
//!
//! # Contract
//!
//! Headlines are numbered from 1 and posted in order by one thread. Two pages take them in turn, so one is there until
//! the next but one is posted. For members that meet again and again, where each posts one and goes on when it has read
//! everybody's of the same number, that is enough: a member posts number `k + 2` when all have posted `k + 1`, which
//! they do when they have read `k`. Who does not listen misses some, and finds out, since he sees the number of what is
//! there; what he reads is always one headline, never parts of two (each page is a [`Mirror`]).

use super::{Mirror, site::flag};

/// The last two of one thread's headlines, of `N` words each. `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct Headline<const N: usize> {
    pages: [Mirror<N>; 2],
}

impl<const N: usize> Default for Headline<N> {
    fn default() -> Self {
        Self::new()
    }
}

/// The page of a headline, how many it has had before, and the number of its last one after so many.
fn place(number: u64) -> (usize, u64, impl Fn(u64) -> u64) {
    let pages = if flag("headline.one_page") { 1 } else { 2 };
    let page = (number - 1) % pages;
    (page as usize, (number - 1) / pages, move |count| (count - 1) * pages + page + 1)
}

impl<const N: usize> Headline<N> {
    /// None yet.
    pub fn new() -> Self {
        Headline { pages: [Mirror::new(), Mirror::new()] }
    }

    /// The next headline: numbers are consecutive, from 1. By one thread at a time.
    #[inline]
    pub fn post(&self, number: u64, words: [u64; N]) {
        self.pages[place(number).0].write(words);
    }

    /// The headline with this number, or a later one if that has taken its place; with its number. Nothing if it was
    /// not posted yet, or if something is being written in its place.
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
        let headline = Headline::new();
        assert_eq!(headline.read(1), None);
        (1..=4).for_each(|k| headline.post(k, [k]));
        assert_eq!([1, 2, 3, 5].map(|k| headline.read(k)), [Some((3, [3])), Some((4, [4])), Some((3, [3])), None]);
    }

    /// Of several members, with nothing in between: nobody ever finds another number than the one he is at.
    #[test]
    fn members_in_step_miss_nothing() {
        const ROUNDS: u64 = crate::sync::rounds(3000) as u64;
        let all: [Headline<7>; 3] = Default::default();
        thread::scope(|s| {
            for me in 0..3 {
                let all = &all;
                s.spawn(move || {
                    for k in 1..=ROUNDS {
                        all[me].post(k, [k * (me as u64 + 1); 7]);
                        for (peer, headline) in all.iter().enumerate() {
                            let read = loop {
                                if let Some(read) = headline.read(k) {
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
    fn who_listens_now_and_then_finds_whole_headlines_and_their_numbers() {
        const LAST: u64 = crate::sync::rounds(100_000) as u64;
        let (headline, done) = (Headline::<7>::new(), AtomicBool::new(false));
        thread::scope(|s| {
            s.spawn(|| {
                (1..=LAST).for_each(|k| headline.post(k, [k; 7]));
                done.store(true, Ordering::Release);
            });
            let mut next = 1;
            while !done.load(Ordering::Acquire) {
                if let Some((number, words)) = headline.read(next) {
                    assert!(number >= next && words == [number; 7], "{number} for {next}: {words:?}");
                    next = number + 1;
                }
            }
        });
        assert_eq!(headline.read(LAST), Some((LAST, [LAST; 7])));
    }
}
