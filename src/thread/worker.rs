//! The device thread: its loop, its state ([`Worker`]), and the state of all threads of a pool ([`Shared`]).
//!
//! The builder starts device threads ([`start`]); scopes and pools give them entries; the token borrows the worker.
//! This file may use memory, the driver, the gang, and the state of collectives (`fabric`).
//!
//! Invariant: a worker never leaves its thread, which works its entries in order and ends only by [`Entry::Stop`].

use super::streams::{PooledStream, Streams};
use super::{flight_record::Recorder, graph_exec::GraphExec, modules::Modules};
use crate::driver::{
    FailPoint, RawStream,
    module::Module,
    route::{PeerReport, Route},
};
use crate::error::{DeviceCall, Error, Result, Site};
use crate::fabric::{
    Codecs, Endpoint, Limits, Processes, ReduceOrder, SignalPad, barrier_state::DeviceBarrierState,
    in_flight::InFlight, types::Algorithm,
};
use crate::gang::{EnteringScopes, Gang, GpuOrder, Queue, Quiescence, dispatch::Entry, gpu_order::Turn};
use crate::memory::{
    BlockRef, Cache, DeviceHandle, Event, PeerStaging, PinnedPool, ProbeContext, StreamCore,
    backing::ChunkKind,
    block::{Owner, OwnerThread},
    cache::Settings,
    calls::{self, CallLog},
    numa::affinity,
    staging::Staging,
};
use crate::sync::{EventCount, Gate, shim::InCrowd};
use crate::{contain::contain, here, panics, timeline::Timeline};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque, hash_map};
use std::{any::Any, cell::RefCell, rc::Rc, sync::Arc, thread, time::Duration};

/// The state that all threads of a pool share. Lists are by device, unless a field says otherwise.
pub(crate) struct Shared {
    /// The process that has built the pool: after a fork it is of no use.
    pub(crate) pid: u32,
    pub(crate) handles: Vec<Arc<DeviceHandle>>,
    pub(crate) queues: Vec<Queue<Rc<Worker>>>,
    /// The wakers of the queues, in one `Arc`. So a scope of all devices increments one reference count, and does not
    /// write to each waker's cache line while the device's thread reads it.
    pub(crate) wakers: Arc<[crate::sync::shim::Arc<EventCount>]>,
    pub(crate) gpu_order: Vec<Arc<GpuOrder>>,
    pub(crate) quiescence: Vec<Arc<Quiescence>>,
    pub(crate) entering: Arc<EnteringScopes>,
    pub(crate) pinned: PinnedPool,
    /// Where freed blocks of a device go. Set when the device's thread has started.
    pub(crate) owners: Vec<OnceCell<Arc<Owner>>>,
    pub(crate) weights: Option<Arc<[f64]>>,
    pub(crate) modules: Vec<&'static Module>,
    pub(crate) memory: Settings,
    pub(crate) deadline: Duration,
    pub(crate) algorithm: Algorithm,
    pub(crate) reduce_order: ReduceOrder,
    /// Gradient exchanges register their buckets.
    pub(crate) register_buckets: bool,
    /// Whether a device's thread runs on the CPUs of the device's NUMA node.
    pub(crate) numa_affinity: bool,
    /// Whether peer access was switched off, so that all copies between devices are staged.
    pub(crate) staged: bool,
    /// How often a member polls for a peer's message before it begins a wait.
    pub(crate) polls: usize,
    /// How long the wait stays awake.
    pub(crate) linger: Duration,
    /// Number of threads that copy one large pageable slice.
    pub(crate) copy_threads: usize,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) gate: Gate,
    /// The results of the probe, by `from * devices + to`. Set once, when the pool is built.
    pub(crate) peers: OnceCell<Vec<PeerReport>>,
    /// Where kernels of collectives meet, if they can. Set once, when the pool is built.
    pub(crate) signals: OnceCell<Arc<SignalPad>>,
    /// The device that removes what its late kernels have sent to others: one at a time.
    pub(crate) cleaner: Mutex<Option<usize>>,
    pub(crate) world: Option<Arc<dyn Processes>>,
    pub(crate) codecs: Codecs,
    pub(crate) timeline: Timeline,
    pub(crate) limits: Limits,
    /// The memory of staged copies, by source and destination. Made when first needed.
    pub(crate) stages: Mutex<HashMap<(usize, usize), Arc<PeerStaging>>>,
    /// Streams for messages to other processes that another thread than the device's submits. Made when first needed.
    pub(crate) proxy_streams: Mutex<HashMap<usize, Arc<StreamCore>>>,
    /// The device threads. A thread returns the error that it could report to no scope.
    pub(crate) threads: Mutex<Vec<thread::JoinHandle<Result<()>>>>,
}

