//! Streams: queues of operations that run one after the other.
//!
//! A stream is on exactly one list: none when idle, the ready queue, a worker's hands, or (parked) the list of whatever
//! lets it go on: another stream's waiters, an engine's queue, the conflicting accesses, the awaited values.

use super::{op::Op, slab::Key};
use parking_lot::Condvar;
use std::{collections::VecDeque, sync::Arc};

pub(super) struct Stream {
    pub device: usize,
    pub priority: i32,
    pub state: State,
    pub queue: VecDeque<Op>,
    /// How many operations were ever submitted,
    pub submitted: u64,
    /// and how many of them have completed, in order.
    pub completed: u64,
    /// How many had really completed when the device was lost.
    pub failed_from: Option<u64>,
    /// To be removed once it is idle.
    pub destroyed: bool,
    pub waiters: Vec<Waiter>,
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
    pub fn new(device: usize, priority: i32) -> Self {
        Stream {
            device,
            priority,
            state: State::Idle,
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            failed_from: None,
            destroyed: false,
            waiters: Vec::new(),
        }
    }
}
