//! The device thread, and what it owns.

use crate::gang::{
    dispatch::{Entry, Queue},
    gpu_order::GpuOrder,
    quiescence::{Door, Quiescence},
};
use crate::{
    collective::{
        Algorithm, ReduceOrder, Tune, barrier::Spinning, board::Endpoint, scratch::InFlight, signals::Signals,
        tuner::Tuned,
    },
    contain::contain,
    copy::{
        host::Staging,
        peer::Stage,
        route::{PeerReport, Route},
    },
    driver::{RawFunction, RawModule},
    error::{Error, Result},
    graph::part::Exec,
    here,
    kernel::Module,
    memory::{
        backing::Trial,
        block::{AtHome, BlockRef, ChunkKind, Home},
        cache::{Cache, Settings},
        handle::DeviceHandle,
        pinned::PinnedPool,
        stream::StreamCore,
    },
    mutation::Panic,
    panics,
    sync::{EventCount, Gate, shim::InCrowd},
};
use once_cell::{sync::OnceCell, unsync};
use parking_lot::Mutex;
use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    rc::Rc,
    sync::Arc,
    thread,
    time::Duration,
};

/// What all threads of a pool share.
pub(crate) struct Shared {
    pub(crate) pid: u32,
    pub(crate) handles: Vec<Arc<DeviceHandle>>,
    pub(crate) queues: Vec<Queue<Rc<Worker>>>,
    /// What wakes each device thread: the queues' wakers in one piece, so that a scope of all devices shares them by
    /// one count instead of touching each, which its thread is looking at.
    pub(crate) wakers: Arc<[crate::sync::shim::Arc<EventCount>]>,
    pub(crate) gpu_order: Vec<Arc<GpuOrder>>,
    /// What each device thread is doing,
    pub(crate) quiescence: Vec<Arc<Quiescence>>,
    /// and whether a scope is on its way to them.
    pub(crate) door: Arc<Door>,
    pub(crate) pinned: PinnedPool,
    /// Where freed blocks go, and what their owners show, by device; there once its thread has begun.
    pub(crate) homes: Vec<OnceCell<Arc<Home>>>,
    pub(crate) weights: Option<Arc<[f64]>>,
    pub(crate) modules: Vec<&'static Module>,
    pub(crate) memory: Settings,
    pub(crate) deadline: Duration,
    /// How collectives are carried out.
    pub(crate) algorithm: Algorithm,
    pub(crate) reduce_order: ReduceOrder,
    /// Peer access was switched off.
    pub(crate) staged: bool,
    /// How often a member looks for a peer's message before it waits as one waits for others.
    pub(crate) polls: usize,
    /// How long it stays awake after that.
    pub(crate) linger: Duration,
    /// Threads that copy one large pageable slice.
    pub(crate) copy_threads: usize,
    pub(crate) gate: Gate,
    /// What the probe found, by `from * devices + to`. Set once, when the pool is built.
    pub(crate) peers: OnceCell<Vec<PeerReport>>,
    /// Where kernels of collectives meet, if they can. Set once, when the pool is built.
    pub(crate) signals: OnceCell<Arc<Signals>>,
    /// Where the collectives' limits are to come from,
    pub(crate) tune: Tune,
    /// and what they are. Set once, when the pool is built.
    pub(crate) tuned: OnceCell<Tuned>,
    pub(crate) stages: Mutex<HashMap<(usize, usize), Arc<Stage>>>,
    /// They end with what went wrong on them, outside of any scope.
    pub(crate) threads: Mutex<Vec<thread::JoinHandle<Result<()>>>>,
}

impl Shared {
    pub(crate) fn devices(&self) -> usize {
        self.handles.len()
    }

    /// Whether `device` may touch the memory of `peer`, verified.
    pub(crate) fn is_direct(&self, device: usize, peer: usize) -> bool {
        device == peer || self.peers.get().is_some_and(|all| all[device * self.devices() + peer].route == Route::Direct)
    }

