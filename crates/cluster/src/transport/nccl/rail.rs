//! One rail of this process: a communicator of one device of each host.
//!
//! The communicator is not blocking. A call that returns "in progress" is polled to its end ([`Rail::settle`]), without
//! the lock, so that an abort can come between. After an abort no thread has the handle.

use super::{
    library::{Comm, Config, Library, UniqueId, code},
    register::Registration,
};
use crate::runtime::driver::{Address, DriverRef, blocking};
use gpu_pool::{Error, Result};
use parking_lot::Mutex;
use std::{
    ffi::{c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
    thread,
    time::{Duration, Instant},
};

/// The conditions that end a wait for the library early.
#[derive(Clone, Copy)]
pub(super) struct Until<'a> {
    pub lost: &'a dyn Fn() -> Option<Error>,
    pub limit: Duration,
}

pub(super) struct Rail {
    pub(super) library: &'static Library,
    /// Also keeps the device's context, which the communicator lives in.
    pub(super) driver: DriverRef,
    pub(super) device: usize,
    /// The hosts in ascending order. NCCL's rank of a host is its position here.
    pub(super) hosts: Vec<usize>,
    state: Mutex<State>,
    /// Held from a call until it is no longer in progress: until then no other call is allowed.
    turn: Mutex<()>,
    /// Chunks of memory that the communicator knows. They live at least as long as it does.
    pub(super) registered: Mutex<Vec<Registration>>,
}

struct State {
    comm: Option<Handle>,
    /// An abort has begun, and has not returned.
    ending: bool,
    /// Why there is no communicator any more.
    cause: Option<Error>,
}

struct Handle(Comm);
// SAFETY: NCCL's communicators belong to no thread; calls take turns by the lock.
unsafe impl Send for Handle {}

impl Rail {
    /// Begins to connect; [`settle`](Self::settle) ends it. The device's context is current. All hosts of the rail do
    /// so, with the id of the first one.
    pub(super) fn begin(
        library: &'static Library,
        driver: DriverRef,
        device: usize,
        hosts: Vec<usize>,
        rank: usize,
        id: UniqueId,
    ) -> Result<Rail> {
        let state = Mutex::new(State { comm: None, ending: false, cause: None });
        let rail = Rail { library, driver, device, hosts, state, turn: Mutex::new(()), registered: Mutex::default() };
        let (mut comm, mut config) = (null_mut(), Config::non_blocking());
        // SAFETY: the pointers are to live values, and the configuration is initialised as the header does.
        let code =
            unsafe { (library.f.init_rank)(&mut comm, rail.hosts.len() as c_int, id, rank as c_int, &mut config) };
        if !comm.is_null() {
            rail.state.lock().comm = Some(Handle(comm));
        }
        match code {
            code::SUCCESS | code::IN_PROGRESS if !comm.is_null() => Ok(rail),
            code => {
                let error = rail.error("ncclCommInitRankConfig", code);
                rail.abort(&error);
                Err(error)
            }
        }
    }

    /// Makes a call, and waits until it is no longer in progress: then all its kernels are launched.
    pub(super) fn call(&self, op: &'static str, until: Until<'_>, f: impl FnOnce(Comm) -> c_int) -> Result<()> {
        let _turn = self.turn.lock();
        match self.with(op, f)? {
            code::SUCCESS | code::IN_PROGRESS => self.settle(op, until),
            code => Err(self.error(op, code)),
        }
    }

    /// Waits until nothing is in progress.
    pub(super) fn settle(&self, op: &'static str, until: Until<'_>) -> Result<()> {
        let start = Instant::now();
        for round in 0u64.. {
            if self.settled(op)? {
                break;
            }
            if round % 64 == 63 {
                if let Some(error) = (until.lost)() {
                    return Err(error);
                }
                if start.elapsed() > until.limit {
                    let why = format!("in progress for {:?}, on {self}; is one of these hosts gone?", until.limit);
                    return Err(Error::Transport { library: "nccl", op, code: code::IN_PROGRESS, why });
                }
            }
            // NCCL launches on a thread of its own, which takes some 20 us.
            if round < 1024 { thread::yield_now() } else { thread::sleep(Duration::from_micros(20)) }
        }
        Ok(())
    }

