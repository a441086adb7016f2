//! Graphs: stream capture, executable graphs, their launches.
//!
//! Captures use the *relaxed* mode, since the memory pool may allocate or query an event during a capture, as in
//! PyTorch
//! ([`CUDAStreamCaptureModeGuard`](https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDAGraphsC10Utils.h)). The
//! other modes guard against foreign work in a capture; here, a capture uses only streams of its own.

use std::{collections::HashMap, ptr, time::Duration};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};
use parking_lot::Mutex;

use super::{CudaGpu, fault, stream::stream};
use crate::{
    driver::{Address, DriverResult, RawGraph, RawStream},
    sync::Sequence,
};

#[derive(Default)]
pub(super) struct Graphs {
    /// Captures that have begun, and those that have ended. Mostly both are equal, and then no lock is needed.
    begun: Sequence,
    ended: Sequence,
    captures: Mutex<HashMap<RawStream, Option<Address>>>,
    spaces: Mutex<HashMap<RawGraph, Address>>,
}

/// An upload takes microseconds. After this time `capture_end` returns anyway, and the first launch waits for the rest.
const UPLOAD: Duration = Duration::from_secs(1);

fn exec(graph: RawGraph) -> CUgraphExec {
    ptr::with_exposed_provenance_mut(graph.0 as usize)
}

impl CudaGpu {
    pub(super) fn is_capturing(&self, s: RawStream) -> bool {
        self.graphs.begun.get() != self.graphs.ended.get() && self.graphs.captures.lock().contains_key(&s)
    }

    pub(super) fn check_no_capture(&self, s: RawStream) -> DriverResult {
        fail_if!(self.is_capturing(s), fault::unsupported("the stream captures, and a graph cannot hold that"));
        Ok(())
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
                // SAFETY: allocated for this capture, whose operations have not run.
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
            // SAFETY: made above and not used again: the executable graph does not need its template.
            let _ = unsafe { sys::cuGraphDestroy(template) };
        }
        made?;
        // The graph is uploaded here, where blocking calls are allowed. The first launch must not do it: other devices'
        // kernels may be waiting for that launch. A fault of the upload is reported by the launch, too. SAFETY: a graph
        // that was just made, and a live stream of this device, which no longer captures.
        let uploaded = self.check(unsafe { sys::cuGraphUpload(graph, stream(s)) });
        let _ = uploaded.and_then(|()| self.stream_wait_idle(s, UPLOAD));
        Ok(RawGraph(graph.expose_provenance() as u64))
    }

    pub(super) unsafe fn graph_launch(&self, graph: RawGraph, s: RawStream) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        // SAFETY: a live graph and a live stream of this device; the memory is the caller's promise.
        self.check(unsafe { sys::cuGraphLaunch(exec(graph), stream(s)) })
    }

    pub(super) unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult {
        let space = self.graphs.spaces.lock().remove(&graph);
        self.enter()?;
        // SAFETY: the caller's promise: a graph of this device that is not used again.
        let destroyed = self.check(unsafe { sys::cuGraphExecDestroy(exec(graph)) });
        // SAFETY: the memory belongs to the graph, whose launches are over.
        let freed = space.map_or(Ok(()), |space| unsafe { self.mem_free(space) });
        destroyed.and(freed)
    }

    #[cfg(feature = "blas")]
    pub(super) fn graph_space(&self, s: RawStream, bytes: usize) -> DriverResult<Address> {
        if let Some(space) = self.graphs.captures.lock().get(&s).copied().flatten() {
            return Ok(space);
        }
        let made = super::gated(|| self.mem_alloc(bytes))?;
        self.graphs.captures.lock().insert(s, Some(made));
        Ok(made)
    }
}