impl Shared {
    pub(crate) fn device_count(&self) -> usize {
        self.handles.len()
    }

    /// Whether `device` may touch the memory of `peer`. The probe has verified it.
    pub(crate) fn is_direct(&self, device: usize, peer: usize) -> bool {
        device == peer
            || self.peers.get().is_some_and(|all| all[device * self.device_count() + peer].route == Route::Direct)
    }

    pub(crate) fn last_calls(&self, devices: &[usize]) -> Vec<DeviceCall> {
        devices.iter().filter_map(|&device| self.handles[device].last_call()).collect()
    }

    pub(crate) fn timeout(&self, op: &'static str, waited: Duration, missing: Vec<usize>) -> Error {
        let last_calls = self.last_calls(&missing);
        Error::Timeout { device: missing[0], op, waited, missing, last_calls }
    }

    pub(crate) fn timeout_of_all(&self, op: &'static str, waited: Duration) -> Error {
        self.timeout(op, waited, (0..self.device_count()).collect())
    }

    pub(crate) fn check_kernels(&self, gang: &Gang) {
        gang.check_kernels(self.deadline, || self.last_calls(gang.members()));
    }

    pub(crate) fn are_direct(&self, devices: &[usize]) -> bool {
        devices.iter().all(|&a| devices.iter().all(|&b| self.is_direct(a, b)))
    }

    /// The stream of a device for messages to other processes, made when needed. Threads take turns in commit order.
    pub(crate) fn proxy_stream(&self, device: usize) -> Result<Arc<StreamCore>> {
        Ok(match self.proxy_streams.lock().entry(device) {
            hash_map::Entry::Occupied(known) => known.get().clone(),
            hash_map::Entry::Vacant(new) => new.insert(StreamCore::new(&self.handles[device], "message")?).clone(),
        })
    }

    pub(crate) fn peer_staging(&self, source: usize, destination: usize) -> Result<Arc<PeerStaging>> {
        let known = self.stages.lock().get(&(source, destination)).cloned();
        // Without the lock: when page-locked memory is short, this calls the program's code.
        let made = || PeerStaging::new(&self.pinned, &self.handles[source], &self.handles[destination]).map(Arc::new);
        let stage = known.map_or_else(made, Ok)?;
        Ok(self.stages.lock().entry((source, destination)).or_insert(stage).clone())
    }
}

pub(crate) fn on_device_thread() -> bool {
    here::device().is_some()
}

pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) handle: Arc<DeviceHandle>,
    /// Where this thread notes its calls, for threads that wait for it.
    pub(crate) calls: Rc<CallLog>,
    /// The main stream: the token's stream at the begin of a scope.
    pub(crate) main: Arc<StreamCore>,
    streams: Streams,
    pub(crate) cache: RefCell<Cache>,
    pub(crate) staging: Staging,
    pub(crate) endpoint: RefCell<Endpoint>,
    pub(crate) barrier_state: DeviceBarrierState,
    pub(crate) staging_calls: InFlight,
    pub(super) modules: Modules,
    /// Blocks that peers may still read after a collective that failed half way; until the gang has recovered.
    pub(crate) quarantine: RefCell<Vec<BlockRef>>,
    /// The ids of the failed gangs with this device: 8 bytes each. None is removed, since an optimizer may ask
    /// for its last gang at any time.
    pub(crate) failures: RefCell<Vec<u64>>,
    pub(crate) graphs: RefCell<Vec<GraphExec>>,
    pub(crate) slots: RefCell<HashMap<u64, Rc<dyn Any>>>,
    /// A panic of this thread that could be reported to no scope. The next scope fails with it.
    deferred_error: RefCell<Option<Error>>,
}

