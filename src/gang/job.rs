//! A closure borrowed from the caller's stack runs on device threads; the caller waits for all of them.
//!
//! This is the one place that erases a lifetime. The protocol:
//!
//! 1. The caller makes a [`Ticket`] from a borrowed body and hands clones of it to the queues ([`super::dispatch`]).
//! 2. A device thread takes its turnstile from QUEUED to RUNNING by compare-and-swap; only then does it touch the body.
//! 3. Or the caller takes it from QUEUED to WITHDRAWN (deadline), and counts that member as done itself.
//! 4. Each member counts the latch down exactly once, after its last touch of the body.
//! 5. [`Waiting`] waits for the latch when it is dropped, so the caller's frame outlives all uses of the body also when
//!    the caller unwinds.
//!
//! A ticket that is still in a queue after the scope has returned holds a dangling body, which nobody touches, since
//! its turnstile is WITHDRAWN. `loom_tests/job.rs` checks all of this. The shape is rayon's `StackJob`/`LatchRef`
//! (rayon-core/src/job.rs), with the latch in the ticket instead of in the frame.

use crate::sync::{CountLatch, EventCount, Turnstile, shim::Arc};
use crossbeam::utils::CachePadded;
use std::{mem, time::Duration};

/// What a device thread runs: `(what the thread owns, rank in the gang)`.
pub type Body<'a, C> = dyn Fn(&C, usize) + Sync + 'a;

/// A scope's entry in the queues of its members.
pub struct Ticket<C: 'static> {
    body: *const Body<'static, C>,
    turnstiles: Box<[CachePadded<Turnstile>]>,
    latch: CountLatch,
}

// SAFETY: `body` points to a `Sync` closure, which may be called from any thread while the caller's frame lives; when
// it may be touched is governed by turnstile and latch, see the module docs.
unsafe impl<C> Send for Ticket<C> {}
// SAFETY: as above; turnstiles and latch are `Sync`.
unsafe impl<C> Sync for Ticket<C> {}

impl<C: 'static> Ticket<C> {
    /// Runs `body` for rank `rank` unless that entry was withdrawn; counts it as done. The body must not unwind.
    /// Returns whether it ran.
    pub fn run(&self, context: &C, rank: usize) -> bool {
        if !self.turnstiles[rank].start() {
            return false;
        }
        let done = Done(&self.latch);
        // SAFETY: this thread won the turnstile, so this member has not been counted by the latch yet, so `Waiting` (or
        // the scope that owns it) still holds the frame that the body borrows from.
        let body = unsafe { &*self.body };
        body(context, rank);
        drop(done);
        true
    }
}

/// Counts one member as done, also when the body unwinds against its contract.
struct Done<'a>(&'a CountLatch);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        // SAFETY: the latch lives in a ticket that the device thread holds a reference to.
        unsafe { CountLatch::set(self.0) }
    }
}

/// The caller's side of a ticket: it does not let go before every member is done.
pub struct Waiting<'a, C: 'static> {
    ticket: Arc<Ticket<C>>,
    _body: std::marker::PhantomData<&'a Body<'a, C>>,
}

impl<'a, C: 'static> Waiting<'a, C> {
    /// A ticket for `count` members; `waker` is what the waiting caller sleeps on.
    pub fn new(body: &'a Body<'a, C>, count: usize, waker: Arc<EventCount>) -> Self {
        // SAFETY: only the lifetime changes. The pointer is dereferenced only by a member that won its turnstile and
        // has not counted the latch, and `Waiting`, which carries the lifetime 'a, waits for the latch before it goes.
        let body: *const Body<'static, C> = unsafe { mem::transmute::<*const Body<'a, C>, _>(body) };
        let turnstiles = (0..count).map(|_| Turnstile::new().into()).collect();
        let ticket = Arc::new(Ticket { body, turnstiles, latch: CountLatch::new(count, waker) });
        Waiting { ticket, _body: std::marker::PhantomData }
    }

    /// To be handed to a queue.
    pub fn ticket(&self) -> Arc<Ticket<C>> {
        self.ticket.clone()
    }

    /// Waits at most `limit`; whether all members are done.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        self.ticket.latch.wait(limit)
    }

    /// Whether a member has not started.
    pub fn is_queued(&self, rank: usize) -> bool {
        self.ticket.turnstiles[rank].is_queued()
    }

    /// Takes an entry back that has not started. Whether it was still there to take.
    pub fn withdraw(&self, rank: usize) -> bool {
        let withdrawn = self.ticket.turnstiles[rank].withdraw();
        if withdrawn {
            drop(Done(&self.ticket.latch));
        }
        withdrawn
    }
}

impl<C: 'static> Drop for Waiting<'_, C> {
    /// Also when the caller unwinds: the members borrow from its frame.
    fn drop(&mut self) {
        self.ticket.latch.wait(None);
    }
}