    /// What the collectives go by. Only the tuner runs any before it is known, and brings its own.
    pub(crate) fn limits(&self) -> &Tuned {
        self.tuned.get().expect("the pool is built")
    }

    /// Whether each of them may touch the memory of each.
    pub(crate) fn are_direct(&self, devices: &[usize]) -> bool {
        devices.iter().all(|&a| devices.iter().all(|&b| self.is_direct(a, b)))
    }

    /// The means of staged copies of a pair, made when first needed.
    pub(crate) fn stage(&self, source: usize, destination: usize) -> Result<Arc<Stage>> {
        let mut stages = self.stages.lock();
        if let Some(stage) = stages.get(&(source, destination)) {
            return Ok(stage.clone());
        }
        let stage = Arc::new(Stage::new(self, source, destination)?);
        stages.insert((source, destination), stage.clone());
        Ok(stage)
    }
}

/// Whether the calling thread is a device thread of any pool.
pub(crate) fn on_device_thread() -> bool {
    here::device().is_some()
}

/// A stream of a device besides the token's own, and what is shared by those who hold it.
#[derive(Clone)]
pub(crate) struct PooledStream {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) held: Rc<()>,
    priority: i32,
}

/// Of so many streams one is handed out again even if it still has work.
const MANY_STREAMS: usize = 32;

/// What a device thread owns. Never leaves it.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) handle: Arc<DeviceHandle>,
    /// The stream of the token.
    pub(crate) main: Arc<StreamCore>,
    /// Further streams that were ever handed out; those that nobody holds are handed out again.
    streams: RefCell<Vec<PooledStream>>,
    /// See [`engines`](Self::engines).
    engines: unsync::OnceCell<[PooledStream; 2]>,
    pub(crate) cache: RefCell<Cache>,
    pub(crate) staging: Staging,
    pub(crate) endpoint: RefCell<Endpoint>,
    pub(crate) spinning: Spinning,
    pub(crate) staging_calls: InFlight,
    modules: RefCell<HashMap<*const Module, RawModule>>,
    functions: RefCell<HashMap<(*const Module, &'static str), RawFunction>>,
    /// Blocks that peers may still read after a collective that failed half way; until the gang has recovered.
    pub(crate) suspects: RefCell<Vec<BlockRef>>,
    /// How many gangs have failed in which this device was.
    pub(crate) failures: Cell<u64>,
    /// Graphs that were dropped in flight.
    pub(crate) graphs: RefCell<Vec<Exec>>,
    /// `PerDevice` state by handle.
    pub(crate) slots: RefCell<HashMap<u64, Rc<dyn Any>>>,
    /// What has unwound on this thread where no scope could be told of it. The next one fails with it.
    ill: RefCell<Option<Error>>,
}

impl Worker {
    /// Opens the device for this thread: context, stream, modules.
    fn new(shared: &Arc<Shared>, device: usize, endpoint: Endpoint) -> Result<Self> {
        let handle = shared.handles[device].clone();
        handle.check("bind", handle.driver.bind())?;
        let main = StreamCore::new(&handle, "build")?;
        let neighbour = &shared.handles[(device + 1) % shared.devices()];
        let peer = (neighbour.device != device && !shared.staged).then_some(&neighbour.driver);
        let trial = Trial { stream: Some(main.raw), peer };
        let mut cache = Cache::new(&handle, ChunkKind::Device, true, &shared.memory, trial)?;
        cache.audited(Some(&main));
        let _ = shared.homes[device].set(cache.home.clone());
        let worker = Worker {
            main,
            streams: RefCell::default(),
            engines: unsync::OnceCell::new(),
            cache: RefCell::new(cache),
            staging: Staging::default(),
            endpoint: RefCell::new(endpoint),
            spinning: Spinning::default(),
            staging_calls: InFlight::default(),
            modules: RefCell::default(),
            functions: RefCell::default(),
            suspects: RefCell::default(),
            failures: Cell::default(),
            graphs: RefCell::default(),
            slots: RefCell::default(),
            ill: RefCell::default(),
            shared: shared.clone(),
            handle,
        };
        if let Some(bytes) = shared.memory.reserve {
            worker.cache.borrow_mut().reserve("build", bytes)?;
        }
        for module in &shared.modules {
            let loaded = worker.handle.check("load module", worker.handle.driver.module_load(&module.image))?;
            worker.modules.borrow_mut().insert(*module, loaded);
        }
        Ok(worker)
    }

