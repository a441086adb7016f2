//! Jobs: a closure that borrows from the caller's stack runs on device threads, and the caller waits for all of them.
//!
//! It is the only place that erases a lifetime. The protocol:
//!
//! 1. The caller makes a [`Ticket`] from a borrowed body and hands clones of it to the queues ([`super::dispatch`]).
//! 2. A device thread moves its turnstile from QUEUED to RUNNING by compare-and-swap. Only then it touches the body.
//! 3. Or the caller moves the turnstile from QUEUED to WITHDRAWN (deadline), and counts that member as done itself.
//! 4. Each member counts the latch down exactly once, after its last use of the body.
//! 5. [`Waiting`] waits for the latch when it is dropped. So the caller's frame outlives all uses of the body, even if
//!    the caller unwinds.
//!
//! A ticket that is still in a queue after the scope has returned holds a dangling pointer to the body, never
//! dereferenced, since the turnstile is WITHDRAWN. `loom_tests/job.rs` checks all of this. The design is that of
//! rayon's `StackJob` and `LatchRef`.

use crate::sync::{CountLatch, EventCount, Turnstile, shim::Arc};
use crossbeam::utils::CachePadded;
use std::{mem, time::Duration};

/// The closure that a device thread runs. Arguments: the thread's context, and its rank in the gang.
pub type Body<'a, C> = dyn Fn(&C, usize) + Sync + 'a;

/// A scope's entry in the queues of its members.
pub struct Ticket<C: 'static> {
    body: *const Body<'static, C>,
    turnstiles: Box<[CachePadded<Turnstile>]>,
    latch: CountLatch,
}

// SAFETY: `body` points to a `Sync` closure, which any thread may call while the caller's frame lives. Turnstile and
// latch decide when a thread may touch it: see the module docs.
unsafe impl<C> Send for Ticket<C> {}
// SAFETY: as above; turnstiles and latch are `Sync`.
unsafe impl<C> Sync for Ticket<C> {}

impl<C: 'static> Ticket<C> {
    /// Runs `body` for a rank, unless that entry was withdrawn, and counts the member as done. The body must not
    /// unwind. Returns whether the body ran.
    pub fn run(&self, context: &C, rank: usize) -> bool {
        if !self.turnstiles[rank].start() {
            return false;
        }
        let done = Done(&self.latch);
        // SAFETY: this thread won the turnstile, so the latch has not counted this member yet. So `Waiting` still
        // waits, and the frame from which the body borrows is alive.
        let body = unsafe { &*self.body };
        body(context, rank);
        drop(done);
        true
    }
}

/// Counts one member as done when dropped, even if the body unwinds against its contract.
struct Done<'a>(&'a CountLatch);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        // SAFETY: the latch is part of a ticket, and the device thread holds a reference to the ticket.
        unsafe { CountLatch::set(self.0) }
    }
}

/// The caller's side of a ticket. Its drop waits until every member is done.
pub struct Waiting<'a, C: 'static> {
    ticket: Arc<Ticket<C>>,
    _body: std::marker::PhantomData<&'a Body<'a, C>>,
}

impl<'a, C: 'static> Waiting<'a, C> {
    pub fn new(body: &'a Body<'a, C>, count: usize, waker: Arc<EventCount>) -> Self {
        // SAFETY: only the lifetime changes. A member dereferences the pointer only between winning its turnstile and
        // counting the latch. `Waiting` carries the lifetime 'a, and its drop waits for the latch.
        let body: *const Body<'static, C> = unsafe { mem::transmute::<*const Body<'a, C>, _>(body) };
        let turnstiles = (0..count).map(|_| Turnstile::new().into()).collect();
        let ticket = Arc::new(Ticket { body, turnstiles, latch: CountLatch::new(count, waker) });
        Waiting { ticket, _body: std::marker::PhantomData }
    }

    pub fn ticket(&self) -> Arc<Ticket<C>> {
        self.ticket.clone()
    }

    pub fn wait(&self, limit: Option<Duration>, linger: Duration) -> bool {
        self.ticket.latch.wait(limit, linger)
    }

    pub fn is_queued(&self, rank: usize) -> bool {
        self.ticket.turnstiles[rank].is_queued()
    }

    /// Withdraws an entry that has not started. Returns false if it has started.
    pub fn withdraw(&self, rank: usize) -> bool {
        let withdrawn = self.ticket.turnstiles[rank].withdraw();
        if withdrawn {
            drop(Done(&self.ticket.latch));
        }
        withdrawn
    }
}

impl<C: 'static> Drop for Waiting<'_, C> {
    /// Waits even if the caller unwinds: the members borrow from its frame.
    fn drop(&mut self) {
        self.ticket.latch.wait(None, Duration::ZERO);
    }
}
