//! Dispatch: the queues of the device threads, and the one order in which gangs enter them.
//!
//! A scope enters its gang into the queues of all members under one lock per process. Invariant: two gangs that share
//! devices are in the same order in each shared queue, and a device thread takes its entries in order. So two gangs
//! never each hold a device for which the other waits (pytorch#8388 is that deadlock). Pools that share a GPU are
//! ordered, too ([`gpu_order`](super::gpu_order)).

use super::job::Ticket;
use crate::sync::{EventCount, Inbox, shim::Arc, shim::Mutex};
use std::collections::VecDeque;

/// An entry in the queue of a device thread.
pub enum Entry<C: 'static> {
    /// This device's part of a gang: run `ticket` as `rank`.
    Gang {
        ticket: Arc<Ticket<C>>,
        rank: usize,
        /// The turn on the physical GPU: how many entries must have ended there.
        turn: u64,
    },
    /// Work that is in the order of gangs, too, and takes several jobs one after the other, or is a part of one.
    Visit {
        visit: std::sync::Arc<dyn Visit<C>>,
        /// This device's rank among those that the entry was made for.
        rank: usize,
        place: u64,
        turn: u64,
    },
    /// A small task of the pool, for example to drop state.
    Task(Box<dyn FnOnce(&C) + Send>),
    /// The last entry: the thread leaves its loop.
    Stop,
}

/// A device thread's work for a [`Entry::Visit`]. It must not unwind.
pub trait Visit<C>: Send + Sync {
    /// Runs on the device thread. `place` is the visit's place in the order of gangs; `others` says whether a further
    /// entry waits for this thread.
    fn visit(self: std::sync::Arc<Self>, context: &C, rank: usize, place: u64, others: &dyn Fn() -> bool);
}

/// On cache lines of its own: a post to one queue must not slow down the threads that look at its neighbours.
#[repr(align(128))]
pub struct Queue<C: 'static> {
    inbox: Inbox<Entry<C>>,
    waker: Arc<EventCount>,
}

impl<C: 'static> Queue<C> {
    pub fn new() -> Self {
        Queue { inbox: Inbox::new(), waker: Arc::new(EventCount::new()) }
    }

    /// The waker on which the device thread sleeps in all of its waits.
    pub fn waker(&self) -> &Arc<EventCount> {
        &self.waker
    }

    /// Whether an entry waits that the thread has not taken. Outdated when it returns.
    pub fn has_more(&self) -> bool {
        !self.inbox.is_empty()
    }

    pub fn post(&self, entry: Entry<C>) {
        self.inbox.push(entry);
        self.waker.notify();
    }

    /// Waits for the next entry in order. `taken` is the device thread's own list of entries that it has taken already.
    pub fn next(&self, taken: &mut VecDeque<Entry<C>>) -> Entry<C> {
        if let Some(entry) = taken.pop_front() {
            return entry;
        }
        self.waker
            .wait_until(None, || {
                taken.extend(self.inbox.take());
                taken.pop_front()
            })
            .expect("a wait without a limit ends with a result")
    }
}

/// The lock under which gangs enter queues.
pub struct Order(Mutex<()>);

default_is_new!(Queue<C> [C: 'static], Order);

impl Order {
    pub fn new() -> Self {
        Order(Mutex::new(()))
    }

    /// Enters a gang into the queues of its members. Calls `turn(rank)` under the lock.
    pub fn enter<C: 'static>(&self, ticket: &Arc<Ticket<C>>, queues: &[&Queue<C>], turn: impl Fn(usize) -> u64) {
        self.enter_each(queues, |rank| Entry::Gang { ticket: ticket.clone(), rank, turn: turn(rank) });
    }

    /// Enters an entry for each rank into the queues. Calls `entry(rank)` under the lock.
    pub fn enter_each<C: 'static>(&self, queues: &[&Queue<C>], entry: impl Fn(usize) -> Entry<C>) {
        let order = self.0.lock();
        for (rank, queue) in queues.iter().enumerate() {
            queue.inbox.push(entry(rank));
        }
        drop(order);
        // Outside of the lock: waking may take microseconds per thread, and needs no order.
        for queue in queues {
            queue.waker.notify();
        }
    }
}
