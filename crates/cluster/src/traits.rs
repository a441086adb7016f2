//! The needs of collectives that span processes: their agreement ([`World`], [`WorldScope`]) and a way for bytes
//! ([`Transport`]). A *host* is one process of the cluster, with its number; several may run on one machine. A *place*
//! is a device of a host. A *rail* is what moves data between the devices of all hosts with one local index.
//!
//! Invariants (rules C1, C2 and C3 of `docs/src/design/cluster.md`):
//!
//! * Before a member arrives, all that it sends is staged. From the commit on its messages do not depend on its gang,
//!   which may fail meanwhile. (Messages of two members alone are given up at both ends some time after a failure.)
//! * After the arrival only the hub decides whether a collective is committed.
//! * Each process carries committed collectives out in the hub's order: [`Window`].

use crate::runtime::{Address, Alarm, BlockRef, LonePad, Place, RawStream, WallClock};
use gpu_pool::{DType, Error, PinnedBuffer, ReduceOp, Result, error::Site};
use parking_lot::Mutex;
use std::{
    fmt,
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};

/// Offset that gives in-flight messages an id apart from their device.
pub const OUTBOX: usize = 1 << 16;

/// The processes of a cluster, as one of them sees them.
pub trait World: Send + Sync + fmt::Debug {
    fn host(&self) -> usize;

    fn devices(&self) -> &[usize];

    fn transport(&self) -> &Transport;

    /// `Err` once a process is lost: nothing between processes works any more.
    fn check(&self) -> Result<()>;

    /// As [`Processes::clock`](crate::runtime::Processes::clock).
    fn clock(&self) -> Option<WallClock>;

    /// As [`Processes::tell`](crate::runtime::Processes::tell).
    fn tell(&self, _failure: &str, _words: &str) {}

    /// As [`Processes::when_told`](crate::runtime::Processes::when_told).
    fn when_told(&self, _host: usize, _failure: &str, _hear: Box<dyn FnOnce(&str) + Send>) {}

    /// Counts the scopes without names that begin at this place of the program: 1, 2, .. No other process is told.
    fn count(&self, site: Site) -> u64;

    /// Begins a scope of all processes. `progress` grows while the devices of the scope make progress.
    fn begin(
        &self,
        entry: Entry<'_>,
        deadline: Duration,
        progress: Arc<dyn Fn() -> u64 + Send + Sync>,
        site: Site,
    ) -> Result<(Arc<dyn WorldScope>, Window)>;
}

