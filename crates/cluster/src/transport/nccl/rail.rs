//! One rail of this process: a communicator of one device of each host.
//!
//! The communicator is blocking: a call returns when its kernels are launched. It runs without the lock of the state,
//! so that an abort can come meanwhile, which ends it. The transport's watching thread asks for calls that take too
//! long ([`Rail::overdue`]). After an abort no thread begins a call.

use super::library::{Comm, Config, Library, UniqueId, code, misuse};
use super::register::Registration;
use crate::runtime::{Address, DriverRef, blocking};
use gpu_pool::{Error, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    ffi::{c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

#[derive(Clone, Copy)]
pub(super) struct Until<'a> {
    pub lost: &'a dyn Fn() -> Option<Error>,
    pub limit: Duration,
}

impl Until<'_> {
    /// The error that ends a wait for `op`, which has begun at `start`.
    pub(super) fn check(&self, op: &'static str, start: Instant, rail: &Rail) -> Result<()> {
        (self.lost)().map_or(Ok(()), Err)?;
        if start.elapsed() <= self.limit {
            return Ok(());
        }
        let why = format!("in progress for {:?}, on {rail}; is one of these hosts gone?", self.limit);
        Err(Error::Transport { library: "nccl", op, code: code::IN_PROGRESS, why })
    }
}

/// How often a wait for a new communicator looks whether it is to end.
const TICK: Duration = Duration::from_millis(5);

/// How long an abort waits for a call to return. One that is not in the library by then finds the communicator gone.
const GRACE: Duration = Duration::from_millis(250);

pub(super) struct Rail {
    pub(super) library: &'static Library,
    /// Also keeps the device's context, which the communicator lives in.
    pub(super) driver: DriverRef,
    pub(super) device: usize,
    /// The hosts in ascending order. NCCL's rank of a host is its position here.
    pub(super) hosts: Vec<usize>,
    state: Mutex<State>,
    returned: Condvar,
    /// Held during a call: no other one is allowed meanwhile.
    turn: Mutex<()>,
    /// Chunks of memory that the communicator knows. They live at least as long as it does.
    pub(super) registered: Mutex<Vec<Registration>>,
}

struct State {
    comm: Option<Handle>,
    /// The call that runs, and since when.
    calling: Option<(&'static str, Instant)>,
    /// An abort has begun, and has not returned.
    ending: bool,
    /// Why there is no communicator any more.
    cause: Option<Error>,
}

struct Handle(Comm);
// SAFETY: NCCL's communicators belong to no thread; calls take turns by the lock.
unsafe impl Send for Handle {}

impl Rail {
    /// Connects. All hosts of the rail do so, with the id of the first one. Nothing ends NCCL's call before its time,
    /// so it has a thread of its own: when `until` is over that thread is left behind, and aborts what comes after all.
    pub(super) fn connect(
        library: &'static Library,
        driver: DriverRef,
        device: usize,
        hosts: Vec<usize>,
        rank: usize,
        id: UniqueId,
        until: Until<'_>,
    ) -> Result<Rail> {
        const OP: &str = "ncclCommInitRankConfig";
        let state = Mutex::new(State { comm: None, calling: None, ending: false, cause: None });
        let (returned, turn, registered) = (Condvar::new(), Mutex::new(()), Mutex::default());
        let rail = Rail { library, driver, device, hosts, state, returned, turn, registered };
        let (ranks, driver) = (rail.hosts.len() as c_int, rail.driver.clone());
        // Without room: what is sent has been received.
        let (tell, told) = mpsc::sync_channel(0);
        let connect = move || {
            // NCCL takes the device from the thread's context.
            let _ = driver.bind();
            let (mut comm, mut config) = (null_mut(), Config::blocking());
            // SAFETY: the pointers are to live values, and the configuration is initialised as the header does.
            let code = unsafe { (library.f.init_rank)(&mut comm, ranks, id, rank as c_int, &mut config) };
            if let Err(mpsc::SendError((_, Handle(late)))) = tell.send((code, Handle(comm)))
                && !late.is_null()
            {
                // SAFETY: no other code has the handle.
                unsafe { (library.f.abort)(late) };
            }
        };
        let thread = thread::Builder::new().name(format!("gpu-pool nccl {device}")).spawn(connect);
        thread.map_err(|error| cluster_error!("transport", "no thread: {error}"))?;
        let start = Instant::now();
        let (code, comm) = loop {
            match told.recv_timeout(TICK) {
                Ok(connected) => break connected,
                Err(_) => until.check(OP, start, &rail)?,
            }
        };
        if !comm.0.is_null() {
            rail.state.lock().comm = Some(comm);
        }
        if code == code::SUCCESS && rail.state.lock().comm.is_some() {
            return Ok(rail);
        }
        let error = rail.error(OP, code);
        rail.abort(&error);
        Err(error)
    }

