//! NCCL between the GPUs of several processes: [`DeviceTransport`] with one communicator for each rail.
//!
//! A rail has one device of each host that has so many devices, so a host's number is not NCCL's rank.
//! `cluster` makes one [`Nccl`] for a pool, connects its rails on the device threads, and closes it at the end.
//!
//! * **Connecting.** Each device thread connects its own rail, all at once: a rail waits for the same rail of the
//!   other hosts, so rails in turns would wait for each other where hosts take turns differently; and NCCL takes the
//!   device from the thread's context, which a group on one thread would have to switch between the calls.
//! * **Submitting.** The call returns when NCCL has launched it: an event that is recorded after the return is behind
//!   the call, and the caller may close its launch window.
//! * **Small sums** between GPUs of one host, one in each process, go by a [`LonePad`]: own kernels, in turn with the
//!   calls. They end with the rails.
//! * **Failing.** A thread watches for a lost host, for errors of the library, and for calls that do not return. The
//!   first error fails the scopes that use the transport, is told to the other hosts, and aborts all rails, each on a
//!   thread of its own: one after the other they would wait for each other's kernels (nccl#1013), and an abort may hang
//!   (nccl#1777), so each wait for it has a limit. Each host must do so, since a rail that is aborted on one host does
//!   not end on the others (pytorch#118692): the hub tells them.

mod enqueue;
#[cfg(test)]
#[path = "../../tests/unit/transport/nccl/fake_tests.rs"]
mod fake_tests;
#[cfg(test)]
#[path = "../../tests/unit/transport/nccl/gpu_tests.rs"]
mod gpu_tests;
mod library;
mod operation;
pub mod peer;
mod rail;
mod register;
#[cfg(test)]
#[path = "../../tests/unit/transport/nccl/register_tests.rs"]
mod register_tests;
mod warm_up;

pub(crate) use library::Library;

use super::{cause, failed};
use crate::runtime::{Address, Alarm, BlockRef, DriverRef, LonePad, RawStream, SetUp, blocking};
use crate::traits::{DeviceTransport, Failure, Overlap, RailCall, RailMessage, Tell};
use gpu_pool::{DType, Error, ReduceOp, Result, event};
use library::{UniqueId, misuse};
use once_cell::sync::OnceCell;
use parking_lot::{Condvar, Mutex};
use rail::{Rail, Until};
use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Tells why the cluster has ended, once it has. It must not wait.
pub(crate) type Lost = Arc<dyn Fn() -> Option<Error> + Send + Sync>;

/// The control's key-value store. `get` waits until another host has set the key.
pub(crate) struct Keys<'a> {
    pub set: &'a (dyn Fn(&str, &[u8]) -> Result<()> + Sync),
    pub get: &'a (dyn Fn(&str) -> Result<Vec<u8>> + Sync),
}

/// A call takes some tens of microseconds of the host, and 8 MiB some hundreds on a network.
const PIECE: usize = 8 << 20;

/// No call has more blocks (`MAXCHANNELS` of NCCL's device.h), and a multiprocessor has room for at least one.
pub(crate) const MOST_BLOCKS: u32 = 64;

/// How often the watching thread looks.
const LOOK: Duration = Duration::from_millis(20);

/// How long the end waits for aborts.
const MOST_ABORT: Duration = Duration::from_secs(5);

pub(crate) struct Nccl {
    rails: Arc<Rails>,
    overlap: Option<Overlap>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

struct Rails {
    library: &'static Library,
    host: usize,
    devices: Vec<usize>,
    rails: Vec<OnceCell<Arc<Rail>>>,
    lost: Lost,
    /// The limit of each wait for the other hosts.
    connect_timeout: Duration,
    failure: Failure,
    /// Own kernels for small sums; or why there are none.
    pad: OnceCell<SetUp<LonePad>>,
    over: Mutex<bool>,
    changed: Condvar,
}

impl Nccl {
    /// Finds the library, for process `host` of a cluster whose processes have so many devices. No wait for other hosts
    /// is longer than `connect_timeout`. [`Error::Cluster`] without a library that will do.
    pub(crate) fn new(host: usize, devices: &[usize], lost: Lost, connect_timeout: Duration) -> Result<Nccl> {
        Nccl::with(Library::get()?, host, devices, lost, connect_timeout)
    }

