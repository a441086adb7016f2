//! Shutdown against submission. Invariant: no thread enters after the gate was closed and found empty.
//!
//! ```text
//!   word = 2 * (passes in flight) + (1 if closed)
//! ```
//!
//! [`Gate::enter`] adds a pass *first* and reads the closed bit of the same value: else a close and a drain could come
//! between. One that finds it closed removes its pass, so it may wake the waiter once more than needed, never less.

use super::{
    EventCount,
    shim::atomic::{AtomicUsize, Ordering::*},
    site::{flag, ord},
};
use std::time::Duration;

const CLOSED: usize = 1;
const PASS: usize = 2;

/// `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct Gate {
    word: AtomicUsize,
    drained: EventCount,
}

/// The right to be inside a [`Gate`]; its drop leaves the gate.
#[derive(Debug)]
#[must_use = "the pass is given back when it is dropped"]
pub struct Pass<'a>(&'a Gate);

impl Gate {
    pub fn new() -> Self {
        Gate { word: AtomicUsize::new(0), drained: EventCount::new() }
    }

    /// A pass, or `None` if the gate is closed. After `None`, everything done before the close is visible.
    pub fn enter(&self) -> Option<Pass<'_>> {
        if flag("gate.looks_before_adding") {
            if self.is_closed() {
                return None;
            }
            self.word.fetch_add(PASS, ord("gate.enter", Acquire));
            return Some(Pass(self));
        }
        let before = self.word.fetch_add(PASS, ord("gate.enter", Acquire));
        debug_assert!(before < usize::MAX - PASS, "passes are forgotten by the billion");
        let pass = Pass(self);
        (before & CLOSED == 0).then_some(pass)
    }

    /// True if this call was the first.
    pub fn close(&self) -> bool {
        self.word.fetch_or(CLOSED, ord("gate.close", Release)) & CLOSED == 0
    }

    pub fn is_closed(&self) -> bool {
        self.word.load(ord("gate.is_closed", Acquire)) & CLOSED != 0
    }

    /// Waits until a closed gate has no passes; false if `limit` came first. After true, everything done under passes
    /// is visible. Panics: if the gate is open: then "no passes" would mean nothing.
    pub fn wait_drained(&self, limit: Option<Duration>) -> bool {
        assert!(self.is_closed(), "wait_drained on an open gate");
        self.drained
            .wait_until(limit, || (self.word.load(ord("gate.drained", Acquire)) == CLOSED).then_some(()))
            .is_some()
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let before = self.0.word.fetch_sub(PASS, ord("gate.leave", Release));
        if before == PASS + CLOSED && !flag("gate.leave.silent") {
            self.0.drained.notify();
        }
    }
}