    /// Makes a call: when it returns all its kernels are launched. A call that waits for a host that is gone ends by an
    /// [`abort`](Self::abort), with its cause.
    pub(super) fn call(&self, op: &'static str, f: impl FnOnce(Comm) -> c_int) -> Result<()> {
        let _turn = self.turn.lock();
        let comm = {
            let mut state = self.state.lock();
            let comm = self.live(&state, op)?;
            state.calling = Some((op, Instant::now()));
            comm
        };
        let code = f(comm);
        let cause = {
            let mut state = self.state.lock();
            state.calling = None;
            state.cause.clone()
        };
        self.returned.notify_all();
        match (cause, code) {
            (Some(cause), _) => Err(cause),
            (None, code::SUCCESS) => Ok(()),
            (None, code) => Err(self.error(op, code)),
        }
    }

    /// The error of a call that runs for longer than `limit`.
    pub(super) fn overdue(&self, limit: Duration) -> Option<Error> {
        let (op, since) = self.state.lock().calling?;
        Until { lost: &|| None, limit }.check(op, since, self).err()
    }

    /// A network that broke is an error here, also when no call is made.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let mut found = code::SUCCESS;
        let state = self.state.lock();
        let comm = self.live(&state, op)?;
        // SAFETY: a live communicator, since an abort takes it out first; the pointer is to a live integer.
        let asked = unsafe { (self.library.f.async_error)(comm, &mut found) };
        drop(state);
        match (asked, found) {
            (code::SUCCESS, code::SUCCESS | code::IN_PROGRESS) => Ok(()),
            (code::SUCCESS, failed) => Err(self.error(op, failed)),
            (failed, _) => Err(self.error("ncclCommGetAsyncError", failed)),
        }
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.check("ncclCommGetAsyncError").err()
    }

    fn live(&self, state: &State, op: &'static str) -> Result<Comm> {
        match (&state.comm, &state.cause) {
            (Some(comm), _) => Ok(comm.0),
            (None, Some(cause)) => Err(cause.clone()),
            (None, None) => Err(misuse(op, format!("the communicator has ended, on {self}"))),
        }
    }

    pub(super) fn error(&self, op: &'static str, code: c_int) -> Error {
        self.library.error(op, code, &self.to_string())
    }

    /// Ends the communicator: kernels and a call that wait for a host that is gone end. From any thread; it may hang in
    /// the library (nccl#1777). Later calls are errors with this cause.
    pub(super) fn abort(&self, cause: &Error) {
        let mut state = self.state.lock();
        state.cause.get_or_insert_with(|| cause.clone());
        let Some(comm) = state.comm.take() else { return };
        state.ending = true;
        let waited = self.returned.wait_while_for(&mut state, |state| state.calling.is_some(), GRACE);
        let calling = waited.timed_out();
        drop(state);
        // It frees memory, which waits for kernels (nccl#549). But a call holds its launch window open until it ends.
        let _blocking = (!calling).then(blocking);
        // Else the library would make the context of GPU 0 on this thread. It takes the device's by itself.
        let _ = self.driver.bind();
        // SAFETY: the handle was taken out, so this is its last use.
        unsafe { (self.library.f.abort)(comm.0) };
        self.state.lock().ending = false;
        self.forget_registered();
    }

    /// Whether there is no communicator any more. False while a call or an abort is stuck.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state.lock();
        state.comm.is_none() && !state.ending && state.calling.is_none()
    }

    pub(super) fn finalize(&self) -> Result<()> {
        // SAFETY: a live communicator.
        self.call("ncclCommFinalize", |comm| unsafe { (self.library.f.finalize)(comm) })
    }

    pub(super) fn destroy(&self) -> Result<()> {
        let Some(comm) = self.state.lock().comm.take() else { return Ok(()) };
        // SAFETY: the handle was taken out, so this is its last use; nothing is in progress.
        match unsafe { (self.library.f.destroy)(comm.0) } {
            code::SUCCESS => {
                self.forget_registered();
                Ok(())
            }
            code => Err(self.error("ncclCommDestroy", code)),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().comm.is_none()
    }
}

display_as!(Rail, |self, f| write!(f, "device {} (a rail of hosts {:?})", self.device, self.hosts));

pub(super) fn pointer(at: Address) -> *mut c_void {
    with_exposed_provenance_mut(at as usize)
}