/// How a scope finds its counterparts in the other processes.
pub enum Entry<'e> {
    /// The n-th of a name here belongs to the n-th of that name everywhere. The call waits until all processes have
    /// announced it, and it returns in the hub's order of such scopes; the scope must then enter the queues of its
    /// devices before the [`Window`] is dropped.
    Named(&'e str),
    /// It has no name, and joins by the first call that needs other processes, in the order of these calls. `nth`: its
    /// [number](World::count) at its place.
    ///
    /// With `failed` it has failed before such a call: the device by its ordinal, and the cause. Others may wait for
    /// it, or it may be of this process alone. So it belongs to a scope of others only if place and number are equal.
    Unnamed { nth: u64, failed: Option<(usize, &'e Error)> },
}

/// One scope of all processes.
pub trait WorldScope: Send + Sync {
    /// Meets the other hosts of a group for one collective. All members of this host call it, after they have met among
    /// themselves, or by the [proxy thread](Arrival::proxied). It returns when the hub has committed the collective and
    /// it is this one's turn. No failure of the gang and no deadline of this process ends the wait: the hub does.
    /// Errors: [`Error::WorldMismatch`], [`Error::HostTimeout`], [`Error::AbortedByHost`], [`Error::HostLost`].
    fn meet(&self, arrival: Arrival<'_>) -> Result<Commit>;

    /// Tells all processes that this one has failed the scope. `device`: by its ordinal, if by one of its devices.
    /// Collectives that are committed are carried out nevertheless.
    fn fail(&self, device: Option<usize>, cause: &Error);

    /// `tell` is called once, from a thread of the cluster, when another process fails the scope or is lost; at once
    /// if that has happened already. It must not wait.
    fn when_failed(&self, tell: Box<dyn FnOnce(Error) + Send>);

    /// Ends the scope: waits until all processes end it; after a failure, here or elsewhere, it need not wait. An error
    /// of another process is an error here.
    fn end(&self) -> Result<()>;
}

/// A member's message on arrival at a collective.
pub struct Arrival<'a> {
    /// The group's members, in the order of their ranks.
    pub members: &'a [Place],
    /// The number of the group's collective: 1, 2, ..
    pub number: u64,
    pub place: Place,
    /// Operation, type, length: they must be equal on all hosts.
    pub call: &'a str,
    pub site: Site,
    /// Whether this member speaks for its host's members: the first one of them.
    pub leads: bool,
    /// Set for collectives run by the proxy thread, concurrent with the member's own. All members of the host lead
    /// then, in any order: the host has arrived with the last one.
    pub proxied: bool,
    /// Of the leader: a value for all hosts, at most [`MOST_NOTE`] bytes.
    pub note: Vec<u8>,
}

pub const MOST_NOTE: usize = 4096;

pub struct Commit {
    /// For each of the group's hosts, in ascending order: a number that it never has again, and that tells the messages
    /// that it sends from others.
    pub numbers: Vec<u64>,
    /// The notes of the group's hosts, in ascending order of the hosts.
    pub notes: Vec<Vec<u8>>,
    pub window: Window,
}

/// The turn of a collective, or of a scope, in this process. The next one's turn comes when all members' windows are
/// dropped: after the launch of what waits for other hosts.
pub struct Window(Option<Box<dyn FnOnce() + Send>>);

impl Window {
    /// `close` is called when the window is dropped.
    pub fn new(close: impl FnOnce() + Send + 'static) -> Window {
        Window(Some(Box::new(close)))
    }

    /// For what needs no turn.
    pub fn none() -> Window {
        Window(None)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(close) = self.0.take() {
            close();
        }
    }
}

#[derive(Clone)]
pub enum Transport {
    /// Bytes of the hosts' memory, such as MPI's.
    Host(Arc<dyn HostTransport>),
    /// The memory of devices, in the order of streams, such as NCCL's.
    Device(Arc<dyn DeviceTransport>),
    /// There is none. Each collective of several hosts is an error, which says what to install or to use.
    None(Error),
}

impl Transport {
    fn name(&self) -> &'static str {
        match self {
            Transport::Host(transport) => transport.name(),
            Transport::Device(transport) => transport.name(),
            Transport::None(_) => "none",
        }
    }
}

debug_as!(Transport, |self| "{}", self.name());

/// Tells messages between two processes from each other. Messages with one tag between two processes stay in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Tag {
    /// The sender's, of [`Commit::numbers`].
    pub number: u64,
    /// Steps of one collective, on one rail: 0, 1, .. Less than 16.
    pub phase: u32,
    /// The rail: the receiving device. Less than 64. A number may come again after 256 others, and only one thread
    /// receives for a device in a phase, so messages with one tag never meet.
    pub rail: u32,
}

impl Tag {
    /// Behind the phases of a collective: of one that another thread carries ([`Arrival::proxied`]).
    pub const PROXIED: u32 = 4;
    /// The phase of messages.
    pub const MESSAGES: u32 = 8;
}

/// A message, with its memory. It belongs to the transport until it is done: the memory of messages that a lost process
/// leaves unfinished is never freed.
pub enum Message {
    /// Reads a range of the bytes.
    Send { to: usize, tag: Tag, bytes: Arc<PinnedBuffer<u8>>, range: Range<usize> },
    /// Fills the first `len` bytes.
    Receive { from: usize, tag: Tag, into: PinnedBuffer<u8>, len: usize },
}

/// Moves bytes of the hosts' memory.
pub trait HostTransport: Send + Sync {
    fn name(&self) -> &'static str;

    /// Carries out all these messages at once, and returns them in their order when all are done. Any number of
    /// threads may call it at once, also for messages between the same processes, with different tags. Messages of any
    /// length, also 0, and of a process to itself are allowed.
    ///
    /// `lost` is asked now and then: once it gives an error, the call ends with that error. Errors:
    /// [`Error::Transport`], [`Error::HostLost`].
    fn exchange(&self, messages: Vec<Message>, lost: &dyn Fn() -> Option<Error>) -> Result<Vec<Message>>;

