//! The device token, and what can be done with it.

mod memory;

use crate::driver::{KernelArg, Launch, LaunchDims};
use crate::{
    Event, Stream,
    driver::DeviceInfo,
    error::{Error, Result},
    fabric::{broadcast::Broadcasts, membership::Groups},
    gang::{Gang, LastCall},
    kernel::{Args, Kernel, Signature},
    memory::{MemorySnapshot, MemoryStats, stream::StreamCore},
    sync::device_thread_only,
    thread::worker::{PooledStream, Worker},
    token::recording::Recording,
};
use smallvec::SmallVec;
use std::{cell::Cell, fmt, marker::PhantomData, ops::Deref, panic::Location, rc::Rc, sync::Arc};

/// What the compiler calls a type whose values stay on their device's thread, when a program sends one to another
/// thread, shares it with one or returns it from a scope: [`Device`], [`OnStream`], [`Stream`],
/// [`Group`](crate::Group), [`Graph`](crate::Graph), [`GradientExchange`](crate::GradientExchange), and what
/// [`PerDevice`](crate::PerDevice) lends. Only a name: there are no values of it.
pub enum DeviceThreadOnly {}

device_thread_only! { [] Device, ['a] OnStream<'a> }

/// The token of a device: whoever has `&Device` is on that device's thread, inside a scope.
///
/// It is neither `Send` nor `Sync` nor `Clone`, so work on a device can be asked for only where it may be done:
///
/// ```compile_fail,E0277
/// # use gpu_pool::GpuPool;
/// GpuPool::scope(|dev, _| {
///     std::thread::scope(|s| { s.spawn(|| dev.synchronize()); }); // `Device` cannot be shared between threads
///     Ok(())
/// });
/// ```
///
/// nor does it leave its scope:
///
/// ```compile_fail
/// # use gpu_pool::{Device, GpuPool};
/// let mut leaked: Option<&Device> = None;
/// GpuPool::scope(|dev, _| { leaked = Some(dev); Ok(()) });
/// ```
///
/// All operations are asynchronous and run in order on the device's current stream (the token's own, or another through
/// [`on`](Self::on)), except those that return host data. Operations on the same memory are ordered by the library,
/// over streams and devices. Once a member of the gang has failed, every operation returns [`Error::Aborted`].
///
/// A closure that is bound to a variable first needs its types: `|dev: &Device, shard: Shard| ...`.
pub struct Device {
    pub(crate) worker: Rc<Worker>,
    pub(crate) session: Rc<Session>,
    pub(crate) stream: Arc<StreamCore>,
    pub(crate) ordered: bool,
    /// While it captures a graph.
    pub(crate) recording: Option<Rc<Recording>>,
}

/// A device's part in one scope.
pub(crate) struct Session {
    pub(crate) gang: Arc<Gang>,
    pub(crate) rank: usize,
    pub(crate) groups: Groups,
    pub(crate) headlines: Broadcasts,
    /// The last call that peers were, or are to be, told of.
    pub(crate) last_call: Cell<Option<LastCall>>,
}

/// The same device, working on another stream, or without ordering. Dereferences to [`Device`], so helpers that take
/// `&Device` work on any stream.
pub struct OnStream<'a> {
    dev: Device,
    of: PhantomData<&'a Stream>,
}

impl Deref for OnStream<'_> {
    type Target = Device;
    fn deref(&self) -> &Device {
        &self.dev
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device {} ({})", self.index(), self.name())
    }
}

/// Who and where.
impl Device {
    pub(crate) fn new(worker: &Rc<Worker>, gang: &Arc<Gang>, rank: usize) -> Self {
        Device {
            worker: worker.clone(),
            session: Rc::new(Session {
                gang: gang.clone(),
                rank,
                groups: Groups::default(),
                headlines: Broadcasts::default(),
                last_call: Cell::default(),
            }),
            stream: worker.main.clone(),
            ordered: true,
            recording: None,
        }
    }

    /// The ordinal in the pool.
    pub fn index(&self) -> usize {
        self.worker.handle.device
    }

    /// The rank in the gang: the place among the devices that run this scope.
    pub fn rank(&self) -> usize {
        self.session.rank
    }

    /// How many devices run this scope.
    pub fn count(&self) -> usize {
        self.session.gang.count()
    }

