//! Graphs: operations that are captured once and launched often.
//!
//! # Contract
//!
//! * A graph holds what its capture submitted: kernels, fills, matrix products, copies of device memory, also between
//!   devices that reach each other directly, and collectives. Everything else is refused while a device captures
//!   ([`Error::InvalidArgument`], named after the operation), and the capture is discarded; so it is when its closure
//!   fails or panics.
//! * Capturing touches nothing: no memory, no stream that anybody knows. Its stream is its own.
//! * A launch is *one* operation of the current stream that touches all the graph's memory: ordered after conflicting
//!   uses, and before later ones, on whichever devices. Where collectives cut the graph (below) it is as many, one
//!   after the other.
//! * No borrow keeps others from that memory while it is launched. Work on it that *another* thread submits at the very
//!   same time may come before the launch, after it, or beside it: order the two threads (by a barrier, or the end of a
//!   scope), as the checker demands. Memory is never used again too early in either case.
//! * The graph keeps the memory that it names. What its closure drops, or the user later, is not used for anything else
//!   before the graph is gone (PyTorch gives captures private pools for that; CUDA.jl marks captured memory).
//! * Memory whose owner has said that nobody looks at it any more (gradients that have moved) makes the graph
//!   [`Error::GraphInvalidated`]: it would work, and for nothing.
//! * Only device memory: that of the host may be borrowed as a slice when the graph is launched, which no borrow would
//!   forbid.
//!
//! With collectives, which all are of one group:
//!
//! * All its members capture the same calls, meeting on the host for each, and all launch the same graph: else each
//!   gets [`Error::Mismatch`], `"capture"` or `"graph"`. They may launch it in later scopes, in any gang that has these
//!   devices.
//! * Where kernels meet on the devices, a launch is one meeting on the host and one call of the driver. Elsewhere
//!   (software GPUs, a checker, no peer access, `CUDA_LAUNCH_BLOCKING`, `Algorithm::Copies` and `Host`) it is the
//!   graph's parts between its collectives, and these as if they were called then: a meeting for each, scratch for each
//!   (`OutOfMemory`), and waits for the device where the host adds up. After an error the parts before that collective
//!   have run. [`Graph::parts`] tells. Sizes that go by copy engines outside of graphs go by kernels in them, with the
//!   same bits.
//! * If a scope fails in which the device was, the graph may be [`Error::GraphInvalidated`] from then on (it is on
//!   every device that had not ended its part before); graphs without collectives go on.
//! * `barrier`, `exchange`, `send` and `recv` are refused: they are the host's.
//!
//! # Mechanism
//!
//! [`recording`] has what is known while a device captures. The order of what a graph touches is unknown before it is
//! launched, so [`Op`](crate::token::op::Op) only notes it then, and the launch does for all of it what an `Op` does
//! for its operands. [`part`] has what a graph consists of; [`collective::replay`](crate::collective::replay) how
//! collectives get into it and run from there.

mod part;
#[cfg(test)]
mod tests;

use crate::token::recording::Recording;
use crate::{
    Device,
    collective::Group,
    error::{Error, Result},
    gang::Gang,
    memory::handle::DeviceHandle,
    thread::worker::Worker,
};
use part::Part;
use std::{
    cell::RefCell,
    fmt,
    rc::{Rc, Weak},
    sync::Arc,
};

/// Operations of one device that are launched together, from [`Device::capture`].
///
/// It keeps the memory that its operations name, and writes the same buffers at every launch. It does not leave its
/// device's thread: keep it in a [`PerDevice`](crate::PerDevice) between scopes. Dropped in flight, it is destroyed
/// when its launches are over.
///
/// ```compile_fail,E0277
/// # use gpu_pool::GpuPool;
/// let pool = GpuPool::builder().host(1).build().unwrap();
/// pool.run(|dev, _| Ok(dev.capture(|_| Ok(()))?.0)).unwrap(); // `Graph` is not `Send`
/// ```
pub struct Graph {
    parts: Vec<Part>,
    /// None without collectives.
    gathering: Option<Gathering>,
    operations: usize,
    handle: Arc<DeviceHandle>,
    worker: Weak<Worker>,
}

crate::sync::device_thread_only! { [] Graph }

