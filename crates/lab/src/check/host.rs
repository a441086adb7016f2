//! The clocks of host threads, and how the knowledge of one thread is given to another.

use super::{
    Checker,
    clock::Clock,
    state::{HostId, State},
};
use gpu_pool::extend::lab::Knowledge;
use parking_lot::MutexGuard;
use std::{any::Any, cell::RefCell, sync::Weak};

/// The knowledge of one host thread, to be given to another.
#[derive(Clone, Default)]
pub struct Token(Clock);

gpu_pool::debug_as!(Token, |self| ..);

impl Token {
    pub(super) fn new(clock: Clock) -> Self {
        Token(clock)
    }

    /// Adds the knowledge of another thread.
    pub fn join(&mut self, other: &Token) {
        self.0.join(&other.0);
    }
}

#[doc(hidden)]
impl Knowledge for Token {
    fn join(&mut self, other: &dyn Knowledge) {
        if let Some(other) = (other as &dyn Any).downcast_ref() {
            self.join(other);
        }
    }

    fn copied(&self) -> Box<dyn Knowledge> {
        Box::new(self.clone())
    }
}

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
        // A thread that is ending has no seat any more: all such threads share the first seat.
        let Ok(id) = SEATS.try_with(mine) else { return (self.state.lock(), 0) };
        let mut state = self.state.lock();
        let id = match id {
            Some(id) => id,
            None => {
                let id = state.host_enters();
                let gone = SEATS.with_borrow_mut(|seats| {
                    seats.push(Seat { checker: self.me.clone(), id });
                    seats.extract_if(.., |seat| seat.checker.strong_count() == 0).collect::<Vec<_>>()
                });
                drop(gone);
                id
            }
        };
        state.tell(id, self);
        (state, id)
    }

    /// The operations that the calling host thread knows to be complete. Use it to hand work to another thread by means
    /// that the crate does not see.
    pub fn release(&self) -> Token {
        let (state, id) = self.enter();
        Token(state.host(id).clock.clone())
    }

    /// Gives the calling host thread the knowledge that another one has [released](Self::release).
    pub fn acquire(&self, token: &Token) {
        let (mut state, id) = self.enter();
        state.learn(id, &token.0);
    }
}

struct Within {
    checker: Weak<Checker>,
    /// The clock of the stream before the function, until the thread has taken it over.
    before: Option<Clock>,
    outside: Option<Clock>,
}

thread_local! {
    static WITHIN: RefCell<Vec<Within>> = const { RefCell::new(Vec::new()) };
}

/// While this guard lives, its thread has a stream's knowledge: it takes the clock over when it first asks for its
/// seat. A function that never asks must not take the account's lock: its owner may wait for room in a stream's queue.
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
    fn tell(&mut self, id: HostId, checker: &Checker) {
        let told = WITHIN.try_with(|all| {
            for within in all.borrow_mut().iter_mut().filter(|within| std::ptr::eq(within.checker.as_ptr(), checker)) {
                if let Some(before) = within.before.take() {
                    within.outside = Some(self.host(id).clock.clone());
                    self.learn(id, &before);
                }
            }
        });
        // The access fails only in a thread that is ending, and such a thread runs no host function.
        let _ = told;
    }
}