    /// Memory that all hosts have in common, if there is some. All hosts have one answer.
    fn common_memory(self: Arc<Self>) -> Option<Arc<dyn CommonMemory>> {
        None
    }
}

/// Memory that all processes of one machine have mapped. Each has a part of it.
pub trait CommonMemory: Send + Sync {
    /// Takes bytes of this process's part, with whatever they have. Returns where they begin: a multiple of a page.
    /// [`Error::Transport`]: there are not so many.
    fn take(&self, bytes: usize) -> Result<u64>;

    /// This process no longer uses these bytes, nor do others once `done` says so. It is asked while this object lives.
    fn give(&self, at: u64, bytes: usize, done: Box<dyn Fn() -> bool + Send>);

    /// The address of bytes of a host's part. [`Error::Transport`]: they are not there.
    fn address(&self, host: usize, at: u64, bytes: usize) -> Result<*mut u8>;

    /// Waits for what other processes do to the memory. `lost`, as of [`HostTransport::exchange`], has the errors.
    fn wait(&self, done: &dyn Fn() -> bool, lost: &dyn Fn() -> Option<Error>) -> Result<()>;
}

/// How calls run beside other work of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The least bytes of a call that are worth one.
    pub piece: usize,
    /// The most multiprocessors that the kernels of a call take.
    pub blocks: u32,
}

/// Moves data between the devices of one rail, in the order of a stream.
pub trait DeviceTransport: Send + Sync {
    fn name(&self) -> &'static str;

    /// The pad by which GPUs of one host, one in each process, sum up small buffers by own kernels; or why there is
    /// none, nothing where that is no question. All hosts have pads, or none.
    fn pad(&self) -> std::result::Result<&LonePad, &str> {
        Err("")
    }

    /// Work behind a commit was not submitted, and other hosts count on it: ends the calls of all. Returns the cause.
    fn broken(&self, error: Error) -> Error {
        error
    }

    /// Tells of kernels of the pad that have given up.
    fn alarm(&self) -> Option<Arc<dyn Alarm>> {
        None
    }

    /// Whether calls reduce these elements as [`ReduceOp`] says. If not, the caller does, with [`Messages`].
    ///
    /// [`Messages`]: RailCall::Messages
    fn can(&self, _dtype: DType, _reduce: ReduceOp) -> bool {
        true
    }

    /// Whether it carries out [`AllGather`](RailCall::AllGather) and [`Broadcast`](RailCall::Broadcast). If not, the
    /// caller sends messages.
    fn copies(&self) -> bool {
        true
    }

    /// How large collectives are cut into several calls, which run beside other kernels of the device. None: they are
    /// not, such as where the host waits in a call, or where devices share a GPU. All hosts have one answer.
    fn overlaps(&self) -> Option<Overlap> {
        None
    }

    /// Submits one call to the stream of a device of this process; the device's ordinal is the rail. Any thread may
    /// call it that holds the collective's [`Window`].
    ///
    /// # Safety
    /// The memory is the device's, or page-locked. It lives until the stream has passed the call, and nothing else
    /// touches it meanwhile. After an error it is never freed. All other hosts of the rail submit the same call.
    /// Errors: [`Error::Transport`].
    unsafe fn submit(&self, device: usize, stream: RawStream, call: &RailCall<'_>) -> Result<()>;

    /// Whether [`register`](Self::register) is of use.
    fn registers(&self) -> bool {
        false
    }

    /// Makes a chunk of a device's memory known to the library, which then needs no copies through buffers of its own.
    /// Local: no other host takes part. It ends when the result is dropped, on the device's thread: that waits until
    /// all uses of the chunk are over. None: the library does no such thing, or was told not to.
    ///
    /// Calls may name memory of such a chunk only if all hosts of the rail do, at one distance from its beginning.
    /// Errors: [`Error::Transport`].
    fn register(&self, _device: usize, _chunk: &BlockRef) -> Result<Option<Box<dyn Send + Sync>>> {
        Ok(None)
    }

    /// The distance from the beginning of its chunk, if the library knows this memory of a device.
    fn registered(&self, _device: usize, _at: Address) -> Option<u64> {
        None
    }

    /// The error of a call that was submitted and has failed since, if any.
    fn failed(&self, device: usize) -> Option<Error>;

    /// `tell` is called, by any thread, when a call has failed since its submission, or a rail ends before its time; at
    /// once if that has happened. Waits for this process's streams end only after that. It is forgotten once dropped.
    fn when_failed(&self, tell: &Arc<Tell>);
}

/// Hears of a failure. It must not wait.
pub type Tell = dyn Fn(Error) + Send + Sync;

/// The first failure of a transport, and the listeners that are told of it.
#[derive(Default)]
pub struct Failure(Mutex<(Option<Error>, Vec<Weak<Tell>>)>);

impl Failure {
    pub fn cause(&self) -> Option<Error> {
        self.0.lock().0.clone()
    }