    fn with(
        library: &'static Library,
        host: usize,
        devices: &[usize],
        lost: Lost,
        connect_timeout: Duration,
    ) -> Result<Nccl> {
        let rails = Arc::new(Rails {
            library,
            host,
            devices: devices.to_vec(),
            rails: (0..devices[host]).map(|_| OnceCell::new()).collect(),
            lost,
            connect_timeout,
            failure: Failure::default(),
            pad: OnceCell::new(),
            over: Mutex::default(),
            changed: Condvar::new(),
        });
        let watched = rails.clone();
        let watch = thread::Builder::new().name("gpu-pool nccl".into()).spawn(move || watched.watch());
        let watch = watch.map_err(|error| cluster_error!("transport", "no thread: {error}"))?;
        event!(debug, "nccl_opened", "NCCL {}", library.version());
        Ok(Nccl { rails, overlap: None, watch: Mutex::new(Some(watch)) })
    }

    /// Large collectives go in several calls, beside other kernels; devices share no GPU. All hosts say so, or none.
    pub(crate) fn overlap(&mut self, blocks: u32) {
        self.overlap = Some(Overlap { piece: PIECE, blocks });
    }

    /// Small sums go by own kernels from now on; or why not. All hosts say so, or none.
    pub(crate) fn set_pad(&self, pad: SetUp<LonePad>) {
        let _ = self.rails.pad.set(pad);
        // An abort that came before has seen none.
        if let Some(cause) = self.rails.failure.cause() {
            self.rails.fail(&cause);
        }
    }

    /// Connects the rail of a device, and makes its first calls. All devices of all hosts do so, each device once, all
    /// devices of a host at the same time, each on a thread of its own (best its device's). The first host of a rail
    /// tells the others its id under `nccl/<rail>`.
    ///
    /// NCCL allocates memory here while it waits for the other hosts, so it is one blocking call of the launch gate:
    /// until the return no kernels that wait for each other start in this process, of any pool. So is
    /// [`close`](Self::close). After an error all rails of this process are aborted.
    pub(crate) fn connect_rail(&self, device: usize, driver: &DriverRef, keys: &Keys<'_>) -> Result<()> {
        let connected = self.rails.connect(device, driver, keys);
        connected.inspect_err(|error| drop(self.rails.fail(error)))
    }

    /// Ends all rails at once, because of `cause`, also while calls are running. False: some have not ended after a
    /// few seconds, and the process should end.
    pub(crate) fn abort(&self, cause: &Error) -> bool {
        self.rails.fail(cause);
        self.rails.wait_until_over(MOST_ABORT)
    }

    /// The orderly end: waits until all that was submitted is done on all hosts, which close, too. After an error, or
    /// where hosts do not close, the rails are aborted. Returns the first error of the transport.
    pub(crate) fn close(&self) -> Result<()> {
        let cause = self.rails.failure.cause();
        let finalized = cause.map_or_else(|| self.rails.finalize(), Err);
        self.stop_watching();
        let closed = finalized.and_then(|()| self.rails.all().try_for_each(|rail| rail.destroy()));
        if let Err(error) = &closed {
            self.abort(error);
        }
        closed
    }