    /// Notes that this device's host thread has got further.
    pub(crate) fn progress(&self) {
        self.handle.progress.advance();
    }

    pub(crate) fn is_software(&self) -> bool {
        self.handle.driver.as_any().is::<crate::driver::host::HostGpu>()
    }

    /// A further stream, with what says that somebody holds it: one that nobody holds, if there is one that is idle, or
    /// if there are many. Memory and events that name a stream do not hold it: its numbers go on.
    pub(crate) fn stream(&self, priority: i32) -> Result<PooledStream> {
        let mut streams = self.streams.borrow_mut();
        // In steps nothing may depend on what happens to be over.
        let any = self.handle.stepped || streams.len() >= MANY_STREAMS;
        let is_idle = |core: &StreamCore| core.is_over(core.submitted());
        let spare = |pooled: &&PooledStream| {
            pooled.priority == priority && Rc::strong_count(&pooled.held) == 1 && (any || is_idle(&pooled.core))
        };
        if let Some(spare) = streams.iter().find(spare) {
            return Ok(spare.clone());
        }
        let core = StreamCore::with_priority(&self.handle, "stream", priority)?;
        let pooled = PooledStream { core, held: Rc::new(()), priority };
        streams.push(pooled.clone());
        Ok(pooled)
    }

    /// Two streams for copies that overlap with each other and with what else a collective does. Nobody else gets them.
    pub(crate) fn engines(&self) -> Result<[Arc<StreamCore>; 2]> {
        let [a, b] = self.engines.get_or_try_init(|| Ok::<_, Error>([self.stream(0)?, self.stream(0)?]))?;
        Ok([a.core.clone(), b.core.clone()])
    }

    /// A kernel's handle on this device.
    pub(crate) fn function(&self, module: &'static Module, name: &'static str) -> Result<RawFunction> {
        let key = (module as *const Module, name);
        if let Some(&function) = self.functions.borrow().get(&key) {
            return Ok(function);
        }
        let not_found =
            |why: String| Error::KernelNotFound { device: self.handle.device, kernel: name.to_owned(), why };
        let loaded = self.modules.borrow().get(&key.0).copied();
        let loaded = match loaded {
            Some(loaded) => loaded,
            // The crate's own modules that are not for set-up are loaded here. The driver takes the launch gate for it.
            None if module.image.shared => {
                let loaded = self.handle.check("load module", self.handle.driver.module_load(&module.image))?;
                self.modules.borrow_mut().insert(key.0, loaded);
                loaded
            }
            None => {
                return Err(not_found("its module was not given to the pool's builder (`Builder::module`)".to_owned()));
            }
        };
        let function = self.handle.driver.function(loaded, name).map_err(|fault| match fault.kind {
            crate::driver::FaultKind::NotFound => not_found(fault.to_string()),
            _ => self.handle.error("launch", fault),
        })?;
        self.functions.borrow_mut().insert(key, function);
        Ok(function)
    }

    /// Waits until all streams of this device are idle.
    pub(crate) fn drain(&self) -> Result<()> {
        let limit = self.shared.deadline;
        let streams = self.streams.borrow();
        let all = std::iter::once(&self.main).chain(streams.iter().map(|pooled| &pooled.core));
        // Each is waited for, also after one has failed: the others must not be in use when the scope returns.
        let drained = all.map(|stream| stream.wait_idle("scope end", limit, || false)).fold(Ok(()), Result::and);
        let over = self.graphs.borrow_mut().extract_if(.., |graph| graph.is_over()).collect::<Vec<_>>();
        drop(over);
        drained
    }

