//! What a member says to its whole gang at once: one line that all others read, instead of a slot in a ring to each.
//!
//! A ring's slot and its two indices are lines that lie in the caches of two cores; to send to seven and to hear from
//! seven, eight threads fetched more than forty lines each, one meeting took 3 to 5 us. With a headline
//! ([`crate::sync::Headline`]) a member writes one line, and reads seven.
//!
//! Nobody keeps room, and nothing is lost: the members of a gang post one each for a meeting of all of them, and a
//! member leaves the meeting when it has everybody's (of those that stay; or when the gang has failed, and then it
//! posts no more). So nobody posts the next but one before all have read this one
//! ([`Headline`](crate::sync::Headline)'s contract). Each gang has lines of its own.
//!
//! What is said by headline and what goes through a ring has one order, for each pair. A member posts a headline only
//! when its rings to all others of the gang are empty; and a message in a ring says how many headlines its sender had
//! posted before in its gang.

use crate::gang::{Gang, WORDS};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};

/// What it says.
pub(super) type Words = [u64; WORDS];

/// Members of a gang that has headlines, at most: of more, calls are not [short](super::brief).
const MOST: usize = 16;

/// What one member has said and heard in its gang.
#[derive(Default)]
pub(crate) struct Headlines {
    posted: Cell<u64>,
    /// By rank; those at the end that are not there: none.
    heard: RefCell<SmallVec<[u64; MOST]>>,
}

impl Headlines {
    /// Whether a gang of so many members has them.
    pub(crate) fn are_for(members: usize) -> bool {
        (2..=MOST).contains(&members)
    }

    /// Posts this member's next one, if its gang has headlines.
    pub(super) fn post(&self, gang: &Gang, rank: usize, words: Words) -> bool {
        let Some(own) = gang.headline(rank) else { return false };
        self.posted.set(self.posted.get() + 1);
        own.post(self.posted.get(), words);
        true
    }

    /// How many this member has posted.
    pub(super) fn posted(&self) -> u64 {
        self.posted.get()
    }

    /// How many of a member's were heard.
    pub(super) fn heard(&self, rank: usize) -> u64 {
        self.heard.borrow().get(rank).copied().unwrap_or(0)
    }

    /// The next headline of a member, if it is there, of its first `most`.
    #[inline]
    pub(super) fn hear(&self, gang: &Gang, rank: usize, most: u64) -> Option<Words> {
        let headline = gang.headline(rank)?;
        let mut heard = self.heard.borrow_mut();
        if heard.len() <= rank {
            heard.resize(gang.count(), 0);
        }
        if heard[rank] >= most {
            return None;
        }
        let (number, words) = headline.read(heard[rank] + 1)?;
        debug_assert_eq!(number, heard[rank] + 1, "nobody posts the next but one before all have heard this one");
        heard[rank] = number;
        Some(words)
    }
}
