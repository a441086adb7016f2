//! The crate's error type. Its variants are sorted by the caller's remedies. `Error` is `Clone`, so that every member
//! of a poisoned gang can hold the cause.

mod calls;
pub(crate) mod misuse;
pub(crate) mod op_site;
pub(crate) mod out_of_memory;
pub(crate) mod site;
pub(crate) mod site_id;
pub(crate) mod units;
mod unknown_name;

pub use crate::token::DeviceThreadOnly;
use crate::{contain::text_of, here};
use calls::also_calls;
pub(crate) use calls::listed;
pub use calls::{DeviceCall, WorldCall};
pub use misuse::{Allocation, Kind, Operation, Report};
pub(crate) use op_site::OpGuard;
use op_site::OpSite;
pub(crate) use out_of_memory::BookedJob;
use out_of_memory::{Indented, OutOfMemoryReport};
pub(crate) use site_id::{OpId, SiteId};
use std::{error::Error as StdError, fmt, panic::Location, sync::Arc, time::Duration};
pub use unknown_name::UnknownName;

/// `Result` with this crate's [`Error`] as the default error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A call in the user's code, from `#[track_caller]`.
pub type Site = &'static Location<'static>;

/// Everything this crate reports. See the [module docs](self) for the principle.
///
/// In all variants `op` is the operation, `device` the ordinal in the pool of the device that it concerns, and `site`
/// the place of the call in the caller's code, unless the field says otherwise.
#[allow(missing_docs, reason = "three fields that most variants have are described once")]
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable device: no driver library, no GPU, or a requested ordinal that does not exist.
    #[error("no device: {reason}")]
    NoDevice {
        /// The missing device or driver, and the devices that were found.
        reason: String,
    },
    /// The device's memory, or the limit set for it, is used up. No data was lost; a smaller request may succeed.
    #[error(
        "device {device} is out of memory in {op}: {requested} bytes requested, {in_use} in use, {free} free \
         of {capacity}{}",
        Indented(.report)
    )]
    OutOfMemory {
        /// Ordinal in the pool.
        device: usize,
        /// The operation that requested memory.
        op: &'static str,
        /// Requested bytes.
        requested: u64,
        /// Bytes that live buffers of this pool hold on the device.
        in_use: u64,
        /// Free bytes, by the driver or the limit.
        free: u64,
        /// Size of the device's memory, or of the limit, in bytes.
        capacity: u64,
        /// The holders of the memory, the attempts to free some, and a hint; and the place in the caller's code.
        report: Arc<OutOfMemoryReport>,
    },
    /// A buffer of one device was given to another device's operation. Only copies, and kernels through
    /// [`peer()`](crate::DeviceBuffer::peer), may use buffers of other devices.
    #[error("{op}: a buffer of device {buffer} was used with device {device} at {site}")]
    WrongDevice {
        op: &'static str,
        /// The device that owns the buffer.
        buffer: usize,
        /// The device that was asked to work on it.
        device: usize,
        site: Site,
    },
    /// A buffer, event or state of one pool was given to another pool's device.
    #[error("{op}: something of another pool was used with device {device} at {site}")]
    WrongPool {
        op: &'static str,
        /// The device that was asked to work on it.
        device: usize,
        site: Site,
    },
    /// The devices of a gang called collectives that do not match. No buffer was changed.
    #[error(
        "collectives do not match ({what}): device {a} called {a_call} at {a_site}, device {b} \
         called {b_call} at {b_site}"
    )]
    Mismatch {
        /// The first difference that was found:
        ///
        /// * of two calls: "operation", "dtype", "count", "reduce op", "root", "counts" or "norm";
        /// * of graphs: "capture" if only one call is for a graph, "graph" if the calls are for different graphs;
        /// * of gradient exchanges: "exchange", "step", "bucket", "size", "settings" or "parameters";
        /// * "participation" if the closure of device `b` had ended. Then `b_site` is its last call, or the scope if it
        ///   made none.
        what: &'static str,
        /// One device.
        a: usize,
        /// The call of device `a`.
        a_call: String,
        /// The site of that call in the user's code.
        a_site: Site,
        /// Another device.
        b: usize,
        /// The call of device `b`.
        b_call: String,
        /// The site of that call in the user's code.
        b_site: Site,
    },
    /// Another member of the gang failed first, so this device stopped.
    #[error("aborted by device {by}: {cause}")]
    Aborted {
        /// The device that failed first.
        by: usize,
        /// Its failure.
        cause: Arc<Error>,
    },
    /// The graph is out of date, and nothing of it was launched: capture it again. There are two reasons. The graph has
    /// collectives, and a scope with this device has failed since the capture: then the contents of the collectives'
    /// memory are unspecified, and some members may not have the graph (so capture it on all members). Or the graph
    /// uses memory of a [`GradientExchange`](crate::gradients::GradientExchange) that has moved its gradients.
    #[error("{op}: the graph is of no use any more on device {device}: {why}; capture it again (at {site})")]
    GraphInvalidated {
        op: &'static str,
        device: usize,
        site: Site,
        /// The reason: an event since the capture.
        why: &'static str,
    },
    /// There was no progress for the time of the pool's deadline.
    #[error("device {device}: no progress for {waited:?} in {op}; missing: {missing:?}{}", also_calls(.last_calls))]
    Timeout {
        /// The device that waited.
        device: usize,
        /// The operation that waited.
        op: &'static str,
        /// Time without progress, by the clock, which also runs while the process is stopped.
        waited: Duration,
        /// Awaited devices: peers that had not come, or the device itself if it waited for its stream. Never empty.
        missing: Vec<usize>,
        /// The last call of each device that the wait knows of: all members of the scope, or the device itself. So a
        /// device that is missing is between this call and the next one.
        last_calls: Vec<DeviceCall>,
    },
    /// A device closure panicked; or the device's thread panicked outside of it, by a bug of this crate.
    #[error("the thread of device {device} panicked at {place}: {message}")]
    Panicked {
        /// The device of the closure.
        device: usize,
        /// The panic's message.
        message: String,
        /// File, line and column of the panic; "an unknown place" if the payload was passed to
        /// [`resume_unwind`](std::panic::resume_unwind) and came from no panic of this thread.
        place: String,
    },
    /// A failed scope had borrowed this state mutably. Its contents are unspecified until it is reset or cleared.
    #[error(
        "{op}: the state of device {device} was being written when a scope failed: make it anew with \
         `PerDevice::reset` or accept it with `PerDevice::clear_poison` (at {site})"
    )]
    Poisoned { op: &'static str, device: usize, site: Site },
    /// A scope, `close` or `per_device` was called on a device thread, where it would wait for itself.
    #[error("{op} was called on a device thread; device closures cannot start scopes (at {site})")]
    NestedScope {
        /// The called function.
        op: &'static str,
        site: Site,
    },
    /// The pool has been closed, or the queue of jobs.
    #[error("the pool is closed")]
    Closed,
    /// The job was cancelled, by its handle or with all jobs of its queue; or the scope was, by a
    /// [`CancelToken`](crate::CancelToken).
    #[error("{op}: cancelled at {site}")]
    Cancelled {
        /// "cancel" or "abort"; "jobs" if the value that would give the job was dropped.
        op: &'static str,
        site: Site,
    },
    /// The process forked after the pool was built; CUDA contexts and threads do not survive a fork.
    #[error(
        "the process forked after the pool was built (pool of pid {built}, now pid {now}): build a new pool in a \
         process that was started, not forked"
    )]
    Forked {
        /// The process that built the pool.
        built: u32,
        /// This process.
        now: u32,
    },
    /// The process can no longer use the device: a sticky error, or a GPU that fell off the bus.
    /// [`GpuPool::survivors`](crate::GpuPool::survivors) makes a pool of the other devices.
    #[error("device {device} is lost: {op}{} reported {name} ({code}); see `GpuPool::survivors`", at(.site))]
    DeviceLost {
        device: usize,
        /// The operation that reported the loss.
        op: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// Where in the caller's code; `None` if no call reported it: a scope's begin or end.
        site: Option<Site>,
    },
    /// The device has no access to a peer's memory, and the operation cannot be staged through the host.
    #[error("{op}: device {device} may not access the memory of device {peer} (at {site})")]
    PeerDenied {
        /// The device that wanted access.
        device: usize,
        /// The owner of the memory.
        peer: usize,
        op: &'static str,
        site: Site,
    },
    /// The checker (`gpu_pool_lab::Check`) refused an operation before it ran, or found an earlier write out of bounds.
    #[error("device {device}: {}\n{report}", report.found_at(.op))]
    Misuse {
        device: usize,
        op: &'static str,
        /// The mistake, with both operations and their call sites.
        report: Arc<Report>,
    },
    /// Every device waits, and nothing runs that could end a wait. This is found immediately, not after the deadline.
    #[error("deadlock, seen by device {device} in {op}: {who}")]
    Deadlock {
        device: usize,
        /// The operation that waited.
        op: &'static str,
        /// The list of all waits, with their call sites.
        who: String,
    },
    /// No such kernel on this device.
    #[error("{op}: kernel `{kernel}` was not found on device {device}: {why} (at {site})")]
    KernelNotFound {
        op: &'static str,
        device: usize,
        /// The kernel's name.
        kernel: String,
        /// The missing part.
        why: String,
        site: Site,
    },
    /// An invalid argument.
    #[error("{op}: {why} ({}at {site})", on(.device))]
    InvalidArgument {
        op: &'static str,
        /// The argument, and the reason.
        why: String,
        /// The ordinal of the device on whose thread the call was made; `None` on any other thread.
        device: Option<usize>,
        site: Site,
    },
    /// The norm of a step's gradients is NaN or infinite, so that step and the one that reports this changed no
    /// parameter. See `DataParallel::step` of `gpu-pool-train`.
    #[error("{op}: the norm of the gradients of step {step} is {norm}; no parameter was changed (at {site})")]
    NotFinite {
        /// The operation that reports it.
        op: &'static str,
        /// The step, counted from 0.
        step: u64,
        /// The norm.
        norm: f32,
        site: Site,
    },
    /// Per-device state is already borrowed in a way that excludes this borrow; or a graph is launched that touches
    /// memory which cudarc still uses on another stream (`dev.cuda()?.read(..)`). Or another device uses memory of a
    /// graph at the same time, and one of the two writes it: see [`Device::launch_graph`](crate::Device::launch_graph).
    /// Or another process has the memory: see `export` of `gpu-pool-cluster`.
    #[error("{op}: state or memory of device {device} is already borrowed (at {site}){}", by(holder))]
    Borrowed {
        op: &'static str,
        device: usize,
        site: Site,
        /// The operation of another device that uses the memory at the same time, and where it was called.
        holder: Option<(&'static str, Site)>,
    },
    /// A process of the cluster is lost: killed, stopped, or its connection broke. The cluster has ended, and every
    /// process that is left gets this error. The pool still does work that needs no other process.
    #[error("host {host} is lost, found in {op}: {why}")]
    HostLost {
        /// The process's number in the cluster; of one that shares memory (`gpu_pool_cluster::ipc`) its process id.
        host: usize,
        /// The operation that found it.
        op: &'static str,
        /// The observation.
        why: String,
    },
    /// The processes called collectives, or began scopes, that do not match. No buffer was changed.
    #[error("calls of several hosts do not match ({what}): {a}, {b}")]
    WorldMismatch {
        /// The difference: "call", "group", "participation".
        what: &'static str,
        /// One call.
        a: Box<WorldCall>,
        /// The other one.
        b: Box<WorldCall>,
    },
    /// Another process made no progress for the time of the deadline.
    #[error("no progress of other hosts for {waited:?} in {op}; missing hosts: {missing:?}")]
    HostTimeout {
        /// The operation that waited.
        op: String,
        /// Time without progress.
        waited: Duration,
        /// The awaited processes: the first 4096 at most. Never empty.
        missing: Vec<usize>,
    },
    /// Another process has failed the scope.
    #[error("aborted by {}host {host}: {cause}", device.map_or_else(String::new, |it| format!("device {it} of ")))]
    AbortedByHost {
        /// The process that failed first.
        host: usize,
        /// Its device that failed first; `None` if the failure was on no device.
        device: Option<usize>,
        /// The text of its error.
        cause: String,
    },
    /// A cluster could not be made: its settings, its address, its secret, or a library that is not there.
    #[error("cluster: {op}: {why}")]
    Cluster {
        /// The step: "environment", "connect", "transport", ..
        op: &'static str,
        /// The fault, and its remedy.
        why: String,
    },
    /// The library that moves data between processes has failed.
    #[error("{library}: {op} failed: {why} ({code})")]
    Transport {
        /// "nccl", "mpi" or "shm".
        library: &'static str,
        /// Its function.
        op: &'static str,
        /// Its error code.
        code: i32,
        /// Its text.
        why: String,
    },
    /// The system has started no thread: a limit on threads or on memory, as `RLIMIT_NPROC` or a container's limit.
    #[error("{op}: no thread could be started: {why} ({}at {site})", on(.device))]
    NoThread {
        /// The operation that needs the thread.
        op: &'static str,
        /// The device that the thread is for, if it is for one.
        device: Option<usize>,
        /// The system's reason.
        why: String,
        site: Site,
    },
    /// Any other error of the driver.
    #[error("device {device}: {op} failed with {name} ({code}){detail}")]
    Driver {
        device: usize,
        op: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// Further information (a compiler's log): empty, or a text that starts with ": ".
        detail: String,
    },
    /// The caller's error, from [`Error::custom`], carried through a scope. If its `Display` panics, the text says so.
    #[error("{}", text_of(.0, "an error of the caller, whose text panicked"))]
    Custom(Arc<dyn StdError + Send + Sync + 'static>),
}

/// For the compiler's message after `?` on another error: no type implements it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no error of this crate",
    label = "`GpuPool::try_run` takes closures with errors of any type; or wrap this one: `.map_err(Error::custom)?`"
)]
pub trait TryRun {}