    /// Whether nothing is in progress. A network that broke is an error here, also when no call is made.
    pub(super) fn settled(&self, op: &'static str) -> Result<bool> {
        let mut state = code::SUCCESS;
        let asked = self.with(op, |comm| {
            // SAFETY: a live communicator; the pointer is to a live integer.
            unsafe { (self.library.f.async_error)(comm, &mut state) }
        })?;
        match (asked, state) {
            (code::SUCCESS, code::SUCCESS) => Ok(true),
            (code::SUCCESS, code::IN_PROGRESS) => Ok(false),
            (code::SUCCESS, failed) => Err(self.error(op, failed)),
            (failed, _) => Err(self.error("ncclCommGetAsyncError", failed)),
        }
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.settled("ncclCommGetAsyncError").err()
    }

    /// Calls `f` with the communicator, which no thread ends meanwhile.
    fn with(&self, op: &'static str, f: impl FnOnce(Comm) -> c_int) -> Result<c_int> {
        let state = self.state.lock();
        match (&state.comm, &state.cause) {
            (Some(comm), _) => Ok(f(comm.0)),
            (None, Some(cause)) => Err(cause.clone()),
            (None, None) => {
                let why = format!("the communicator has ended, on {self}");
                Err(Error::Transport { library: "nccl", op, code: code::INVALID_USAGE, why })
            }
        }
    }

    pub(super) fn error(&self, op: &'static str, code: c_int) -> Error {
        self.library.error(op, code, &self.to_string())
    }

    /// Ends the communicator: kernels that wait for a host that is gone end. From any thread; it may hang in the
    /// library (nccl#1777), and it waits for a call of another thread. Later calls are errors with this cause.
    pub(super) fn abort(&self, cause: &Error) {
        let comm = {
            let mut state = self.state.lock();
            state.cause.get_or_insert_with(|| cause.clone());
            let comm = state.comm.take();
            state.ending |= comm.is_some();
            comm
        };
        let Some(comm) = comm else { return };
        // It frees memory, which waits for kernels (nccl#549).
        let _blocking = blocking();
        // Else the library would make the context of GPU 0 on this thread. It takes the device's by itself.
        let _ = self.driver.bind();
        // SAFETY: the handle was taken out, so this is its last use.
        unsafe { (self.library.f.abort)(comm.0) };
        self.state.lock().ending = false;
        self.forget_registered();
    }

    /// Whether there is no communicator any more. False while a call or an abort is stuck.
    pub(super) fn is_over(&self) -> bool {
        self.state.try_lock().is_some_and(|state| state.comm.is_none() && !state.ending)
    }

    /// Begins the orderly end. All hosts of the rail do so.
    pub(super) fn finalize(&self) -> Result<()> {
        // SAFETY: a live communicator.
        match self.with("ncclCommFinalize", |comm| unsafe { (self.library.f.finalize)(comm) })? {
            code::SUCCESS | code::IN_PROGRESS => Ok(()),
            code => Err(self.error("ncclCommFinalize", code)),
        }
    }

    /// Ends a communicator that is finalized.
    pub(super) fn destroy(&self) -> Result<()> {
        let Some(comm) = self.state.lock().comm.take() else { return Ok(()) };
        // SAFETY: the handle was taken out, so this is its last use; nothing is in progress.
        match unsafe { (self.library.f.destroy)(comm.0) } {
            code::SUCCESS | code::IN_PROGRESS => {
                self.forget_registered();
                Ok(())
            }
            code => Err(self.error("ncclCommDestroy", code)),
        }
    }

    /// Whether calls are errors from now on.
    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().comm.is_none()
    }
}

impl std::fmt::Display for Rail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {} (a rail of hosts {:?})", self.device, self.hosts)
    }
}

/// An address, a stream or a handle as the library takes it.
pub(super) fn pointer(at: Address) -> *mut c_void {
    with_exposed_provenance_mut(at as usize)
}
