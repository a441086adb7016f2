//! What host threads know, and how one thread's knowledge comes to another.

use super::{
    Checker,
    clock::Clock,
    state::{HostId, State},
};
use parking_lot::MutexGuard;
use std::{cell::RefCell, sync::Weak};

/// What one host thread knows, on its way to another.
#[derive(Clone, Default)]
pub struct Token(Clock);

impl Token {
    pub(super) fn new(clock: Clock) -> Self {
        Token(clock)
    }

    /// Adds what another thread knows.
    pub fn join(&mut self, other: &Token) {
        self.0.join(&other.0);
    }

    /// The same where there may be no checker, and then are no tokens.
    pub(crate) fn add(to: &mut Option<Box<Token>>, other: Option<Box<Token>>) {
        match (to, other) {
            (Some(known), Some(other)) => known.join(&other),
            (known, Some(other)) => *known = Some(other),
            (_, None) => {}
        }
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
        state.tell(id, self);
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

/// A host function that a thread is running.
struct Within {
    checker: Weak<Checker>,
    /// What is known before it, until the thread has been told.
    before: Option<Clock>,
    /// What the thread knew when it was told.
    outside: Option<Clock>,
}

thread_local! {
    static WITHIN: RefCell<Vec<Within>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, its thread knows what a stream knew: for functions that run in stream order.
///
/// The thread is told when it first asks for its seat. A function that never does must not need the lock of the
/// account: whoever has that may be waiting for room in a stream's queue, which there is when the function has run.
pub(super) struct InStream {
    checker: Weak<Checker>,
}

impl InStream {
    pub fn enter(checker: Weak<Checker>, clock: Clock) -> Self {
        let within = Within { checker: checker.clone(), before: Some(clock), outside: None };
        WITHIN.with_borrow_mut(|all| all.push(within));
        InStream { checker }
    }
}

impl Drop for InStream {
    fn drop(&mut self) {
        let within = WITHIN.with_borrow_mut(Vec::pop);
        if let (Some(outside), Some(checker)) = (within.and_then(|within| within.outside), self.checker.upgrade()) {
            let (mut state, id) = checker.enter();
            state.host_becomes(id, outside);
        }
    }
}

impl State {
    /// Tells a thread what it knows as the runner of host functions.
    fn tell(&mut self, id: HostId, checker: &Checker) {
        let told = WITHIN.try_with(|all| {
            for within in all.borrow_mut().iter_mut().filter(|within| std::ptr::eq(within.checker.as_ptr(), checker)) {
                if let Some(before) = within.before.take() {
                    within.outside = Some(self.host(id).clock.clone());
                    self.learn(id, &before);
                }
            }
        });
        // A thread that is ending runs no host function.
        let _ = told;
    }
}
