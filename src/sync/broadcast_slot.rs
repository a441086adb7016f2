//! A slot for one thread's messages to several others.
//!
//! With a [`ring`](super::ring) per reader there are a slot and an index per reader, in cache lines of their own. Here
//! the writer writes one line, and all readers read it. The writer cannot run ahead: the members that meet see to that.
//! Broadcasts are numbered from 1 and posted in order by one thread, on two pages in turn (each is a [`Mirror`]). That
//! is enough for members that meet again and again (`README.md` has the proof). A reader that is late finds another
//! number, and never parts of two broadcasts.

use super::{Mirror, site::flag};

/// The last two broadcasts of one thread, of `N` words each. `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct BroadcastSlot<const N: usize> {
    pages: [Mirror<N>; 2],
}

/// The page of a broadcast; how many it had before; and a function from that count to the page's last number.
fn place(number: u64) -> (usize, u64, impl Fn(u64) -> u64) {
    let pages = if flag("broadcast_slot.one_page") { 1 } else { 2 };
    let page = (number - 1) % pages;
    (page as usize, (number - 1) / pages, move |count| (count - 1) * pages + page + 1)
}

impl<const N: usize> BroadcastSlot<N> {
    pub fn new() -> Self {
        BroadcastSlot { pages: [Mirror::new(), Mirror::new()] }
    }

    /// Numbers are consecutive, from 1. By one thread at a time.
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