    /// The first error stays, and all hear of it once. Returns it.
    pub fn set(&self, error: &Error) -> Error {
        let mut state = self.0.lock();
        let cause = state.0.get_or_insert_with(|| error.clone()).clone();
        let listeners = std::mem::take(&mut state.1);
        drop(state);
        listeners.iter().filter_map(Weak::upgrade).for_each(|tell| tell(cause.clone()));
        cause
    }

    /// As [`DeviceTransport::when_failed`].
    pub fn when(&self, tell: &Arc<Tell>) {
        let mut state = self.0.lock();
        match state.0.clone() {
            Some(cause) => {
                drop(state);
                tell(cause);
            }
            None => {
                state.1.retain(|listener| listener.strong_count() > 0);
                state.1.push(Arc::downgrade(tell));
            }
        }
    }
}

/// A call on a rail. All but `Messages` are of all hosts of the cluster.
#[derive(Clone, Copy, Debug)]
pub enum RailCall<'a> {
    /// Both addresses may be one.
    AllReduce { source: Address, destination: Address, len: usize, dtype: DType, reduce: ReduceOp },
    /// Part `h` of the sum of all sources goes to host `h`; each of the `parts` has `len` elements. In place the
    /// destination is the own part of the source.
    ReduceScatter { source: Address, destination: Address, len: usize, parts: usize, dtype: DType, reduce: ReduceOp },
    /// `bytes` of each host, in their order: `parts` of them. In place the source is the own part of the destination.
    AllGather { source: Address, destination: Address, bytes: usize, parts: usize },
    /// In place.
    Broadcast { at: Address, bytes: usize, root: usize },
    /// All at once.
    Messages(&'a [RailMessage]),
}

/// Bytes at an address of this host that go to another one, or come from it.
#[derive(Clone, Copy, Debug)]
pub struct RailMessage {
    pub sends: bool,
    pub peer: usize,
    pub at: Address,
    pub bytes: usize,
}

impl RailCall<'_> {
    /// The memory of a call that members submit: address, bytes, and whether they are written.
    pub fn memory(&self) -> Vec<(Address, usize, bool)> {
        match *self {
            RailCall::AllReduce { source, destination, len, dtype, .. } => {
                let bytes = len * dtype.size();
                let read = Some((source, bytes, false)).filter(|_| source != destination);
                read.into_iter().chain([(destination, bytes, true)]).collect()
            }
            RailCall::ReduceScatter { source, destination, len, parts, dtype, .. } => {
                let bytes = len * dtype.size();
                vec![(source, parts * bytes, false), (destination, bytes, true)]
            }
            RailCall::AllGather { source, destination, bytes, parts } => {
                vec![(source, bytes, false), (destination, parts * bytes, true)]
            }
            RailCall::Broadcast { at, bytes, .. } => vec![(at, bytes, true)],
            RailCall::Messages(messages) => messages.iter().map(|of| (of.at, of.bytes, !of.sends)).collect(),
        }
    }
}

impl RailMessage {
    pub fn send(peer: usize, at: Address, bytes: usize) -> RailMessage {
        RailMessage { sends: true, peer, at, bytes }
    }

    pub fn receive(peer: usize, at: Address, bytes: usize) -> RailMessage {
        RailMessage { sends: false, peer, at, bytes }
    }
}
