//! Commit or abort: one word decides for all members of a gang.
//!
//! ```text
//!   word = 2 * (highest committed sequence number) + (1 if aborted)
//! ```
//!
//! Before an operation touches data, each member commits the operation's number. The first member's compare-and-swap
//! commits it for all; an abort sets the low bit. Both change one word, so all members see them in one order:
//!
//! * the commit came first: every member's `commit` of that number is true, also after the abort;
//! * the abort came first: the word's number can never reach that number, and every member's `commit` is false.
//!
//! Numbers are consecutive, and each member commits them in order: its own is behind the word's, or one ahead.

use super::{
    shim::atomic::{AtomicU64, Ordering::*},
    site::{flag, ord},
};

const ABORTED: u64 = 1;

/// The word. `src/sync/README.md` has the protocol.
// On its own cache lines: all members write the word at every operation, and read the data beside it.
#[derive(Debug)]
#[repr(align(128))]
pub struct CommitWord(AtomicU64);

impl CommitWord {
    pub fn new() -> Self {
        CommitWord(AtomicU64::new(0))
    }

    /// Commits `seq` (from 1, consecutive). True if this member or an earlier peer has committed it; false if the abort
    /// came first. After false, everything done before the abort is visible.
    pub fn commit(&self, seq: u64) -> bool {
        self.lead(seq).is_some()
    }

    /// Like [`commit`](Self::commit); true if this call committed the number, false if a peer did; `None` if aborted.
    pub fn lead(&self, seq: u64) -> Option<bool> {
        loop {
            let word = self.0.load(ord("commit.load", Acquire));
            if word >> 1 >= seq {
                return Some(false);
            }
            if word & ABORTED != 0 && !flag("commit.ignores_abort") {
                return None;
            }
            debug_assert_eq!(word >> 1, seq - 1, "sequence numbers are consecutive");
            if flag("commit.load_then_store") {
                self.0.store(seq << 1, ord("commit.cas", Release));
                return Some(true);
            }
            // The value of a failed exchange is not used: the next round's acquiring load decides.
            if self.0.compare_exchange_weak(word, seq << 1, ord("commit.cas", Release), Relaxed).is_ok() {
                return Some(true);
            }
        }
    }

    /// Aborts: no number is committed from now on. True if this call was the first.
    pub fn abort(&self) -> bool {
        self.0.fetch_or(ABORTED, ord("commit.abort", Release)) & ABORTED == 0
    }

    /// Whether the word is aborted. After true, everything done before the abort is visible.
    #[inline]
    pub fn is_aborted(&self) -> bool {
        self.0.load(ord("commit.is_aborted", Acquire)) & ABORTED != 0
    }

    /// The highest committed number. Everything done before that commit is visible.
    pub fn committed(&self) -> u64 {
        self.0.load(ord("commit.committed", Acquire)) >> 1
    }
}
