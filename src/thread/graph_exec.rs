//! A graph of the driver, and the launches of it that may be in flight.
//!
//! `graph/` launches it. If it is dropped in flight, the worker keeps it until its launches have ended.
//!
//! Invariant: the driver's graph is destroyed only after all of its launches have ended.

use crate::{
    driver::RawGraph,
    memory::{DeviceHandle, StreamCore},
};
use smallvec::SmallVec;
use std::{cell::RefCell, sync::Arc};

pub(crate) struct GraphExec {
    pub(crate) raw: RawGraph,
    handle: Arc<DeviceHandle>,
    launches: RefCell<Launches>,
}

/// The last launch on each stream: the stream, and the launch's number there.
type Launches = SmallVec<[(Arc<StreamCore>, u64); 2]>;

impl GraphExec {
    /// `raw` is a graph of this device that was not launched yet; the value owns it from now on.
    pub(crate) fn new(raw: RawGraph, handle: &Arc<DeviceHandle>) -> Self {
        GraphExec { raw, handle: handle.clone(), launches: RefCell::default() }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.launches.borrow().iter().all(|(stream, sequence)| stream.has_completed(*sequence))
    }

    pub(crate) fn launched(&self, stream: &Arc<StreamCore>, sequence: u64) {
        let mut launches = self.launches.borrow_mut();
        launches.retain(|(other, sequence)| other.id != stream.id && !other.is_over(*sequence));
        launches.push((stream.clone(), sequence));
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if !self.is_over() {
            event!(warn, "graph_leaked", device = self.handle.device, "a graph still in flight was leaked");
            return;
        }
        // SAFETY: this value owns the graph, it is a graph of this device, and its launches have ended.
        if let Err(fault) = unsafe { self.handle.driver.graph_destroy(self.raw) } {
            event!(debug, "graph_not_destroyed", device = self.handle.device, %fault, "a graph could not be destroyed");
        }
    }
}
