//! Graphs: operations that are captured once and launched often. [`Device::capture`] and [`Device::launch_graph`] have
//! the contract for users. Beside it:
//!
//! * A launch is *one* operation of the current stream that touches all the graph's memory. It is ordered after
//!   conflicting earlier uses and before conflicting later uses, on all devices. If collectives cut the graph, it is
//!   several such operations, one after the other.
//! * No borrow protects that memory during a launch. If another device's thread submits a kernel or a copy on it at the
//!   same time, one comes before the other ([`turn`](crate::memory::turn)). What waits between its steps cannot take
//!   turns: collectives, also those of a graph; the parts of a graph whose kernels meet; uploads and downloads. These
//!   reserve the memory while they last ([`Reserved`](crate::memory::hazard::Reserved)). A conflicting operation of
//!   another device is [`Error::Borrowed`], and so is a launch on another stream while cudarc uses the memory: waiting
//!   for the other thread, which may wait for this one, could deadlock.
//! * The graph keeps the memory that it names. Memory that the closure or the program drops is not reused before the
//!   graph is dropped.
//! * A graph has only device memory: at a launch the program could hold a slice of host memory.
//! * With collectives: all members of the group capture the same calls, meeting on the host for each, and all of them
//!   launch the same graph. Later scopes may launch it, in any gang that has these devices. Sizes for which copy
//!   engines are used outside of graphs use kernels in graphs, with the same bits. Where collectives cut the graph, an
//!   error leaves the parts before the failed collective done. After a scope with the device has failed, the graph is
//!   [`Error::GraphInvalidated`] on every device whose part of the scope had not ended before.
//!
//! [`Recording`] has the state of a capture. The order of a graph's uses is known only at a launch, so an
//! [`Op`](crate::token::op::Op) only notes them, and the launch does for all of them what an `Op` does for its
//! operands. [`collective::replay`](crate::collective::replay) captures collectives, and runs them in a launch.

mod part;
#[cfg(test)]
#[path = "../tests/unit/graph/tests.rs"]
mod tests;

use crate::error::{Error, Result, Site, op_site::OpSite};
use crate::{
    Device, collective::Group, gang::Gang, memory::DeviceHandle, thread::worker::Worker, token::recording::Recording,
};
use part::Part;
use std::rc::{Rc, Weak};
use std::{cell::RefCell, panic::Location, sync::Arc};

/// Operations of one device that are launched together, from [`Device::capture`].
///
/// A graph keeps the memory that its operations name, and writes the same buffers at every launch. It does not leave
/// its device's thread: keep it in a [`PerDevice`](crate::PerDevice) between scopes. If it is dropped while a launch is
/// in flight, it is destroyed after the launch has ended.
///
/// ```compile_fail,E0277
/// let pool = gpu_pool::GpuPool::builder().host(1).build().unwrap();
/// pool.run(|dev, _| Ok(dev.capture(|_| Ok(()))?.0)).unwrap(); // `Graph` is not `Send`
/// ```
pub struct Graph {
    parts: Vec<Part>,
    /// The members of the collectives' group. None without collectives.
    gathering: Option<Gathering>,
    operations: usize,
    handle: Arc<DeviceHandle>,
    worker: Weak<Worker>,
}

crate::sync::device_thread_only! { [] Graph }

impl Graph {
    /// The number of operations.
    pub fn operations(&self) -> usize {
        self.operations
    }

    /// The number of parts that a launch submits one after the other: 1, also for an empty graph. If collectives cut
    /// the graph (see [`Device::launch_graph`]), each collective counts, and so does each part between two collectives.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Checks that `dev` may launch it now, and returns the group of its collectives.
    #[track_caller]
    pub(crate) fn check<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Option<Group<'d>>> {
        let (OpSite { op, site }, handle) = (OpSite::outermost(op, Location::caller()), &dev.worker.handle);
        fail_if!(self.handle.pool != handle.pool, Error::wrong_pool(op, dev.index()));
        fail_if!(self.handle.device != handle.device, Error::wrong_device(op, self.handle.device, dev.index()));
        if self.parts.iter().any(Part::is_stale) {
            let why = "gradients that it names have moved, or their exchange is gone";
            return Err(Error::GraphInvalidated { op, device: dev.index(), why, site });
        }
        self.gathering.as_ref().map(|gathering| gathering.group(dev, op, site)).transpose()
    }
}

debug_as!(Graph, |self| operations = self.operations, parts = self.parts.len(), ..);

impl Drop for Graph {
    fn drop(&mut self) {
        let worker = self.worker.upgrade();
        for part in self.parts.drain(..) {
            let Part::Segment(segment) = part else { continue };
            match &worker {
                Some(worker) if !segment.exec.is_over() => worker.graphs.borrow_mut().push(segment.exec),
                _ => drop(segment),
            }
        }
    }
}

struct Gathering {
    /// The ordinals of the group in the pool, by rank.
    members: Box<[usize]>,
    /// The gang that has launched the graph last, or else has captured it.
    gang: RefCell<Arc<Gang>>,
    /// Number of gangs that had failed on this device at the capture.
    failures: usize,
}

impl Gathering {
    /// The group in the device's present gang.
    fn group<'d>(&self, dev: &'d Device, op: &'static str, site: Site) -> Result<Group<'d>> {
        let (mut gang, present) = (self.gang.borrow_mut(), &dev.session.gang);
        let same = Arc::ptr_eq(&gang, present);
        if !same && gang.is_aborted() || dev.worker.failures.borrow().len() != self.failures {
            let why = "it has collectives, and a scope has failed since it was captured";
            return Err(Error::GraphInvalidated { op, device: dev.index(), why, site });
        }
        let Some(group) = dev.group_of(&self.members) else {
            let (members, present) = (&self.members, present.members());
            let why = format_args!("the graph's collectives are of devices {members:?}, and this gang is {present:?}");
            return Err(Error::invalid_at(site, op, why));
        };
        if !same {
            *gang = present.clone();
        }
        Ok(group)
    }
}

