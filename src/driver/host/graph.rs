//! Graphs: operations that a stream has recorded instead of run. They can be launched any number of times.
//!
//! A graph is a list of operations; a launch appends copies of them to a stream. So order, conflicts, engines and
//! deadlocks are those of operations that are submitted one by one. Only the number of host calls differs.

use super::{fault, op::Op, sched::Core, slab::Key, stream::Stream};
use crate::driver::DriverResult;

impl Stream {
    /// Refuses, during a capture, operations that a graph cannot hold.
    pub fn check_no_capture(&self) -> DriverResult {
        match self.capture {
            Some(_) => Err(fault::unsupported("the stream captures, and a graph cannot hold that")),
            None => Ok(()),
        }
    }
}

impl Core {
    /// Records an operation of a capturing stream.
    pub fn capture(&mut self, device: usize, key: Key, op: Op) -> DriverResult {
        let stream = self.stream(device, key)?;
        if !op.work.is_capturable() {
            // The operation may own a closure, which must be dropped without the lock.
            self.graveyard.push(op);
            return Err(fault::unsupported("the stream captures, and a graph cannot hold that"));
        }
        stream.capture.get_or_insert_default().push(op);
        Ok(())
    }
}