impl Worker {
    /// Opens the device for this thread: context, stream, modules.
    fn new(shared: &Arc<Shared>, device: usize, endpoint: Endpoint) -> Result<Self> {
        let handle = shared.handles[device].clone();
        handle.check("bind", handle.driver.bind())?;
        let main = StreamCore::new(&handle, "build")?;
        let neighbour = &shared.handles[(device + 1) % shared.device_count()];
        let peer = (neighbour.device != device && !shared.staged).then_some(&neighbour.driver);
        let probe = ProbeContext { stream: Some(main.raw), peer };
        let mut cache = Cache::new(&handle, ChunkKind::Device, true, &shared.memory, probe)?;
        cache.audited(Some(&main));
        let _ = shared.owners[device].set(cache.owner.clone());
        let virtual_time = handle.in_virtual_time().then(|| handle.driver.clone());
        let (calls, noted) = calls::new(virtual_time);
        calls.enter();
        let _ = handle.calls.set(noted);
        let worker = Worker {
            calls,
            main,
            streams: Streams::default(),
            cache: RefCell::new(cache),
            staging: Staging::default(),
            endpoint: RefCell::new(endpoint),
            barrier_state: DeviceBarrierState::default(),
            staging_calls: InFlight::default(),
            modules: Modules::default(),
            quarantine: RefCell::default(),
            failures: RefCell::default(),
            graphs: RefCell::default(),
            slots: RefCell::default(),
            deferred_error: RefCell::default(),
            shared: shared.clone(),
            handle,
        };
        if let Some(bytes) = shared.memory.reserve {
            worker.cache.borrow_mut().reserve("build", bytes)?;
        }
        for module in &shared.modules {
            worker.modules.load(&worker.handle, module)?;
        }
        Ok(worker)
    }

    pub(crate) fn is_software(&self) -> bool {
        self.handle.driver.as_any().is::<crate::driver::host::HostGpu>()
    }

    /// A stream besides the main one, with the value that keeps it from being handed out again.
    pub(crate) fn stream(&self, priority: i32) -> Result<PooledStream> {
        self.streams.take(&self.handle, priority)
    }

    /// The stream of other code with this handle: see [`Device::adopt_stream`](crate::Device::adopt_stream).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn adopt_stream(&self, op: &'static str, raw: RawStream) -> Result<PooledStream> {
        // SAFETY: the caller's promise.
        let adopted = unsafe { self.streams.adopt(&self.handle, raw) };
        adopted.map_err(|fault| self.handle.refused(op, fault))
    }

    pub(crate) fn engines(&self) -> Result<[Arc<StreamCore>; 2]> {
        self.streams.engines(&self.handle)
    }

    fn with_main<'s>(&'s self, others: &'s [PooledStream]) -> impl Iterator<Item = &'s Arc<StreamCore>> {
        std::iter::once(&self.main).chain(others.iter().map(|pooled| &pooled.core))
    }

    pub(crate) fn submitted(&self) -> SmallVec<[u64; 4]> {
        let streams = self.streams.all();
        self.with_main(&streams).map(|s| s.submitted()).collect()
    }

    /// Events behind the work that came to the streams after [`submitted`](Self::submitted).
    pub(crate) fn record_new(&self, op: &'static str, before: &[u64]) -> Result<SmallVec<[Event; 1]>> {
        let streams = self.streams.all();
        let all = self.with_main(&streams);
        let before = before.iter().copied().chain(std::iter::repeat(0));
        let new = all.zip(before).filter(|(stream, before)| stream.submitted() > *before || stream.is_lent());
        new.map(|(stream, _)| Event::record(stream, op, false)).collect()
    }

    /// Records an event behind each stream's new work, for threads that get memory and must not wait for later work.
    pub(crate) fn record_early(&self, op: &'static str) -> Result<()> {
        let streams = self.streams.all();
        self.with_main(&streams).try_for_each(|stream| stream.record_early(op))
    }

    pub(crate) fn drain(&self) -> Result<()> {
        let drained = self.wait_idle("scope end", || false);
        let over = self.graphs.borrow_mut().extract_if(.., |graph| graph.is_over()).collect::<Vec<_>>();
        drop(over);
        drained
    }

    /// A scope has ended, and [`drain`](Self::drain) has succeeded.
    pub(crate) fn end_scope(&self) {
        let streams = self.streams.all();
        self.with_main(&streams).for_each(|stream| stream.end_scope());
    }

    pub(crate) fn wait_idle(&self, op: &'static str, stop: impl Fn() -> bool) -> Result<()> {
        let limit = self.shared.deadline;
        let streams = self.streams.all();
        let all = self.with_main(&streams);
        // Waits for each stream, even after an error: the caller must know that none is in use.
        all.map(|stream| stream.wait_idle(op, limit, &stop)).fold(Ok(()), Result::and)
    }

    /// Keeps a panic that could be reported to no scope.
    pub(crate) fn defer_error(&self, error: Error) {
        event!(
            error, "device_thread_failed", device = self.handle.device, %error,
            "a device thread has caught what it should not have to"
        );
        self.deferred_error.borrow_mut().get_or_insert(error);
    }

    pub(crate) fn take_deferred_error(&self) -> Result<()> {
        self.deferred_error.take().map_or(Ok(()), Err)
    }

    /// The loop of the device thread. Only [`Entry::Stop`] ends it: if a panic ended it, later entries would stay in
    /// the queue, and their gangs and the GPU's other pools would wait for ever.
    fn work(self: Rc<Self>) -> Result<()> {
        let mut taken = VecDeque::new();
        loop {
            match panics::catch(self.handle.device, || self.serve(&mut taken)) {
                Ok(true) => {}
                Ok(false) => return self.take_deferred_error(),
                Err(error) => self.defer_error(error),
            }
        }
    }

    fn turn(&self, turn: u64) -> Turn<'_> {
        let (shared, device) = (&self.shared, self.handle.device);
        let wait = || shared.gpu_order[device].wait(turn, &shared.quiescence[device]);
        let begun = panics::catch(device, || {
            self.handle.strike(FailPoint::BeforeTurn);
            let turn = wait();
            // The program's own driver calls may have left another context current.
            let _ = self.handle.driver.bind();
            turn
        });
        // Even after a panic, wait for the turn, pass it on, and run the entry: the gang learns about its member.
        begun.unwrap_or_else(|error| {
            self.defer_error(error);
            wait()
        })
    }

    /// Handles the next entry. Returns false after [`Entry::Stop`].
    fn serve(self: &Rc<Self>, taken: &mut VecDeque<Entry<Rc<Worker>>>) -> bool {
        let (shared, device) = (&self.shared, self.handle.device);
        match shared.queues[device].next(taken) {
            Entry::Gang { ticket, rank, turn } => {
                let turn = self.turn(turn);
                ticket.run(self, rank);
                drop(turn);
            }
            Entry::Visit { visit, rank, place, turn } => {
                let turn = self.turn(turn);
                let others = || !taken.is_empty() || shared.queues[device].has_more();
                visit.visit(self, rank, place, &others);
                drop(turn);
            }
            Entry::Task(task) => {
                // A drop of a user's value may panic; the thread goes on.
                if !contain(|| task(self)) {
                    event!(error, "drop_panicked", device, "a value on a device thread panicked when it was dropped");
                }
            }
            Entry::Stop => return false,
        }
        true
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Users' values are dropped first: they may hold buffers and streams.
        let slots = std::mem::take(self.slots.get_mut());
        for value in slots.into_values() {
            contain(|| drop(value));
        }
        self.handle.strike(FailPoint::AtEnd);
        if self.drain().is_err() {
            // A kernel that still runs may read its peers' flags there.
            if let Some(signals) = self.shared.signals.get() {
                signals.keep();
            }
            return;
        }
        // SAFETY: the device has drained, and the thread that launches its kernels ends here.
        unsafe { self.modules.unload(&self.handle) };
    }
}