impl Device {
    /// Captures `f`'s operations in a graph instead of running them. `f` gets this device with the capture's stream.
    /// Its allocations are immediate; `f` may return the buffers, whose contents are unspecified before a launch.
    ///
    /// All members of a group capture its collectives together, and launch the graph together. All collectives of a
    /// graph belong to one group. If kernels meet on the devices, a launch costs one meeting on the host for all
    /// collectives; otherwise it costs one meeting for each.
    ///
    /// The page "Graphs" of the guide has an example.
    ///
    /// These calls are refused within `f`, and end the capture: copies from and to the host; `exchange`, `barrier`,
    /// `send`, `recv`; streams, events and waits; launches of graphs; staged copies between devices; page-locked and
    /// unified memory; collectives of a second group; and calls of a
    /// [`GradientExchange`](crate::gradients::GradientExchange) that take a device, so its step cannot be captured.
    ///
    /// A graph may write gradients. But gradients move after the first step, and then the graph is
    /// [`Error::GraphInvalidated`]: capture after the first step, or build with
    /// [`ready_order(false)`](crate::gradients::GradientExchangeBuilder::ready_order). Before a capture with a
    /// [`gemm`](Self::gemm), multiply once: the first product loads cuBLAS.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a refused call; the errors of `f` and of its collectives; [`Error::Mismatch`]
    /// also when another member makes a call without capturing it; [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn capture<R>(&self, f: impl FnOnce(&Device) -> Result<R>) -> Result<(Graph, R)> {
        let _op = self.op("capture")?;
        let open = Open(Some(Recording::begin(&self.worker.handle)?));
        let inner = open.device(self);
        let value = OpSite::outside(|| f(&inner))?;
        Ok((open.end(self)?, value))
    }

    /// Submits the operations of a graph to the current stream, in one call. The launch is ordered like any other
    /// operation that touches the graph's memory.
    ///
    /// A launch of a graph with collectives is a collective itself: all members of the group launch the graph that they
    /// have captured together, in this scope or in an earlier one. If kernels cannot meet on the devices (software
    /// GPUs, a checker, no peer access, `CUDA_LAUNCH_BLOCKING`,
    /// [`Algorithm::Copies`](crate::collective::Algorithm::Copies) and `Host`), the collectives cut the graph: there is
    /// a driver call for each part and a meeting for each collective, which under `Host` waits for the device.
    ///
    /// No borrow protects the graph's memory. Work of other devices on it comes before a launch or after it, or one of
    /// the two is [`Error::Borrowed`].
    ///
    /// # Errors
    /// [`Error::WrongPool`], [`Error::WrongDevice`], [`Error::Aborted`], the driver's; [`Error::Borrowed`] while the
    /// thread of another device is in an upload, a download, a collective or a launch with collectives that conflicts,
    /// or while cudarc uses memory of the graph on another stream, and one of the two writes it. With collectives also:
    /// [`Error::Mismatch`] if a member launches another graph, or none; [`Error::InvalidArgument`] in a gang that lacks
    /// a member; [`Error::GraphInvalidated`] after a scope has failed on this device. A graph with gradients of a
    /// [`GradientExchange`](crate::gradients::GradientExchange) is [`Error::GraphInvalidated`] after the gradients have
    /// moved or the exchange was dropped.
    #[track_caller]
    pub fn launch_graph(&self, graph: &Graph) -> Result<()> {
        let op = self.op("launch_graph")?;
        let group = graph.check(self, op.name)?;
        for part in &graph.parts {
            match (part, &group) {
                (Part::Segment(segment), group) => segment.launch(self, op.name, op.site, group.as_ref())?,
                (Part::Collective(captured), Some(group)) => captured.replay(group.meeting())?,
                (Part::Collective(_), None) => unreachable!("a captured collective has noted its group"),
            }
        }
        Ok(())
    }
}

/// A capture that is under way. The drop discards it, unless [`end`](Self::end) was called.
struct Open(Option<Rc<Recording>>);

impl Open {
    fn device(&self, dev: &Device) -> Device {
        let recording = self.0.clone();
        let stream = recording.as_ref().map_or_else(|| dev.stream.clone(), |recording| recording.stream.clone());
        let (worker, session) = (dev.worker.clone(), dev.session.clone());
        Device { worker, session, stream, ordered: dev.ordered, recording }
    }

    #[track_caller]
    fn end(mut self, dev: &Device) -> Result<Graph> {
        if let Some(recording) = &self.0 {
            recording.verdict()?;
        }
        dev.check()?;
        let Some(recording) = self.0.take() else { return Err(Error::invalid("capture", "it has ended")) };
        let handle = dev.worker.handle.clone();
        let parts = recording.end(&handle)?.into_iter().map(Part::new).collect();
        let gathering = recording.members().map(|members| Gathering {
            members: members.into(),
            gang: RefCell::new(dev.session.gang.clone()),
            failures: dev.worker.failures.borrow().len(),
        });
        let (operations, worker) = (recording.operations(), Rc::downgrade(&dev.worker));
        Ok(Graph { parts, gathering, operations, handle, worker })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(recording) = self.0.take() else { return };
        let driver = &recording.stream.handle.driver;
        if let Ok(graph) = driver.capture_end(recording.stream.raw) {
            // SAFETY: the graph was made just now, and was never launched.
            let _ = unsafe { driver.graph_destroy(graph) };
        }
    }
}