    /// Whether all that was submitted is known to be over.
    pub(crate) fn is_idle(&self) -> bool {
        let streams = self.streams.borrow();
        let mut all = std::iter::once(&self.main).chain(streams.iter().map(|pooled| &pooled.core));
        all.all(|stream| stream.has_completed(stream.submitted()))
    }

    /// Notes what has unwound where no scope could be told of it.
    pub(crate) fn fall_ill(&self, error: Error) {
        event!(error, device = self.handle.device, %error, "a device thread has caught what it should not have to");
        self.ill.borrow_mut().get_or_insert(error);
    }

    /// What was noted so, for who tells of it.
    pub(crate) fn get_well(&self) -> Result<()> {
        self.ill.take().map_or(Ok(()), Err)
    }

    /// The loop of the device thread. It ends with [`Entry::Stop`] only: if it ended with a panic, the entries behind
    /// would stay in the queue, and their gangs and the other pools of the GPU would wait for them for ever.
    fn work(self: Rc<Self>) -> Result<()> {
        let mut taken = VecDeque::new();
        loop {
            match panics::catch(self.handle.device, || self.serve(&mut taken)) {
                Ok(true) => {}
                Ok(false) => return self.get_well(),
                Err(error) => self.fall_ill(error),
            }
        }
    }

    /// Takes the next entry and does what it says; whether there are more.
    fn serve(self: &Rc<Self>, taken: &mut VecDeque<Entry<Rc<Worker>>>) -> bool {
        let (shared, device) = (&self.shared, self.handle.device);
        match shared.queues[device].next(taken) {
            Entry::Gang { ticket, rank, turn } => {
                let wait = || shared.gpu_order[device].wait(turn, &shared.quiescence[device]);
                let begun = panics::catch(device, || {
                    self.handle.strike(Panic::BeforeTurn);
                    let turn = wait();
                    // A user's own driver calls may have left another context current.
                    let _ = self.handle.driver.bind();
                    turn
                });
                // Whatever happens, the turn is passed on, when it has come, and the gang hears of its member.
                let turn = begun.unwrap_or_else(|error| {
                    self.fall_ill(error);
                    wait()
                });
                ticket.run(self, rank);
                drop(turn);
            }
            Entry::Task(task) => {
                // Drops of users' values may panic; the thread goes on.
                if !contain(|| task(self)) {
                    event!(error, device, "a value on a device thread panicked when it was dropped");
                }
            }
            Entry::Stop => return false,
        }
        true
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Users' values go first: they may hold buffers and streams.
        let slots = std::mem::take(self.slots.get_mut());
        for value in slots.into_values() {
            contain(|| drop(value));
        }
        self.handle.strike(Panic::AtEnd);
        if self.drain().is_err() {
            // A kernel that runs yet may look for its peers there.
            if let Some(signals) = self.shared.signals.get() {
                signals.keep();
            }
            return;
        }
        for &module in self.modules.get_mut().values() {
            // SAFETY: the device has drained and the thread that launched its kernels is at its end.
            let _ = unsafe { self.handle.driver.module_unload(module) };
        }
    }
}

/// Starts a device thread; its first message says whether the device could be opened.
pub(crate) fn start(
    shared: &Arc<Shared>,
    device: usize,
    endpoint: Endpoint,
    opened: std::sync::mpsc::Sender<Result<()>>,
) -> Result<thread::JoinHandle<Result<()>>> {
    let shared = shared.clone();
    let (hushed, present) = (panics::is_hushed(), shared.quiescence[device].clone());
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
        let _at_home = unsafe { AtHome::enter(&worker.handle, &worker.cache) };
        worker.clone().work()
    };
    thread::Builder::new()
        .name(format!("gpu-pool:{device}"))
        .spawn(move || {
            let _hushed = panics::inherit(hushed);
            here::enter_device_thread(device);
            let _counted = InCrowd::enter();
            let _present = present.begin();
            // Here, where the place of a panic is known. Whoever joins the thread knows the payload only.
            panics::catch(device, live).and_then(|ended| ended)
        })
        .map_err(|e| Error::custom(format!("the thread of device {device} could not be started: {e}")))
}