/// Starts a device thread. Its first message on `opened` says whether the device could be opened.
pub(crate) fn start(
    shared: &Arc<Shared>,
    device: usize,
    endpoint: Endpoint,
    opened: std::sync::mpsc::Sender<Result<()>>,
    site: Site,
) -> Result<thread::JoinHandle<Result<()>>> {
    let shared = shared.clone();
    let cpus = if shared.numa_affinity { shared.pinned.nodes().cpus(device) } else { None };
    let (silenced, quiescence) = (panics::is_silenced(), shared.quiescence[device].clone());
    let live = move || {
        let worker = match Worker::new(&shared, device, endpoint) {
            Ok(worker) => Rc::new(worker),
            Err(error) => {
                let _ = opened.send(Err(error));
                return Ok(());
            }
        };
        let _ = opened.send(Ok(()));
        drop(opened);
        // SAFETY: the worker is in an `Rc` that outlives the guard, which is dropped first.
        let _owner_thread = unsafe { OwnerThread::enter(&worker.handle, &worker.cache) };
        worker.clone().work()
    };
    thread::Builder::new()
        .name(format!("gpu-pool:{device}"))
        .spawn(move || {
            // Before its first memory.
            cpus.as_deref().inspect(|cpus| affinity::set(cpus));
            let _silenced = panics::inherit(silenced);
            here::enter_device_thread(device);
            let _counted = InCrowd::enter();
            let _registered = quiescence.register();
            // Caught on this thread, which knows the place of the panic. A thread that joins it gets only the payload.
            panics::catch(device, live).and_then(|ended| ended)
        })
        .map_err(|e| Error::NoThread { op: "build", device: Some(device), why: e.to_string(), site })
}