#[doc(hidden)]
impl From<std::io::Error> for Error
where
    for<'never> std::io::Error: TryRun,
{
    fn from(error: std::io::Error) -> Self {
        Error::custom(error)
    }
}

impl Error {
    /// Wraps the caller's own error, or a message, so that a device closure can return it.
    ///
    /// ```
    /// # use gpu_pool::Error;
    /// let e = Error::custom("the label column is missing");
    /// assert_eq!(e.to_string(), "the label column is missing");
    /// ```
    pub fn custom(e: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        Error::Custom(Arc::from(e.into()))
    }

    /// At the site of the user's call: each function between that call and this one is `#[track_caller]`, too.
    #[track_caller]
    pub(crate) fn invalid(op: &'static str, why: impl fmt::Display) -> Self {
        Error::invalid_at(Location::caller(), op, why)
    }

    pub(crate) fn invalid_at(site: Site, op: &'static str, why: impl fmt::Display) -> Self {
        let OpSite { op, site } = OpSite::outermost(op, site);
        Error::InvalidArgument { op, why: why.to_string(), device: here::device(), site }
    }

    #[track_caller]
    pub(crate) fn wrong_pool(op: &'static str, device: usize) -> Self {
        let OpSite { op, site } = OpSite::outermost(op, Location::caller());
        Error::WrongPool { op, device, site }
    }

    #[track_caller]
    pub(crate) fn wrong_device(op: &'static str, buffer: usize, device: usize) -> Self {
        let OpSite { op, site } = OpSite::outermost(op, Location::caller());
        Error::WrongDevice { op, buffer, device, site }
    }

    #[track_caller]
    pub(crate) fn borrowed(op: &'static str, device: usize) -> Self {
        let OpSite { op, site } = OpSite::outermost(op, Location::caller());
        Error::Borrowed { op, device, site, holder: None }
    }

    /// [`borrowed`](Self::borrowed) by an operation of another device.
    #[track_caller]
    pub(crate) fn borrowed_by(op: &'static str, device: usize, holder: OpSite) -> Self {
        let OpSite { op, site } = OpSite::outermost(op, Location::caller());
        Error::Borrowed { op, device, site, holder: Some((holder.op, holder.site)) }
    }
}

fn on(device: &Option<usize>) -> String {
    device.map_or_else(String::new, |device| format!("device {device}, "))
}

fn by(holder: &Option<(&'static str, Site)>) -> String {
    holder.map_or_else(String::new, |(op, site)| format!(", by {op} at {site}"))
}

fn at(site: &Option<Site>) -> String {
    site.map_or_else(String::new, |site| format!(" at {site}"))
}
