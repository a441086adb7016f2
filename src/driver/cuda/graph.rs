//! Graphs: stream capture, executable graphs, their launches.
//!
//! Captures are *relaxed*: a capture must not forbid its thread what the memory pool may have to do meanwhile
//! (allocate, ask an event), as the other modes do. PyTorch's allocator changes the mode around such calls for the same
//! reason ([`CUDAStreamCaptureModeGuard`](https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDAGraphsC10Utils.h)).
//! What the modes guard against, work that slips into a capture or past it, cannot happen here: the streams are the
//! capture's own.

use std::{collections::HashMap, ptr, time::Duration};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};
use parking_lot::Mutex;

use super::{CudaGpu, fault, stream::stream};
use crate::{
    driver::{Address, DriverResult, RawGraph, RawStream},
    sync::Sequence,
};

/// What a device knows of its graphs. A graph with matrix products has a work space of its own.
#[derive(Default)]
pub(super) struct Graphs {
    /// Captures so far, and how many of them have ended: mostly that is the same, and nothing more is asked.
    begun: Sequence,
    ended: Sequence,
    /// Streams that capture.
    captures: Mutex<HashMap<RawStream, Option<Address>>>,
    /// Graphs with a work space.
    spaces: Mutex<HashMap<RawGraph, Address>>,
}

/// An upload takes microseconds; who has waited so long goes on, and the first launch waits for the rest.
const UPLOAD: Duration = Duration::from_secs(1);

fn exec(graph: RawGraph) -> CUgraphExec {
    ptr::with_exposed_provenance_mut(graph.0 as usize)
}

impl CudaGpu {
    pub(super) fn is_capturing(&self, s: RawStream) -> bool {
        self.graphs.begun.get() != self.graphs.ended.get() && self.graphs.captures.lock().contains_key(&s)
    }

    /// For what a graph cannot hold.
    pub(super) fn check_no_capture(&self, s: RawStream) -> DriverResult {
        match self.is_capturing(s) {
            true => Err(fault::unsupported("the stream captures, and a graph cannot hold that")),
            false => Ok(()),
        }
    }

    pub(super) fn capture_begin(&self, s: RawStream) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        // SAFETY: a live stream of this device.
        self.check(unsafe {
            sys::cuStreamBeginCapture_v2(stream(s), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        })?;
        self.graphs.captures.lock().insert(s, None);
        self.graphs.begun.fetch_advance();
        Ok(())
    }

    pub(super) fn capture_end(&self, s: RawStream) -> DriverResult<RawGraph> {
        let Some(space) = self.graphs.captures.lock().remove(&s) else {
            return Err(fault::invalid("the stream does not capture"));
        };
        self.graphs.ended.fetch_advance();
        let graph = self.instantiate(s);
        match (&graph, space) {
            (Ok(graph), Some(space)) => drop(self.graphs.spaces.lock().insert(*graph, space)),
            (Err(_), Some(space)) => {
                // SAFETY: allocated for this capture, of which nothing has run.
                let _ = unsafe { self.mem_free(space) };
            }
            (_, None) => {}
        }
        graph
    }

    fn instantiate(&self, s: RawStream) -> DriverResult<RawGraph> {
        self.enter()?;
        let mut template: CUgraph = ptr::null_mut();
        // SAFETY: a live stream of this device; the pointer is to a live handle.
        let ended = self.check(unsafe { sys::cuStreamEndCapture(stream(s), &mut template) });
        let mut graph: CUgraphExec = ptr::null_mut();
        let made = ended.and_then(|()| {
            // SAFETY: the template was just made; the pointer is to a live handle.
            self.check(unsafe { sys::cuGraphInstantiateWithFlags(&mut graph, template, 0) })
        });
        if !template.is_null() {
            // SAFETY: made above, and used no more: what was instantiated stands by itself.
            let _ = unsafe { sys::cuGraphDestroy(template) };
        }
        made?;
        // Here, where blocking calls may be made, and not at the first launch: other devices' kernels may be waiting
        // for that. What goes wrong with it, the launch says as well. SAFETY: a graph that was just made, and a live
        // stream of this device, which no longer captures.
        let uploaded = self.check(unsafe { sys::cuGraphUpload(graph, stream(s)) });
        let _ = uploaded.and_then(|()| self.stream_wait_idle(s, UPLOAD));
        Ok(RawGraph(graph.expose_provenance() as u64))
    }

    /// # Safety
    /// See [`Driver::graph_launch`](crate::driver::Driver::graph_launch).
    pub(super) unsafe fn graph_launch(&self, graph: RawGraph, s: RawStream) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        // SAFETY: a live graph and a live stream of this device; the memory is the caller's promise.
        self.check(unsafe { sys::cuGraphLaunch(exec(graph), stream(s)) })
    }

    /// # Safety
    /// See [`Driver::graph_destroy`](crate::driver::Driver::graph_destroy).
    pub(super) unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult {
        let space = self.graphs.spaces.lock().remove(&graph);
        self.enter()?;
        // SAFETY: the caller's promise: a graph of this device that is not used again.
        let destroyed = self.check(unsafe { sys::cuGraphExecDestroy(exec(graph)) });
        // SAFETY: the graph's own, and its launches are over.
        let freed = space.map_or(Ok(()), |space| unsafe { self.mem_free(space) });
        destroyed.and(freed)
    }

    /// The work space of the graph that a stream captures, made when it is first needed.
    #[cfg(feature = "blas")]
    pub(super) fn graph_space(&self, s: RawStream, bytes: usize) -> DriverResult<Address> {
        if let Some(space) = self.graphs.captures.lock().get(&s).copied().flatten() {
            return Ok(space);
        }
        let made = self.mem_alloc(bytes)?;
        self.graphs.captures.lock().insert(s, Some(made));
        Ok(made)
    }
}
