//! Streams: queues of operations that run one after the other.
//!
//! A stream is on exactly one list: none when idle, the ready queue, a worker's hands, or (parked) the list of whatever
//! lets it go on: another stream's waiters, an engine's queue, the conflicting accesses, the awaited values.

use super::{clock::Time, op::Op, slab::Key};
use crate::driver::Fault;
use parking_lot::Condvar;
use std::{collections::VecDeque, sync::Arc};

pub(super) struct Stream {
    pub device: usize,
    /// Its place among the device's streams in order of creation, from 0.
    pub number: usize,
    pub priority: i32,
    pub state: State,
    pub queue: VecDeque<Op>,
    /// While it captures: what would be in the queue.
    pub capture: Option<Vec<Op>>,
    /// How many operations were ever submitted,
    pub submitted: u64,
    /// and how many of them have completed, in order.
    pub completed: u64,
    /// How many had really completed when the device was lost.
    pub failed_from: Option<u64>,
    /// To be removed once it is idle.
    pub destroyed: bool,
    pub waiters: Vec<Waiter>,
    /// What has gone wrong with operations of this stream alone, until a wait for the stream has told it.
    pub harm: Option<Harm>,
    /// For a kernel at its head that has not finished: how many operations of the machine had, when it was last tried.
    pub tried: Option<u64>,
    /// Virtual times at which its operations were finished, by number (from 1).
    pub finishes: Vec<Time>,
}

/// A failure that leaves the device alive.
pub(super) struct Harm {
    /// The number of the last operation that was well.
    pub after: u64,
    pub fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing to do.
    Idle,
    /// In the ready queue.
    Ready,
    /// A worker has it, with an operation under way.
    Active,
    /// Its head operation cannot run yet.
    Parked,
}

/// Who goes on when a stream has completed `seq` operations.
pub(super) struct Waiter {
    pub seq: u64,
    pub who: Who,
}

pub(super) enum Who {
    Stream(Key),
    Thread(Arc<Condvar>),
}

impl Stream {
    pub fn new(device: usize, number: usize, priority: i32) -> Self {
        Stream {
            device,
            number,
            priority,
            state: State::Idle,
            queue: VecDeque::new(),
            capture: None,
            submitted: 0,
            completed: 0,
            failed_from: None,
            destroyed: false,
            waiters: Vec::new(),
            harm: None,
            tried: None,
            finishes: Vec::new(),
        }
    }

    /// The virtual time at which its first `seq` operations had finished.
    pub fn finish(&self, seq: u64) -> Time {
        let last = self.finishes.len().min(seq as usize);
        last.checked_sub(1).map_or(0, |i| self.finishes[i])
    }

    /// Notes a failure of operations after number `after`; an earlier one that has not been told is the one to tell.
    pub fn hurt(&mut self, after: u64, fault: Fault) {
        self.harm.get_or_insert(Harm { after, fault });
    }
}
