//! Graphs: operations that a stream has recorded instead of run. They can be launched any number of times.
//!
//! A graph is a list of operations; a launch appends copies of them to a stream. So order, conflicts, engines and
//! deadlocks are those of operations that are submitted one by one. Only the number of host calls differs.

use super::{
    fault,
    gpu::HostGpu,
    op::{Graph, Op},
    sched::Core,
    slab::Key,
    stream::Stream,
};
use crate::driver::{DriverResult, RawGraph, RawStream};

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

impl HostGpu {
    pub(super) fn begin_capture(&self, stream: RawStream) -> DriverResult {
        let mut state = self.alive()?;
        let stream = state.core.stream(self.index(), stream.0)?;
        stream.check_no_capture()?;
        stream.capture = Some(Vec::new());
        Ok(())
    }

    pub(super) fn end_capture(&self, stream: RawStream) -> DriverResult<RawGraph> {
        let (mut state, device) = (self.lock(), self.index());
        let noted = state.core.stream(device, stream.0)?.capture.take();
        state.core.check_alive(device)?;
        let ops = noted.ok_or_else(|| fault::invalid("the stream does not capture"))?;
        state.core.graphs.insert(Graph { device, ops }).map(RawGraph)
    }

    pub(super) fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> DriverResult {
        let (mut state, device) = (self.alive()?, self.index());
        state.core.stream(device, stream.0)?.check_no_capture()?;
        let found = state.core.graphs.get(graph.0).filter(|graph| graph.device == device);
        let noted = &found.ok_or_else(|| fault::invalid_handle("graph"))?.ops;
        let ops: Vec<Op> = noted.iter().filter_map(Op::again).collect();
        // Either all operations are submitted or none: their memory may have been freed since the capture.
        ops.iter().try_for_each(|op| state.core.admit(device, &op.work))?;
        self.owner().push_all(&mut state, stream.0, ops.into_iter())
    }

    pub(super) fn destroy_graph(&self, graph: RawGraph) -> DriverResult {
        let mut state = self.lock();
        let removed = state.core.graphs.remove(graph.0);
        state.core.check_alive(self.index())?;
        removed.map(drop).ok_or_else(|| fault::invalid_handle("graph"))
    }
}
