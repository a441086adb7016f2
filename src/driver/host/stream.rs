//! Streams: queues of operations that run one after the other.
//!
//! Invariant: an idle stream is on no list, a ready stream is in the ready queue, one worker has an active stream, and
//! a parked stream is on the list of its obstacle.
//!
//! A graph is a list of operations that a capturing stream has recorded; a launch appends copies of them to a stream.

use super::{Core, Key, Op, Time, fault};
use crate::driver::{DriverResult, Fault};
use parking_lot::Condvar;
use std::{collections::VecDeque, sync::Arc};

#[derive(Default)]
pub(super) struct Stream {
    pub device: usize,
    /// In order of creation on the device, from 0.
    pub number: usize,
    pub priority: i32,
    pub state: State,
    pub queue: VecDeque<Op>,
    pub capture: Option<Vec<Op>>,
    pub submitted: u64,
    /// Operations complete in order.
    pub completed: u64,
    /// Number of operations that had really completed when the device was lost.
    pub failed_from: Option<u64>,
    pub destroyed: bool,
    pub waiters: Vec<Waiter>,
    /// A failure of this stream alone, until a wait for the stream has reported it.
    pub harm: Option<Harm>,
    /// For a kernel at the head that has not finished: the machine's count of completed operations at its last try.
    pub tried: Option<u64>,
    /// Virtual times at which its operations finished, by number (from 1).
    pub finishes: Vec<Time>,
}

pub(super) struct Harm {
    pub after: u64,
    pub fault: Fault,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Idle,
    Ready,
    Active,
    Parked,
}

/// A stream or host thread that continues when another stream has completed `seq` operations.
pub(super) struct Waiter {
    pub seq: u64,
    pub who: Who,
}

pub(super) enum Who {
    Stream(Key),
    Thread(Arc<Condvar>),
}

impl Stream {
    pub fn finish(&self, seq: u64) -> Time {
        let last = self.finishes.len().min(seq as usize);
        last.checked_sub(1).map_or(0, |i| self.finishes[i])
    }

    /// After number `after`. An earlier failure that was not reported yet stays.
    pub fn hurt(&mut self, after: u64, fault: Fault) {
        self.harm.get_or_insert(Harm { after, fault });
    }

    pub fn check_no_capture(&self) -> DriverResult {
        fail_if!(self.capture.is_some(), fault::unsupported("the stream captures, and a graph cannot hold that"));
        Ok(())
    }
}

impl Core {
    pub fn capture(&mut self, device: usize, key: Key, op: Op) -> DriverResult {
        let stream = self.stream(device, key)?;
        if op.work.again().is_none() {
            // The operation may own a closure, which must be dropped without the lock.
            self.graveyard.push(op);
            return Err(fault::unsupported("the stream captures, and a graph cannot hold that"));
        }
        stream.capture.get_or_insert_default().push(op);
        Ok(())
    }
}