impl Graph {
    /// How many operations it has.
    pub fn operations(&self) -> usize {
        self.operations
    }

    /// How many things a launch submits one after the other: 1, but where collectives cut the graph
    /// ([`Device::launch_graph`] says where); then they count, and what is between them. 0 if it is empty.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).build()?; // software GPUs: a collective cuts
    /// pool.run(|dev, _| {
    ///     let mut x = dev.zeros::<f32>(8)?;
    ///     let (graph, ()) = dev.capture(|dev| {
    ///         dev.fill(&mut x, 1.0)?;
    ///         dev.all_reduce(&mut x, ReduceOp::Sum)?;
    ///         dev.scale(&mut x, 0.5)
    ///     })?;
    ///     assert_eq!((graph.operations(), graph.parts()), (3, 3));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn parts(&self) -> usize {
        self.parts.len()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operations, parts) = (&self.operations, &self.parts.len());
        f.debug_struct("Graph").field("operations", operations).field("parts", parts).finish_non_exhaustive()
    }
}

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

/// Who must come together for a graph's collectives, and whether they still can.
struct Gathering {
    /// Ordinals in the pool of the collectives' group, by rank.
    members: Box<[usize]>,
    /// The gang that has captured the graph, later the one that has launched it last.
    gang: RefCell<Arc<Gang>>,
    /// How many gangs had failed on this device when it was captured.
    failures: u64,
}

impl Gathering {
    /// The group in the device's present gang.
    #[track_caller]
    fn group<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Group<'d>> {
        let (mut gang, present) = (self.gang.borrow_mut(), &dev.session.gang);
        let same = Arc::ptr_eq(&gang, present);
        if !same && gang.is_aborted() || dev.worker.failures.get() != self.failures {
            let why = "it has collectives, and a scope has failed since it was captured";
            return Err(Error::GraphInvalidated { op, device: dev.index(), why });
        }
        let Some(group) = dev.group_of(&self.members) else {
            let (members, present) = (&self.members, present.members());
            let why = format_args!("the graph's collectives are of devices {members:?}, and this gang is {present:?}");
            return Err(Error::invalid(op, why));
        };
        if !same {
            *gang = present.clone();
        }
        Ok(group)
    }
}