    /// Marketing name, or `software GPU`.
    ///
    /// It is borrowed from the device, so it does not leave the closure:
    ///
    /// ```compile_fail
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(2).build()?;
    /// let names = pool.run(|dev, _| Ok(dev.name()))?; // lifetime may not live long enough
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// A copy does:
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(2).build()?;
    /// let names = pool.run(|dev, _| Ok(dev.name().to_owned()))?;
    /// assert_eq!(names, ["software GPU", "software GPU"]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn name(&self) -> &str {
        &self.info().name
    }

    /// What the driver says of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.worker.handle.driver.info()
    }

    /// What the device's memory pool holds and has done. Takes in what other threads have freed first.
    pub fn stats(&self) -> MemoryStats {
        self.worker.cache.borrow_mut().stats()
    }

    /// Gives memory that is free back to the driver, in whole mappings (2 MiB or more each); how many bytes. What
    /// streams may still use stays with the pool: after [`synchronize`](Self::synchronize) that is less. Allocating
    /// again then costs driver calls, so this is for phases whose memory others need; `torch.cuda.empty_cache` is the
    /// like of it.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        self.check()?;
        let _here = self.worker.handle.enter("trim", Location::caller());
        let given = self.worker.cache.borrow_mut().trim(&|| self.check().is_err());
        self.check().map(|()| given)
    }

    /// The device's memory as it is now: every chunk and every block, and what happened, with places in the program
    /// where the pool [records](crate::Builder::record_memory).
    pub fn memory_snapshot(&self) -> MemorySnapshot {
        self.worker.cache.borrow_mut().snapshot()
    }

    /// `Err(Aborted)` once a member of the gang has failed: for long host-side work between operations, and before
    /// results that have come by [`download_pinned`](Self::download_pinned) are made use of outside. Collectives that
    /// are under way in a gang that fails end without having written what they should; who has seen one end, and then
    /// gets `Ok` here, has what it should have written.
    ///
    /// # Errors
    /// [`Error::Aborted`].
    pub fn check(&self) -> Result<()> {
        let gang = &self.session.gang;
        crate::scope::notice_given_up(&self.worker, gang);
        gang.check()
    }
}

/// Streams and events.
impl Device {
    /// A further stream. Give it back by dropping it; the scope waits for its work in any case.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn stream(&self) -> Result<Stream> {
        self.stream_with_priority(0)
    }

    /// [`stream`](Self::stream) whose work goes before that of streams with a higher number, where both wait for the
    /// device's processors; 0 is what other streams have. What a GPU does not distinguish (an H200: below -5, above 0)
    /// is the nearest that it does.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    #[track_caller]
    pub fn stream_with_priority(&self, priority: i32) -> Result<Stream> {
        self.not_in_graph("stream")?;
        self.check()?;
        let PooledStream { core, held, .. } = self.worker.stream(priority)?;
        Ok(Stream { core, _held: held })
    }

    /// This device, working on `stream`.
    pub fn on<'a>(&'a self, stream: &'a Stream) -> OnStream<'a> {
        self.with(stream.core.clone(), self.ordered)
    }

    /// This device, without the library's ordering: for code that orders its streams by events itself.
    ///
    /// # Safety
    /// Every two conflicting accesses on different streams are ordered by events (or streams), as in CUDA.
    pub unsafe fn unordered(&self) -> OnStream<'_> {
        self.with(self.stream.clone(), false)
    }

    /// This device, with the library's ordering, also if `self` goes without: for what the library does by itself.
    pub(crate) fn in_order(&self) -> OnStream<'_> {
        self.with(self.stream.clone(), true)
    }

    pub(crate) fn is_ordered(&self) -> bool {
        self.ordered
    }

    /// This device, working on a stream of the library's own.
    pub(crate) fn at(&self, stream: Arc<StreamCore>) -> OnStream<'_> {
        self.with(stream, self.ordered)
    }

    fn with<'a>(&self, stream: Arc<StreamCore>, ordered: bool) -> OnStream<'a> {
        let (worker, session, recording) = (self.worker.clone(), self.session.clone(), self.recording.clone());
        OnStream { dev: Device { worker, session, stream, ordered, recording }, of: PhantomData }
    }

    /// Marks this point of the current stream's work.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn record(&self) -> Result<Event> {
        self.not_in_graph("record")?;
        self.check()?;
        let _here = self.worker.handle.enter("record", Location::caller());
        Event::record(&self.stream, "record", false)
    }

    /// [`record`](Self::record) with the time at which the device gets there.
    ///
    /// # Errors
    /// [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn record_timed(&self) -> Result<Event> {
        self.not_in_graph("record_timed")?;
        self.check()?;
        let _here = self.worker.handle.enter("record_timed", Location::caller());
        Event::record(&self.stream, "record_timed", true)
    }

    /// All later work of the current stream waits, on the device, for the event. It may be any device's of the pool.
    ///
    /// # Errors
    /// [`Error::WrongPool`] for an event of another pool, [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn wait(&self, event: &Event) -> Result<()> {
        let op = self.op("wait")?;
        if event.0.stream.handle.pool != self.worker.handle.pool {
            return Err(Error::WrongPool { op: "wait", device: self.index(), site: op.site });
        }
        self.stream.wait_event("wait", event.0.raw, &event.0.stream, event.0.covered)?;
        op.submitted();
        Ok(())
    }

    /// The host waits for all work of the current stream. After `Ok` every collective of it has done what it should.
    ///
    /// # Errors
    /// [`Error::Timeout`] when it does not complete within the pool's deadline, [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let op = self.op("synchronize")?;
        let gang = &self.session.gang;
        let idle = self.stream.wait_idle(op.name, self.worker.shared.deadline, || gang.is_aborted());
        // A peer's failure is the reason, not the deadline.
        idle.map_err(|e| if matches!(e, Error::Timeout { .. }) { self.check().err().unwrap_or(e) } else { e })?;
        self.check()
    }
}

