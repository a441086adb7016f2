//! What can go wrong, sorted by what the caller can do about it.
//!
//! Every variant that concerns a device names it (its ordinal in the pool) and the operation. `Error` is `Clone`, so
//! that every member of a poisoned gang can hold the one cause; the place in the user's code is kept where it helps.

pub(crate) mod misuse;
pub(crate) mod op_site;
pub(crate) mod out_of_memory;
pub(crate) mod site;
pub(crate) mod units;

use crate::here;
use misuse::{Kind, Report};
use out_of_memory::{Indented, OutOfMemoryReport};
use std::{error::Error as StdError, fmt, panic::Location, sync::Arc, time::Duration};

/// `Result` with this crate's [`Error`] unless another is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A place in the user's code, as `#[track_caller]` saw it.
pub type Site = &'static Location<'static>;

/// Everything this crate reports. See the [module docs](self) for the principle.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable device: no driver library, no GPU, or a requested ordinal that is not there.
    #[error("no device: {reason}")]
    NoDevice {
        /// What was looked for and what was found instead.
        reason: String,
    },
    /// The device's memory, or the limit set for it, is used up. Nothing was lost; a smaller request may succeed.
    #[error(
        "device {device} is out of memory in {op}: {requested} bytes requested, {in_use} in use, {free} free of {capacity}{}",
        Indented(.report)
    )]
    OutOfMemory {
        /// Ordinal in the pool.
        device: usize,
        /// The operation that asked.
        op: &'static str,
        /// Bytes asked for.
        requested: u64,
        /// Bytes that live buffers of this pool hold on the device.
        in_use: u64,
        /// Bytes that were free, as the driver or the limit says.
        free: u64,
        /// Bytes of the device, or of the limit.
        capacity: u64,
        /// Who holds the memory, what was tried, and what may help.
        report: Arc<OutOfMemoryReport>,
    },
    /// A buffer of one device was given to another device's operation. Copies, and kernels through
    /// [`peer()`](crate::DeviceBuffer::peer), are all that cross devices.
    #[error("{op}: a buffer of device {buffer} was used with device {device} at {site}")]
    WrongDevice {
        /// The operation.
        op: &'static str,
        /// Where the buffer lives.
        buffer: usize,
        /// The device that was asked to work on it.
        device: usize,
        /// Where in the caller's code.
        site: Site,
    },
    /// A buffer, event or state of one pool was given to another pool's device.
    #[error("{op}: something of another pool was used with device {device} at {site}")]
    WrongPool {
        /// The operation.
        op: &'static str,
        /// The device that was asked to work on it.
        device: usize,
        /// Where in the caller's code.
        site: Site,
    },
    /// The devices of a gang called collectives that do not fit together. No buffer was touched.
    #[error(
        "collectives do not match ({what}): device {a} called {a_call} at {a_site}, device {b} called {b_call} at {b_site}"
    )]
    Mismatch {
        /// What differs: "operation", "count", "dtype", "reduce op"; "capture" if one is for a graph and the other is
        /// not, "graph" if they are of different graphs; "participation" if the second device's closure had ended: its
        /// place is then that of the last call that it made, and without any that of the scope.
        what: &'static str,
        /// One device,
        a: usize,
        /// its call,
        a_call: String,
        /// and where it stands in the user's code.
        a_site: Site,
        /// Another device,
        b: usize,
        /// its call,
        b_call: String,
        /// and where it stands.
        b_site: Site,
    },
    /// Another member of the gang failed first; this device stopped because of it.
    #[error("aborted by device {by}: {cause}")]
    Aborted {
        /// The device that failed first.
        by: usize,
        /// Its failure.
        cause: Arc<Error>,
    },
    /// A graph that is out of date, and nothing of it was launched: capture it again. Either it has collectives, and
    /// since it was captured a scope has failed in which this device was, so that what the collectives' memory holds is
    /// unspecified, and not every member may have the graph (then capture it on all members); or it names memory of a
    /// [`GradientExchange`](crate::GradientExchange) that gradients have left.
    #[error("{op}: the graph is of no use any more on device {device}: {why}; capture it again")]
    GraphInvalidated {
        /// The operation.
        op: &'static str,
        /// The device.
        device: usize,
        /// What has happened since it was captured.
        why: &'static str,
    },
    /// Nothing moved for the pool's deadline.
    #[error("device {device}: no progress for {waited:?} in {op}; missing: {missing:?}")]
    Timeout {
        /// The device that waited.
        device: usize,
        /// What it waited in.
        op: &'static str,
        /// For how long nothing had advanced, by the clock; it runs on while a process is stopped.
        waited: Duration,
        /// The devices that were waited for: peers that had not come, or the device itself when it waited for its own
        /// stream. Never empty.
        missing: Vec<usize>,
    },
    /// A device closure panicked; or, by a mistake of this crate, the device's thread did outside of it.
    #[error("the thread of device {device} panicked at {place}: {message}")]
    Panicked {
        /// The device whose closure it was.
        device: usize,
        /// The panic's message.
        message: String,
        /// File, line and column of the panic. "an unknown place", where a payload was passed to
        /// [`resume_unwind`](std::panic::resume_unwind) that no panic of this thread came with.
        place: String,
    },
    /// State that a failed scope had borrowed mutably. Its contents are unspecified until it is reset or cleared.
    #[error(
        "the state of device {device} was being written when a scope failed: make it anew with `PerDevice::reset` or accept \
         it with `PerDevice::clear_poison`"
    )]
    Poisoned {
        /// The device.
        device: usize,
    },
    /// A scope, `close` or `per_device` was called on a device thread, where it would wait for itself.
    #[error("{op} was called on a device thread; device closures cannot start scopes")]
    NestedScope {
        /// What was called.
        op: &'static str,
    },
    /// The pool has been closed.
    #[error("the pool is closed")]
    Closed,
    /// The process forked after the pool was built; CUDA contexts and threads do not survive a fork.
    #[error(
        "the process forked after the pool was built (pool of pid {built}, now pid {now}): build a new pool in a process that was started, not forked"
    )]
    Forked {
        /// The process that built the pool.
        built: u32,
        /// This process.
        now: u32,
    },
    /// The device is gone for this process: a sticky error, or a GPU that fell off the bus. What becomes of the others:
    /// [`GpuPool::survivors`](crate::GpuPool::survivors).
    #[error("device {device} is lost: {op} reported {name} ({code}); see `GpuPool::survivors`")]
    DeviceLost {
        /// The device.
        device: usize,
        /// The operation that learned of it.
        op: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's name for it.
        name: String,
    },
    /// The device has no right to touch a peer's memory, and the operation cannot be staged through the host.
    #[error("{op}: device {device} may not access the memory of device {peer}")]
    PeerDenied {
        /// The device that wanted access.
        device: usize,
        /// The owner of the memory.
        peer: usize,
        /// The operation.
        op: &'static str,
    },
    /// The checker ([`Builder::check`](crate::Builder::check)) has refused an operation, which did not run; or it has
    /// found, after the fact, that something was written out of bounds.
    #[error("device {device}: {}\n{report}", what_the_checker_did(.op, .report))]
    Misuse {
        /// The device.
        device: usize,
        /// The operation.
        op: &'static str,
        /// What is wrong, with both operations and their places.
        report: Arc<Report>,
    },
    /// Every device waits and nothing is under way that could end a wait: found at once, not after the deadline.
    #[error("deadlock, seen by device {device} in {op}: {who}")]
    Deadlock {
        /// The device.
        device: usize,
        /// What it waited in.
        op: &'static str,
        /// Who waits for whom, and where.
        who: String,
    },
    /// No such kernel on this device.
    #[error("kernel `{kernel}` was not found on device {device}: {why}")]
    KernelNotFound {
        /// The device.
        device: usize,
        /// The kernel's name.
        kernel: String,
        /// What is missing.
        why: String,
    },
    /// An argument that can never work.
    #[error("{op}: {why} ({}at {site})", on(.device))]
    InvalidArgument {
        /// The operation.
        op: &'static str,
        /// What is wrong with which argument.
        why: String,
        /// The device on whose thread it was given, by its ordinal in the pool; `None` on any other thread.
        device: Option<usize>,
        /// Where in the caller's code.
        site: Site,
    },
    /// Per-device state is already borrowed in a way that excludes this borrow.
    #[error("the state of device {device} is already borrowed")]
    Borrowed {
        /// The device.
        device: usize,
    },
    /// Any other error of the driver.
    #[error("device {device}: {op} failed with {name} ({code}){detail}")]
    Driver {
        /// The device.
        device: usize,
        /// The operation.
        op: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// More, where there is more to say (a compiler's log); empty or starting with ": ".
        detail: String,
    },
    /// The caller's own error, carried through a scope. Make one with [`Error::custom`].
    #[error("{0}")]
    Custom(Arc<dyn StdError + Send + Sync + 'static>),
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

    /// With the place of the user's call: each function between that call and this one is `#[track_caller]`, too.
    #[track_caller]
    pub(crate) fn invalid(op: &'static str, why: impl fmt::Display) -> Self {
        Error::invalid_at(Location::caller(), op, why)
    }

    /// The same for a place that is known: `#[track_caller]` does not go through closures.
    pub(crate) fn invalid_at(site: Site, op: &'static str, why: impl fmt::Display) -> Self {
        Error::InvalidArgument { op, why: why.to_string(), device: here::device(), site }
    }

    /// The same error, where the user's call was at `site` and a closure of the library's own made the error.
    pub(crate) fn called_at(mut self, called: Site) -> Self {
        if let Error::InvalidArgument { site, .. } = &mut self {
            *site = called;
        }
        self
    }
}

fn on(device: &Option<usize>) -> String {
    device.map_or_else(String::new, |device| format!("device {device}, "))
}

fn what_the_checker_did(op: &str, report: &Report) -> String {
    match report.kind {
        Kind::OutOfBounds => format!("the checker has found a mistake at {op}"),
        _ => format!("{op} was refused by the checker"),
    }
}
