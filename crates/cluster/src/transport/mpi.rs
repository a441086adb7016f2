//! Bytes between processes by MPI. The library is opened at run time; nothing is linked.
//!
//! MPI moves bytes and never reduces: sums are the crate's own, in the order of the hosts, so they have the same bits
//! under each library. One binary runs under Open MPI 4 and 5, MPICH and its relatives, and the standard ABI.
//!
//! A thread of its own begins and ends MPI, as the standard asks of one and the same thread. If the library allows
//! `MPI_THREAD_MULTIPLE`, each thread calls it for its own messages; else that thread does for all.
//!
//! Called by `cluster`. [`DeviceMpi`] is for libraries that take the addresses of GPUs' memory. Invariants:
//!
//! * The memory of messages that are under way is kept for ever when a call ends early: MPI cannot take requests back
//!   that wait for a dead process.
//! * `MPI_Finalize` waits for all processes. So it is called only by [`Mpi::close`], and not after a failure.

mod batch;
mod device;
mod library;
mod thread;

pub(crate) use device::DeviceMpi;

use self::batch::{Batch, Channel, Tags};
use self::library::{Library, unusable};
use self::thread::Owner;
use super::host::{Backoff, Part, exchange, leak};
use super::{cause, soon};
use crate::runtime::sync::{Flag, Gate};
use crate::runtime::variables;
use crate::traits::{HostTransport, Message};
use gpu_pool::{Error, Result, event};
use once_cell::sync::OnceCell;
use std::{
    ffi::c_int,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

/// Bytes of one request, at most: counts are `int`s. (Large counts are of MPI 4, which Open MPI 4 is not.)
pub const PIECE: usize = 1 << 30;

/// How often a wait for the library asks whether a process is lost.
const TICK: Duration = Duration::from_millis(5);

pub struct Mpi {
    started: Started,
    /// A call has failed: other processes may never reach `MPI_Finalize`.
    failed: Flag,
    gate: Gate,
    owner: Owner,
}

struct Started {
    channel: Arc<Channel>,
    rank: usize,
    size: usize,
    /// Whether each thread may call.
    multiple: bool,
    /// This crate has begun MPI, and ends it.
    ours: bool,
}

/// The name and version of the library that [`Mpi::load`] would take. MPI does not begin.
pub fn version() -> Result<String> {
    Library::open().map(|library| library.version)
}

/// MPI has not begun within its limit: a thread is still at it, and it must not begin twice.
static GIVEN_UP: OnceCell<()> = OnceCell::new();

impl Mpi {
    /// Opens the library and begins MPI, unless the program has. All processes of the launcher call it. Errors:
    /// [`Error::Cluster`]: no library, one that does not belong to the launcher, one that has ended in this process, or
    /// one that the program has begun without `MPI_THREAD_MULTIPLE`; also when the library takes longer than `limit`:
    /// it waits for all processes. [`Error::Transport`]: MPI's own.
    pub fn load(limit: Duration) -> Result<Mpi> {
        Self::load_with(false, PIECE, limit)
    }

    /// [`load`](Self::load). `one_thread`: as if the library had no `MPI_THREAD_MULTIPLE`.
    pub fn load_with(one_thread: bool, piece: usize, limit: Duration) -> Result<Mpi> {
        fail_if!(GIVEN_UP.get().is_some(), unusable("MPI_Init_thread was given up: start all processes anew"));
        let library = Library::open()?;
        let owner = Owner::start()?;
        let late = || {
            let _ = GIVEN_UP.set(());
            cluster_error!("transport", "after {limit:?} MPI_Init_thread still waits for other processes")
        };
        let begun = owner.call_within(move || start(library, one_thread, piece), limit)?;
        let started = begun.ok_or_else(late)??;
        let Started { channel, rank, size, multiple, .. } = &started;
        event!(debug, "mpi_opened", library = &*channel.library.version, rank, size, multiple, "MPI");
        Ok(Mpi { started, failed: Flag::new(), gate: Gate::new(), owner })
    }

    pub fn rank(&self) -> usize {
        self.started.rank
    }

    pub fn size(&self) -> usize {
        self.started.size
    }

    pub fn version(&self) -> &str {
        &self.channel().library.version
    }

    fn channel(&self) -> &Arc<Channel> {
        &self.started.channel
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank();
        (0..self.size()).filter(move |&host| host != own)
    }

    /// Whether the library takes addresses of GPUs' memory. False if it does not tell: then data is staged.
    pub fn is_cuda_aware(&self) -> bool {
        self.channel().library.is_cuda_aware()
    }

    /// Fills `bytes` of all processes with those of process 0. All call it with the same length, one thread of each.
    /// Errors: [`Error::HostTimeout`] when not all have come by the deadline; [`Error::Transport`].
    pub fn broadcast(&self, bytes: &mut [u8], deadline: Duration) -> Result<()> {
        let start = Instant::now();
        let late = || {
            let missing = if self.rank() == 0 { self.others().collect() } else { vec![0] };
            let (op, waited) = ("MPI broadcast".to_owned(), start.elapsed());
            (waited > deadline).then_some(Error::HostTimeout { op, waited, missing })
        };
        let mut memory = bytes.to_vec();
        let (tag, len) = (Tags::START, memory.len());
        let parts: Vec<_> = match self.rank() {
            0 => self.others().map(|to| Part::Send { to, tag, at: memory.as_ptr(), len }).collect(),
            _ => vec![Part::Receive { from: 0, tag, at: memory.as_mut_ptr(), len }],
        };
        // SAFETY: this call's own memory, which is kept for ever after an error.
        match unsafe { self.exchange_parts(parts, &late) } {
            Ok(()) => bytes.copy_from_slice(&memory),
            Err(error) => return Err(leak(memory, error)),
        }
        Ok(())
    }

    /// [`exchange`](HostTransport::exchange) of bytes at addresses: of the host, or of GPUs if the library
    /// [is CUDA-aware](Self::is_cuda_aware). Software GPUs' memory is the host's.
    ///
    /// No test has run this with GPUs' addresses, only with the host's. [`DeviceMpi`] calls it for them.
    ///
    /// # Safety
    /// The bytes live, and nothing else touches them, until the call returns. After an error they live for ever.
    /// Streams' work on them is done before the call.
    pub(crate) unsafe fn exchange_parts(&self, parts: Vec<Part>, lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        let Some(_pass) = self.gate.enter() else { return Err(unusable("MPI has ended in this process")) };
        // A message that this call left on its way may have the tag of a later one.
        let failed = || unusable("an earlier call has failed: start all processes anew");
        // Another thread's call, which may still wait for the loss that is its cause.
        fail_if!(self.failed.is_raised(), soon(lost).unwrap_or_else(failed));
        let done = match self.started.multiple {
            // SAFETY: the caller's promise.
            true => unsafe { self.here(&parts, lost) },
            false => self.owner.carry(self, parts, lost),
        };
        done.map_err(|error| {
            self.failed.raise();
            cause(error, lost)
        })
    }

    /// # Safety
    /// As [`exchange_parts`](Self::exchange_parts), and the library allows each thread to call.
    unsafe fn here(&self, parts: &[Part], lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        // SAFETY: the caller's promise.
        let mut batch = unsafe { Batch::post(self.channel(), parts)? };
        let mut backoff = Backoff::new();
        loop {
            let mut progress = false;
            if batch.poll(self.channel(), &mut progress)? {
                return Ok(());
            }
            if progress {
                backoff.reset();
            }
            backoff.pause(lost)?;
        }
    }

    /// The orderly end: `MPI_Finalize`, when all processes call this. It does nothing the second time, after a failure
    /// of a call, and if the program itself has begun MPI. Without it, launchers take the end of a process for a
    /// failure. Errors: [`Error::HostTimeout`] when not all processes have come by the deadline; [`Error::Transport`].
    pub fn close(&self, deadline: Duration) -> Result<()> {
        let first = self.gate.close();
        let missing = self.others().collect();
        let late = || Error::HostTimeout { op: "MPI_Finalize".to_owned(), waited: deadline, missing };
        fail_if!(!self.gate.wait_drained(Some(deadline)), late());
        if !first || !self.started.ours || self.failed.is_raised() {
            return Ok(());
        }
        let channel = self.channel().clone();
        // SAFETY: no call is left, and all have ended well. The thread is the one that has begun MPI.
        let finalize = move || channel.library.check("MPI_Finalize", unsafe { (channel.library.f.finalize)() });
        self.owner.call_within(finalize, deadline)?.unwrap_or_else(|| Err(late()))
    }
}

impl HostTransport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn exchange(&self, messages: Vec<Message>, lost: &dyn Fn() -> Option<Error>) -> Result<Vec<Message>> {
        // SAFETY: the messages own their bytes, and are kept for ever after an error.
        exchange(("mpi", self.size()), messages, |parts| unsafe { self.exchange_parts(parts, lost) })
    }
}