/// Graphs.
impl Device {
    /// Notes the operations of `f` in a graph, instead of running them. `f` gets this device with a stream of the
    /// capture's own; what it allocates is had at once, and comes back beside the graph if `f` returns it. Nothing is
    /// in it before the first launch.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let sums = pool.run(|dev, _| {
    ///     let mut x = dev.upload(&[1.0f32, 2.0, 3.0])?;
    ///     let (graph, sum) = dev.capture(|dev| {
    ///         dev.scale(&mut x, 2.0)?;
    ///         dev.sum(&x)
    ///     })?;
    ///     let mut sums = Vec::new();
    ///     for _ in 0..3 {
    ///         dev.launch_graph(&graph)?;
    ///         sums.push(dev.download(&sum)?[0]);
    ///     }
    ///     Ok(sums)
    /// })?;
    /// assert_eq!(sums, [[12.0, 24.0, 48.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// Collectives are captured by all members of their group together, and launched so; all of one graph are of one
    /// group. On GPUs whose kernels meet by themselves a launch costs one meeting of the host however many there are,
    /// elsewhere one for each.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, ReduceOp};
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let found = pool.run(|dev, shard| {
    ///     let (mut x, mut sum) = (dev.upload(&[1.0f32, 2.0])?, dev.zeros::<f32>(2)?);
    ///     let (step, ()) = dev.capture(|dev| {
    ///         dev.axpy(shard.index() as f32, &x, &mut sum)?;
    ///         dev.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///         dev.scale(&mut x, 10.0)
    ///     })?;
    ///     (0..3).try_for_each(|_| dev.launch_graph(&step))?;
    ///     dev.download(&sum)
    /// })?;
    /// assert_eq!(found, [[124.0, 248.0], [124.0, 248.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// Refused within `f`, which ends the capture: copies from and to the host; `exchange`, `barrier`, `send`, `recv`;
    /// streams, events and waits; launches of graphs; copies between devices that have to be staged; page-locked and
    /// unified memory; collectives of a second group; the calls of a [`GradientExchange`](crate::GradientExchange) that
    /// take a device, and so its step stays as it is. (A graph may write gradients, but those move after the first
    /// step, and then it is [`Error::GraphInvalidated`]: capture after it, or build with
    /// [`ready_order(false)`](crate::GradientExchangeBuilder::ready_order).) Multiply once before a capture with a
    /// [`gemm`](Self::gemm): the first one loads cuBLAS.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what was refused; those of `f`, and of its collectives; [`Error::Mismatch`] also
    /// when another member calls the same without capturing it; [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn capture<R>(&self, f: impl FnOnce(&Device) -> Result<R>) -> Result<(Graph, R)> {
        let op = self.op("capture")?;
        let open = Open(Some(Recording::begin(&self.worker.handle)?));
        // What the closure asks for is its own.
        drop(op);
        let value = f(&open.device(self))?;
        Ok((open.end(self)?, value))
    }

    /// Submits the operations of a graph to the current stream, in one call. Ordered like any other operation that
    /// touches its memory. With collectives it is one itself: all members of their group launch the graph that they
    /// have captured together, in this scope or in an earlier one. Where their kernels cannot meet on the devices
    /// (software GPUs, a checker, no peer access, `CUDA_LAUNCH_BLOCKING`,
    /// [`Algorithm::Copies`](crate::Algorithm::Copies) and `Host`) it is cut at them: a call for each part and a
    /// meeting for each collective, which under `Host` waits for the device.
    ///
    /// # Errors
    /// [`Error::WrongPool`], [`Error::WrongDevice`], [`Error::Aborted`], the driver's; with collectives also theirs:
    /// [`Error::Mismatch`] if a member launches another graph, or none; [`Error::InvalidArgument`] in a gang without
    /// one of the members; [`Error::GraphInvalidated`] after a scope has failed on this device. That is also for graphs
    /// that name gradients of a [`GradientExchange`](crate::GradientExchange) which have moved since, or whose exchange
    /// was dropped.
    #[track_caller]
    pub fn launch_graph(&self, graph: &Graph) -> Result<()> {
        let op = self.op("launch_graph")?;
        let (handle, name) = (&self.worker.handle, op.name);
        if graph.handle.pool != handle.pool {
            return Err(Error::WrongPool { op: name, device: self.index(), site: op.site });
        }
        if graph.handle.device != handle.device {
            return Err(Error::WrongDevice {
                op: name,
                buffer: graph.handle.device,
                device: self.index(),
                site: op.site,
            });
        }
        if graph.parts.iter().any(Part::is_stale) {
            let why = "gradients that it names have moved, or their exchange is gone";
            return Err(Error::GraphInvalidated { op: name, device: self.index(), why });
        }
        let group = match &graph.gathering {
            Some(gathering) => Some(gathering.group(self, name)?),
            None => None,
        };
        for part in &graph.parts {
            match (part, &group) {
                (Part::Segment(segment), group) => segment.launch(self, name, op.site, group.as_ref())?,
                (Part::Collective(captured), Some(group)) => group.replay(captured)?,
                (Part::Collective(_), None) => unreachable!("who captures a collective says of which group"),
            }
        }
        Ok(())
    }
}

/// A capture that is under way; discarded unless it comes to its [`end`](Self::end).
struct Open(Option<Rc<Recording>>);

impl Open {
    /// `dev`, on the capture's stream.
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
        let handle = &dev.worker.handle;
        let parts = recording.end(handle)?.into_iter().map(Part::new).collect();
        let gathering = recording.members().map(|members| Gathering {
            members: members.into(),
            gang: RefCell::new(dev.session.gang.clone()),
            failures: dev.worker.failures.get(),
        });
        Ok(Graph {
            parts,
            gathering,
            operations: recording.operations(),
            handle: handle.clone(),
            worker: Rc::downgrade(&dev.worker),
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(recording) = self.0.take() else { return };
        let driver = &recording.stream.handle.driver;
        if let Ok(graph) = driver.capture_end(recording.stream.raw) {
            // SAFETY: made just now, never launched.
            let _ = unsafe { driver.graph_destroy(graph) };
        }
    }
}