/// Driver calls of the user's own.
impl Device {
    /// Runs `f`, in which driver calls may be made that wait for running kernels: to allocate, free, map or register
    /// memory, to load modules, to instantiate graphs, to set up cuBLAS or cuDNN. Kernels of collectives wait for each
    /// other on the devices, and CUDA runs such calls under a lock that launches need, so the two could wait for each
    /// other for ever (nccl#744); here they take turns. The crate's own calls do so by themselves.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// pool.run(|dev, _| {
    ///     dev.blocking(|| { /* cudarc: ctx.load_module(..), CudaBlas::new(..) */ });
    ///     Ok(())
    /// })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// A collective within `f` is [`Error::InvalidArgument`] where its kernels would wait for each other.
    pub fn blocking<R>(&self, f: impl FnOnce() -> R) -> R {
        #[cfg(feature = "cuda")]
        let _guard = (!self.worker.is_software()).then(crate::driver::gate::blocking);
        let _blocked = self.worker.spinning.block();
        f()
    }
}

/// Kernels.
impl Device {
    /// Launches a kernel on the current stream. What its signature declares is ordered by the library.
    ///
    /// A tuple takes its parts by value. So a variable that is a `&mut` itself moves into it, and is gone:
    ///
    /// ```compile_fail,E0382
    /// # use gpu_pool::*;
    /// # static MODULE: Module = Module::ptx("");
    /// # kernel! { static STEP: "step" in MODULE, fn(y: &mut [f32], n: u64); }
    /// unsafe fn steps(dev: &Device, y: &mut DeviceBuffer<f32>) -> Result<()> {
    ///     let n = y.len() as u64;
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (y, n))? };
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (y, n)) } // use of moved value: `y`
    /// }
    /// ```
    ///
    /// Give `&mut *y`, which borrows it for the call:
    ///
    /// ```
    /// # use gpu_pool::*;
    /// # static MODULE: Module = Module::ptx("");
    /// # kernel! { static STEP: "step" in MODULE, fn(y: &mut [f32], n: u64); }
    /// unsafe fn steps(dev: &Device, y: &mut DeviceBuffer<f32>) -> Result<()> {
    ///     let n = y.len() as u64;
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (&mut *y, n))? };
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (&mut *y, n)) }
    /// }
    /// ```
    ///
    /// # Safety
    /// The device code (and its host kernel) fits the signature and, for these dimensions and arguments, touches nothing
    /// outside the given slices and writes through no `&[T]`.
    ///
    /// # Errors
    /// [`Error::KernelNotFound`] when the module was not given to the pool's builder, has no such function, or there is
    /// no host kernel on a software GPU; [`Error::WrongDevice`] for another device's buffer that did not come through
    /// [`peer()`](crate::DeviceBuffer::peer); [`Error::PeerDenied`] for a peer's memory that this device may not touch;
    /// [`Error::Aborted`]; the driver's.
    #[track_caller]
    pub unsafe fn launch<S: Signature, A: Args<S>>(&self, kernel: &Kernel<S>, dims: LaunchDims, args: A) -> Result<()> {
        let args = args.pack();
        let mut op = self.op_in_graph("launch")?;
        let function = self.worker.function(kernel.module, kernel.name)?;
        let mut raw: SmallVec<[KernelArg; 8]> = SmallVec::new();
        for packed in args {
            if let Some(touch) = &packed.touch {
                op.argument(touch)?;
                let peer = touch.block.device().unwrap_or(self.index());
                if !self.worker.shared.is_direct(self.index(), peer) {
                    return Err(Error::PeerDenied { device: self.index(), peer, op: "launch" });
                }
            }
            raw.push(packed.arg);
        }
        if kernel.host.is_none() && self.worker.is_software() {
            return Err(Error::KernelNotFound {
                device: self.index(),
                kernel: kernel.name.to_owned(),
                why: "it has no host kernel, which a software GPU needs".to_owned(),
            });
        }
        let launch = Launch { name: kernel.name, function, host: kernel.host, dims, args: &raw, early: false };
        // SAFETY: the arguments are live memory, ordered and noted by `op`; that they fit the kernel is the caller's
        // promise.
        op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
    }
}
