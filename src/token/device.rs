//! The token [`Device`]. Higher rooms add `impl` blocks with the operations. Invariant: a token exists only on its
//! device's thread, and only while its scope runs.

use super::recording::Recording;
use crate::fabric::{Broadcasts, ProcessScope, membership::Groups};
use crate::gang::{Gang, LastCall};
use crate::thread::{wait::Waiter, worker::Worker};
use crate::{Stream, driver::DeviceInfo, error::Result, memory::StreamCore, sync::device_thread_only};
use std::{cell::Cell, marker::PhantomData, ops::Deref, rc::Rc, sync::Arc};

/// A name for compiler messages. A program that sends a value to another thread, shares it with one or returns it from
/// a scope gets a message with this name if the value must stay on its device's thread.
///
/// Such types are [`Device`], [`OnStream`], [`Stream`], [`Group`](crate::Group), [`Graph`](crate::Graph),
/// [`GradientExchange`](crate::gradients::GradientExchange), and the guards of [`PerDevice`](crate::PerDevice). The
/// enum has no values.
#[derive(Debug)]
pub enum DeviceThreadOnly {}

device_thread_only! { [] Device, ['a] OnStream<'a> }

/// The token of a device: code that has a `&Device` runs on that device's thread, inside a scope.
///
/// | to | methods |
/// |---|---|
/// | copy between host and device | [`upload`](Self::upload), [`download`](Self::download), [`upload_into`](Self::upload_into), [`download_into`](Self::download_into) |
/// | copy without a wait of the host | [`pinned`](Self::pinned), [`upload_pinned`](Self::upload_pinned), [`download_pinned`](Self::download_pinned) |
/// | copy between devices | [`copy`](Self::copy), [`copy_to`](crate::DeviceBuffer::copy_to) |
/// | have memory | [`zeros`](Self::zeros), [`uninit`](Self::uninit), [`stats`](Self::stats), [`trim`](Self::trim), [`memory_snapshot`](Self::memory_snapshot) |
/// | compute | [`fill`](Self::fill), [`scale`](Self::scale), [`axpy`](Self::axpy), [`sum`](Self::sum), [`dot`](Self::dot), [`cast`](Self::cast), [`matmul`](Self::matmul), [`gemm`](Self::gemm); more in `gpu-pool-train` |
/// | launch your own kernels | [`launch`](Self::launch) |
/// | combine data of all devices | [`all_reduce`](Self::all_reduce), [`reduce_scatter`](Self::reduce_scatter), [`all_gather`](Self::all_gather), [`broadcast`](Self::broadcast), [`all_to_all`](Self::all_to_all), [`reduce`](Self::reduce), [`gather`](Self::gather), [`scatter`](Self::scatter) |
/// | combine several buffers, or parts of unequal length | [`all_reduce_many`](Self::all_reduce_many), [`all_gather_v`](Self::all_gather_v), [`reduce_scatter_v`](Self::reduce_scatter_v), [`all_to_all_v`](Self::all_to_all_v) |
/// | work in some of the devices only | [`group`](Self::group) |
/// | give data to one device | [`send`](Self::send), [`recv`](Self::recv), [`sendrecv`](Self::sendrecv), [`give`](Self::give), [`take`](Self::take) |
/// | exchange values of the host | [`exchange`](Self::exchange), [`send_owned`](Self::send_owned), [`recv_any`](Self::recv_any) |
/// | meet | [`barrier`](Self::barrier) |
/// | overlap work | [`stream`](Self::stream), [`on`](Self::on), [`record`](Self::record), [`wait`](Self::wait) |
/// | measure time | [`record_timed`](Self::record_timed) |
/// | wait for the device | [`synchronize`](Self::synchronize) |
/// | launch many operations as one | [`capture`](Self::capture), [`launch_graph`](Self::launch_graph) |
/// | know the device and its place | [`index`](Self::index), [`rank`](Self::rank), [`count`](Self::count), [`name`](Self::name), [`info`](Self::info) |
/// | notice failures and cancellation | [`check`](Self::check), [`cancelled`](Self::cancelled) |
/// | work in several processes | [`world`](Self::world) |
/// | use memory and streams of other code | [`adopt`](Self::adopt), [`adopt_stream`](Self::adopt_stream); with the feature `dlpack` `from_dlpack`, `to_dlpack` |
/// | call CUDA libraries | [`cuda`](Self::cuda), [`blocking`](Self::blocking) |
/// | take over the order of operations | [`unordered`](Self::unordered) |
///
/// The token is neither `Send` nor `Sync` nor `Clone`. So only the device's own thread can submit work to the device.
/// The token does not leave its scope either.
///
/// Operations are asynchronous, except those that return host data. They run in order on the token's current stream:
/// the device's main stream, or another one through [`on`](Self::on). The library orders operations on the same memory,
/// across streams and devices. After a member of the gang has failed, every operation returns
/// [`Error::Aborted`](crate::Error::Aborted).
///
/// A closure that is bound to a variable before its use needs types: `|dev: &Device, shard: Shard| ...`.
pub struct Device {
    pub(crate) worker: Rc<Worker>,
    pub(crate) session: Rc<Session>,
    pub(crate) stream: Arc<StreamCore>,
    pub(crate) ordered: bool,
    pub(crate) recording: Option<Rc<Recording>>,
}

/// A device's part in one scope. All tokens of the device in this scope share it.
pub(crate) struct Session {
    pub(crate) gang: Arc<Gang>,
    pub(crate) rank: usize,
    pub(crate) groups: Groups,
    pub(crate) broadcasts: Broadcasts,
    pub(crate) world: Option<Arc<dyn ProcessScope>>,
    pub(crate) last_call: Cell<Option<LastCall>>,
}

/// A [`Device`] that works on another stream, or without the library's ordering. It dereferences to [`Device`], so
/// helper functions that take `&Device` work on any stream.
#[derive(Debug)]
#[must_use = "operations of the value go to the other stream"]
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

debug_as!(Device, |self| "Device {} ({})", self.index(), self.name());

impl Device {
    pub(crate) fn new(
        worker: &Rc<Worker>,
        gang: &Arc<Gang>,
        rank: usize,
        world: Option<&Arc<dyn ProcessScope>>,
    ) -> Self {
        let (gang, world, last_call) = (gang.clone(), world.cloned(), Cell::default());
        let (groups, broadcasts) = (Groups::default(), Broadcasts::default());
        let session = Rc::new(Session { gang, rank, groups, broadcasts, world, last_call });
        let (worker, stream) = (worker.clone(), worker.main.clone());
        Device { worker, session, stream, ordered: true, recording: None }
    }

    /// The device's ordinal in the pool.
    pub fn index(&self) -> usize {
        self.worker.handle.device
    }

    /// The device's rank in the gang: its position among the devices that run this scope.
    pub fn rank(&self) -> usize {
        self.session.rank
    }

    /// The number of devices that run this scope.
    pub fn count(&self) -> usize {
        self.session.gang.count()
    }

    /// The marketing name, or `software GPU`.
    ///
    /// The name is borrowed from the device: only a copy leaves the closure.
    pub fn name(&self) -> &str {
        &self.info().name
    }

    /// The driver's report about the device.
    pub fn info(&self) -> &DeviceInfo {
        self.worker.handle.driver.info()
    }

    /// `Err(Aborted)` after a member of the gang has failed. Call it during long host-side work between operations, and
    /// before results of [`download_pinned`](Self::download_pinned) are used outside the scope.
    ///
    /// A collective that is under way when its gang fails ends without its result. But if the program has seen the
    /// collective end, and then gets `Ok` here, the result is complete.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted).
    pub fn check(&self) -> Result<()> {
        let gang = &self.session.gang;
        self.worker.shared.check_kernels(gang);
        gang.check()
    }

    /// Whether this closure should end early: its job or scope was cancelled, or a member of its gang has failed. A
    /// load, for loops of host-side work. Operations then return [`Error::Aborted`](crate::Error::Aborted).
    pub fn cancelled(&self) -> bool {
        self.session.gang.is_aborted()
    }

    pub(crate) fn waiter(&self) -> Waiter<'_> {
        Waiter { worker: &self.worker, gang: &self.session.gang, rank: self.rank() }
    }

    /// This device, working on `stream`.
    pub fn on<'a>(&'a self, stream: &'a Stream) -> OnStream<'a> {
        self.with(stream.core.clone(), self.ordered)
    }

    /// This device, without the library's ordering: for code that orders its streams by events itself.
    ///
    /// # Safety
    /// Any two conflicting accesses on different streams are ordered by events (or by streams), as in CUDA.
    pub unsafe fn unordered(&self) -> OnStream<'_> {
        self.with(self.stream.clone(), false)
    }

    pub(crate) fn in_order(&self) -> OnStream<'_> {
        self.with(self.stream.clone(), true)
    }

    pub(crate) fn is_ordered(&self) -> bool {
        self.ordered
    }

    fn with<'a>(&self, stream: Arc<StreamCore>, ordered: bool) -> OnStream<'a> {
        let (worker, session, recording) = (self.worker.clone(), self.session.clone(), self.recording.clone());
        OnStream { dev: Device { worker, session, stream, ordered, recording }, of: PhantomData }
    }
}
