//! Broadcasts: a message of a member to all members of its gang at once, in one cache line that all of them read.
//!
//! [`mailbox`](super::mailbox) uses this instead of its rings where it can: with eight threads a meeting by rings
//! fetched more than forty lines each, and took 3 to 5 us. With a [`BroadcastSlot`](crate::sync::BroadcastSlot) a
//! member writes one line and reads seven.
//!
//! Invariant 1: no broadcast is overwritten before all members have read it. A member ends a meeting of the gang when
//! it has read the broadcasts of all members that stay; or the gang has failed, and the member posts no more. So no
//! member posts broadcast `k + 2` before all have read `k`, the contract of the slot. Each gang has slots of its own.
//!
//! Invariant 2: broadcasts and ring messages of one member arrive in one order. A member posts a broadcast only when
//! its rings to all others are empty, and each ring message says how many broadcasts came before.

use crate::gang::{BROADCAST_WORDS, Gang};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};

pub(crate) type Words = [u64; BROADCAST_WORDS];

/// Most members of a gang with broadcasts. Calls of larger gangs have no [compact](super::compact) form.
pub(crate) const MOST: usize = 16;

#[derive(Default)]
pub(crate) struct Broadcasts {
    posted: Cell<u64>,
    received: RefCell<SmallVec<[u64; MOST]>>,
}

impl Broadcasts {
    /// Returns false when the gang has no broadcasts.
    pub(crate) fn post(&self, gang: &Gang, rank: usize, words: Words) -> bool {
        let Some(own) = gang.broadcast_slot(rank) else { return false };
        self.posted.set(self.posted.get() + 1);
        own.post(self.posted.get(), words);
        true
    }

    pub(crate) fn posted(&self) -> u64 {
        self.posted.get()
    }

    pub(crate) fn received(&self, rank: usize) -> u64 {
        self.received.borrow().get(rank).copied().unwrap_or(0)
    }

    /// The next of the first `most` broadcasts of a member, if it was posted.
    #[inline]
    pub(crate) fn read(&self, gang: &Gang, rank: usize, most: u64) -> Option<Words> {
        let slot = gang.broadcast_slot(rank)?;
        let mut received = self.received.borrow_mut();
        if received.len() <= rank {
            received.resize(gang.count(), 0);
        }
        if received[rank] >= most {
            return None;
        }
        let (number, words) = slot.read(received[rank] + 1)?;
        debug_assert_eq!(number, received[rank] + 1, "no member posts the next but one before all have read this one");
        received[rank] = number;
        Some(words)
    }
}
