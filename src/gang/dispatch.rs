//! How gangs reach device threads: queues, and the one order in which they are entered.
//!
//! Each device thread has an [`Inbox`] of entries and an [`EventCount`] to sleep on. A gang enters the inboxes of all
//! its members under one lock, so any two gangs that share devices are in the same order in each of their queues.
//! Device threads work their queues in order; so no two gangs can each hold a device that the other waits for, whatever
//! their members and whoever called them (pytorch#8388 is that deadlock). The lock is the process's, not the pool's:
//! pools that share a GPU are ordered too ([`super::turn`]).

use super::job::Ticket;
use crate::sync::{EventCount, Inbox, shim::Arc, shim::Mutex};
use std::collections::VecDeque;

/// What a device thread finds in its queue.
pub enum Entry<C: 'static> {
    /// Its part of a gang: run `ticket` as `rank`. `turn` is its place in the order of its physical GPU.
    Gang {
        /// The scope's ticket.
        ticket: Arc<Ticket<C>>,
        /// This device's rank in the gang.
        rank: usize,
        /// The place in the queue of the physical GPU: which entries there must be over.
        turn: u64,
    },
    /// A small errand of the pool (drop state, report).
    Task(Box<dyn FnOnce(&C) + Send>),
    /// The last entry: leave the loop.
    Stop,
}

/// The queue of one device thread. Anyone posts, the device thread takes.
///
/// On cache lines of its own: side by side, a post to one queue would disturb all threads that look at theirs.
#[repr(align(128))]
pub struct Queue<C: 'static> {
    inbox: Inbox<Entry<C>>,
    waker: Arc<EventCount>,
}

impl<C: 'static> Default for Queue<C> {
    fn default() -> Self {
        Self::new()
    }
}

impl<C: 'static> Queue<C> {
    /// An empty queue with a waker of its own.
    pub fn new() -> Self {
        Queue { inbox: Inbox::new(), waker: Arc::new(EventCount::new()) }
    }

    /// What the device thread sleeps on, for all its waits.
    pub fn waker(&self) -> &Arc<EventCount> {
        &self.waker
    }

    /// Adds an entry and wakes the thread.
    pub fn post(&self, entry: Entry<C>) {
        self.inbox.push(entry);
        self.waker.notify();
    }

    /// The next entry, in order; waits for one. `taken` is the device thread's own list of entries it has taken
    /// already.
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

impl Default for Order {
    fn default() -> Self {
        Self::new()
    }
}

impl Order {
    /// One for a process (or a model).
    pub fn new() -> Self {
        Order(Mutex::new(()))
    }

    /// Enters a gang into the queues of its members. `turn(rank)` is asked under the lock.
    pub fn enter<C: 'static>(&self, ticket: &Arc<Ticket<C>>, queues: &[&Queue<C>], turn: impl Fn(usize) -> u64) {
        let order = self.0.lock();
        for (rank, queue) in queues.iter().enumerate() {
            queue.inbox.push(Entry::Gang { ticket: ticket.clone(), rank, turn: turn(rank) });
        }
        drop(order);
        // Waking is outside: it may cost microseconds a thread, and needs no order.
        for queue in queues {
            queue.waker.notify();
        }
    }
}