    fn stop_watching(&self) {
        *self.rails.over.lock() = true;
        self.rails.changed.notify_all();
        // The thread itself may have the last reference, when it tells of a failure.
        let other = |watch: &thread::JoinHandle<()>| watch.thread().id() != thread::current().id();
        if let Some(watch) = self.watch.lock().take().filter(other) {
            let _ = watch.join();
        }
    }
}

impl Rails {
    fn connect(&self, device: usize, driver: &DriverRef, keys: &Keys<'_>) -> Result<()> {
        let hosts = hosts_of(&self.devices, device);
        let rank = hosts.iter().position(|&host| host == self.host);
        let no_rail = || self.no_rail("ncclCommInitRankConfig", device);
        let (Some(rank), Some(place)) = (rank, self.rails.get(device)) else { return Err(no_rail()) };
        let key = format!("nccl/{device}");
        let id = if rank == 0 {
            let id = self.library.unique_id()?;
            (keys.set)(&key, &id.0)?;
            id
        } else {
            let wrong = |bytes: Vec<u8>| {
                let (host, count) = (hosts[0], bytes.len());
                cluster_error!("transport", "host {host} sent {count} bytes as the id of rail {device}")
            };
            UniqueId((keys.get)(&key)?.try_into().map_err(wrong)?)
        };
        // It allocates memory and loads kernels.
        let _blocking = blocking();
        driver.bind().map_err(|fault| failed(device, "connect", fault))?;
        let lost = || self.failure.cause().or_else(|| (self.lost)());
        let until = Until { lost: &lost, limit: self.connect_timeout };
        let rail = Arc::new(Rail::connect(self.library, driver.clone(), device, hosts, rank, id, until)?);
        if let Err((_, rail)) = place.try_insert(rail.clone()) {
            rail.abort(&no_rail());
            return Err(no_rail());
        }
        // An abort that came before looks at no rail that is not in its place.
        self.failure.cause().map_or(Ok(()), Err)?;
        rail.warm_up(self.host, until)
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Rail>> {
        self.rails.iter().filter_map(OnceCell::get)
    }

    fn rail(&self, op: &'static str, device: usize) -> Result<&Arc<Rail>> {
        self.rails.get(device).and_then(OnceCell::get).ok_or_else(|| self.no_rail(op, device))
    }

    fn no_rail(&self, op: &'static str, device: usize) -> Error {
        misuse(op, format!("device {device} of host {} has no rail, or one already", self.host))
    }

    /// The fault of the call on all hosts alike, so that none submits it.
    fn check(&self, rail: &Rail, call: &RailCall<'_>) -> Result<()> {
        let wrong = match *call {
            RailCall::Messages(_) => return Ok(()),
            _ if rail.hosts.len() < self.devices.len() => format!("a call of all {} hosts", self.devices.len()),
            RailCall::AllReduce { dtype, reduce, .. } | RailCall::ReduceScatter { dtype, reduce, .. }
                if operation::reduction(dtype, reduce).is_none() =>
            {
                format!("NCCL has no {reduce} of {dtype:?} by this crate's rules")
            }
            _ => return Ok(()),
        };
        Err(misuse("submit", format!("{wrong}, on {rail}")))
    }

    /// An error of the library ends all rails. Returns the first cause: of a dead host NCCL says less than the cluster.
    fn broken(&self, error: Error) -> Error {
        let first = self.failure.cause().is_none();
        self.fail(&if first { cause(error, &*self.lost) } else { error })
    }

    /// Remembers the first error, tells it, and begins to abort all rails; does not wait. It is told first: streams go
    /// on when their calls are aborted. Returns the first error.
    fn fail(&self, cause: &Error) -> Error {
        let cause = self.failure.set(cause);
        // Behind the word to the scopes: they know that what the kernels leave is no sum.
        if let Some(Ok(pad)) = self.pad.get() {
            pad.abort();
        }
        for rail in self.all().filter(|rail| !rail.is_over()) {
            let (rail, cause) = (rail.clone(), cause.clone());
            let name = format!("gpu-pool nccl abort {}", rail.device);
            if let Err(error) = thread::Builder::new().name(name).spawn(move || rail.abort(&cause)) {
                event!(error, "nccl_not_aborted", "a communicator of NCCL is not aborted: no thread: {error}");
            }
        }
        cause
    }

    /// Whether no rail has a communicator any more, after at most `limit`.
    fn wait_until_over(&self, limit: Duration) -> bool {
        let start = Instant::now();
        loop {
            let over = self.all().all(|rail| rail.is_over());
            if over || start.elapsed() > limit {
                return over;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn finalize(&self) -> Result<()> {
        let _blocking = blocking();
        self.all().try_for_each(|rail| {
            let _ = rail.driver.bind();
            rail.finalize()
        })
    }

    fn watch(&self) {
        let mut over = self.over.lock();
        while !*over && self.failure.cause().is_none() {
            drop(over);
            let failed = || self.all().find_map(|rail| rail.failure().or_else(|| rail.overdue(self.connect_timeout)));
            if let Some(error) = (self.lost)().or_else(failed) {
                let error = self.broken(error);
                event!(error, "nccl_aborted", "NCCL's communicators are aborted: {error}");
            }
            over = self.over.lock();
            if !*over && self.failure.cause().is_none() {
                self.changed.wait_for(&mut over, LOOK);
            }
        }
    }
}

/// The hosts of a rail, in ascending order.
fn hosts_of(devices: &[usize], rail: usize) -> Vec<usize> {
    (0..devices.len()).filter(|&host| devices[host] > rail).collect()
}

impl Alarm for Rails {
    /// Committed work is carried out by all hosts, also by those whose scope has failed.
    fn raise(&self, _: &[usize], _: u64) {}

    fn given_up(&self, members: &[usize], place: u64) -> Option<(usize, usize)> {
        let (of, missing, waited) = self.pad.get()?.as_ref().ok()?.given_up()?;
        if of != place {
            return None;
        }
        // The scopes hear of it here, unless they hear of another cause: its word may still be on its way.
        self.fail(&Error::HostTimeout { op: "collective".to_owned(), waited, missing: vec![missing] });
        Some((members[0], missing))
    }
}

impl DeviceTransport for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn pad(&self) -> std::result::Result<&LonePad, &str> {
        self.rails.pad.get().map_or(Err("the processes are being connected"), |pad| pad.as_ref().map_err(|why| &**why))
    }

    fn broken(&self, error: Error) -> Error {
        self.rails.broken(error)
    }

    fn alarm(&self) -> Option<Arc<dyn Alarm>> {
        self.pad().is_ok().then(|| self.rails.clone() as _)
    }

    fn can(&self, dtype: DType, reduce: ReduceOp) -> bool {
        operation::reduction(dtype, reduce).is_some()
    }

    unsafe fn submit(&self, device: usize, stream: RawStream, call: &RailCall<'_>) -> Result<()> {
        let rail = self.rails.rail("submit", device)?;
        self.rails.check(rail, call)?;
        // SAFETY: the caller's promise.
        let submitted = unsafe { rail.enqueue(stream, call) };
        // The other hosts' kernels wait for this call. The abort begins when the caller's launch window is closed.
        submitted.map_err(|error| self.rails.broken(error))
    }

    fn overlaps(&self) -> Option<Overlap> {
        self.overlap
    }

    fn registers(&self) -> bool {
        true
    }

    fn register(&self, device: usize, chunk: &BlockRef) -> Result<Option<Box<dyn Send + Sync>>> {
        let rail = self.rails.rail("ncclCommRegister", device)?;
        let registered = register::Registered::new(rail, chunk, self.rails.connect_timeout)?;
        Ok(registered.map(|registered| Box::new(registered) as _))
    }

    fn registered(&self, device: usize, at: Address) -> Option<u64> {
        self.rails.rail("registered", device).ok()?.registered_at(at)
    }

    fn failed(&self, device: usize) -> Option<Error> {
        let cause = || self.rails.failure.cause();
        let broken = || Some(self.rails.broken(self.rails.rail("submit", device).ok()?.failure()?));
        // A rail that another thread has aborted meanwhile tells nothing any more.
        cause().or_else(broken).or_else(cause)
    }

    fn when_failed(&self, tell: &Arc<Tell>) {
        self.rails.failure.when(tell);
    }
}

impl Drop for Nccl {
    /// Aborts what was not closed, and waits a few seconds for that.
    fn drop(&mut self) {
        let cause = misuse("ncclCommAbort", format!("host {} has dropped its part", self.rails.host));
        if !self.rails.wait_until_over(Duration::ZERO) && !self.abort(&cause) {
            event!(error, "nccl_does_not_end", "NCCL's communicators do not end");
        }
        self.stop_watching();
    }
}

debug_as! {
    Nccl, |self|
    "NCCL {} of host {} of {:?}", self.rails.library.version(), self.rails.host, self.rails.devices
}

#[cfg(test)]
#[path = "../../tests/unit/transport/nccl_tests.rs"]
mod tests;
