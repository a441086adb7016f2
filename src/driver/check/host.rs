//! What host threads know, and how one thread's knowledge comes to another.

use super::{
    Checker,
    clock::Clock,
    state::{HostId, State},
};
use parking_lot::MutexGuard;
use std::{
    cell::RefCell,
    sync::{Arc, Weak},
};

/// What one host thread knows, on its way to another.
#[derive(Clone, Default)]
pub struct Token(Clock);

impl Token {
    /// Adds what another thread knows.
    pub fn join(&mut self, other: &Token) {
        self.0.join(&other.0);
    }
}

/// A thread's place in the account of one checker; given up when the thread ends.
struct Seat {
    checker: Weak<Checker>,
    id: HostId,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(checker) = self.checker.upgrade() {
            checker.state.lock().host_leaves(self.id);
        }
    }
}

thread_local! {
    static SEATS: RefCell<Vec<Seat>> = const { RefCell::new(Vec::new()) };
}

impl Checker {
    /// The account, and the calling thread's seat in it.
    pub(super) fn enter(&self) -> (MutexGuard<'_, State>, HostId) {
        let mine = |seats: &RefCell<Vec<Seat>>| {
            let seats = seats.borrow();
            seats.iter().find(|seat| std::ptr::eq(seat.checker.as_ptr(), self)).map(|seat| seat.id)
        };
        // A thread that is ending has no seat any more: all of those share the first one.
        let Ok(id) = SEATS.try_with(mine) else { return (self.state.lock(), 0) };
        let mut state = self.state.lock();
        let id = match id {
            Some(id) => id,
            None => {
                let id = state.host_enters();
                let gone = SEATS.with_borrow_mut(|seats| {
                    seats.push(Seat { checker: self.me.clone(), id });
                    // Of checkers that are no more.
                    seats.extract_if(.., |seat| seat.checker.strong_count() == 0).collect::<Vec<_>>()
                });
                drop(gone);
                id
            }
        };
        (state, id)
    }

    /// What the calling host thread knows to be over: for handing work to another thread by means the crate cannot see.
    pub fn release(&self) -> Token {
        let (state, id) = self.enter();
        Token(state.host(id).clock.clone())
    }

    /// The calling host thread comes to know what another one has [released](Self::release).
    pub fn acquire(&self, token: &Token) {
        let (mut state, id) = self.enter();
        state.learn(id, &token.0);
    }
}

/// While it lives, its thread knows what a stream knew: for functions that run in stream order.
pub(super) struct InStream {
    checker: Arc<Checker>,
    outside: Clock,
}

impl InStream {
    pub fn enter(checker: Arc<Checker>, clock: &Clock) -> Self {
        let (mut state, id) = checker.enter();
        let outside = state.host(id).clock.clone();
        state.learn(id, clock);
        drop(state);
        InStream { checker, outside }
    }
}

impl Drop for InStream {
    fn drop(&mut self) {
        let (mut state, id) = self.checker.enter();
        state.host_becomes(id, std::mem::take(&mut self.outside));
    }
}