debug_as!(Mpi, |self| version = self.version(), rank = self.rank(), ..);

/// Begins MPI. Called by the thread that ends it.
fn start(library: Library, one_thread: bool, piece: usize) -> Result<Started> {
    let Library { f, constants, version, .. } = &library;
    let (mut on, mut over, mut level) = (0, 0, 0);
    // SAFETY: these functions may be called at any time; the pointers are to locals.
    unsafe {
        library.check("MPI_Finalized", (f.finalized)(&mut over))?;
        library.check("MPI_Initialized", (f.initialized)(&mut on))?;
    }
    fail_if!(over != 0, unusable("MPI has ended in this process, and cannot begin again: join a cluster once"));
    let ours = on == 0;
    // SAFETY: MPI has not begun; or it has, and is asked for its level. The pointers are to locals, or none.
    unsafe {
        if ours {
            let code = (f.init_thread)(ptr::null_mut(), ptr::null_mut(), constants.thread_multiple, &mut level);
            library.check("MPI_Init_thread", code)?;
        } else {
            library.check("MPI_Query_thread", (f.query_thread)(&mut level))?;
        }
    }
    let multiple = level >= constants.thread_multiple;
    if !ours && !multiple {
        return Err(unusable("this program has begun MPI for one thread: call MPI_Init_thread(MPI_THREAD_MULTIPLE)"));
    }
    let (mut rank, mut size, mut comm, mut bound, mut set) = (0, 0, 0, ptr::null_mut::<c_int>(), 0);
    // SAFETY: MPI has begun; the pointers are to locals. The attribute's value is a pointer to an `int` of the library.
    let bound = unsafe {
        if ours {
            library.check("MPI_Comm_set_errhandler", (f.set_errhandler)(constants.world, constants.errors_return))?;
        }
        library.check("MPI_Comm_rank", (f.comm_rank)(constants.world, &mut rank))?;
        library.check("MPI_Comm_size", (f.comm_size)(constants.world, &mut size))?;
        belongs(version, size as usize)?;
        library.check("MPI_Comm_dup", (f.comm_dup)(constants.world, &mut comm))?;
        library.check("MPI_Comm_set_errhandler", (f.set_errhandler)(comm, constants.errors_return))?;
        let code = (f.comm_get_attr)(constants.world, constants.tag_ub, &mut bound, &mut set);
        library.check("MPI_Comm_get_attr", code)?;
        // The least bound of the standard, if it is not told.
        if set != 0 && !bound.is_null() { *bound } else { 32767 }
    };
    let channel = Arc::new(Channel { tags: Tags::new(bound)?, library, comm, piece });
    Ok(Started { channel, rank: rank as usize, size: size as usize, multiple: multiple && !one_thread, ours })
}

/// Whether the library sees all processes. One of another kind than the launcher sees one, in each process.
fn belongs(version: &str, size: usize) -> Result<()> {
    let read = |name| variables::text(name).map_err(|not| unusable(&not.to_string()));
    let launched = match read("OMPI_COMM_WORLD_SIZE")? {
        None => read("PMI_SIZE")?,
        known => known,
    };
    match launched {
        Some(launched) if launched.trim().parse() != Ok(size) => Err(unusable(&format!(
            "the launcher has started {launched} processes, but {version} sees {size}: it does not belong to the \
             launcher; name the launcher's libmpi.so in GPU_POOL_MPI"
        ))),
        _ => Ok(()),
    }
}
