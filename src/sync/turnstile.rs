//! Decides a race for a queued entry: either the device thread runs it, or the caller withdraws it.
//!
//! Both transitions, from queued to running or to withdrawn, are one compare-and-swap, so exactly one of them happens.
//! The loser sees everything that the winner did before its call.

use super::shim::atomic::{
    AtomicU32,
    Ordering::{self, *},
};
use super::site::{flag, ord};

const QUEUED: u32 = 0;
const RUNNING: u32 = 1;
const WITHDRAWN: u32 = 2;

/// The state of one queued entry. `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct Turnstile(AtomicU32);

impl Turnstile {
    pub fn new() -> Self {
        Turnstile(AtomicU32::new(QUEUED))
    }

    /// False if the entry was withdrawn (or started before).
    pub fn start(&self) -> bool {
        self.leave(RUNNING, ord("turnstile.start", Release), ord("turnstile.start.lost", Acquire))
    }

    /// False if the entry was started (or withdrawn before).
    pub fn withdraw(&self) -> bool {
        self.leave(WITHDRAWN, ord("turnstile.withdraw", Release), ord("turnstile.withdraw.lost", Acquire))
    }

    /// Whether the entry is still queued. True may be outdated on return, so use it for reports, not for decisions.
    pub fn is_queued(&self) -> bool {
        self.0.load(Relaxed) == QUEUED
    }

    fn leave(&self, to: u32, won: Ordering, lost: Ordering) -> bool {
        if flag("turnstile.load_then_store") {
            let queued = self.is_queued();
            self.0.store(to, won);
            return queued;
        }
        self.0.compare_exchange(QUEUED, to, won, lost).is_ok()
    }
}
