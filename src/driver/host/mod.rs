//! Software GPUs: a [`Driver`] for machines without a CUDA device.
//!
//! # Contract
//!
//! A software GPU keeps the rules of the [driver contract](super#contract) and is strict where hardware is merely
//! undefined, so that a program that is wrong on eight GPUs is also wrong on a laptop:
//!
//! * **Asynchronous.** A submitted operation runs on a worker thread, never inside the call, and streams advance
//!   independently: what no stream or event orders happens in any order. Copies queue for the device's three copy
//!   engines (up, down, peer), host functions for its one host thread, as on hardware.
//! * **Memory spaces are apart.** Every device has a window of addresses of its own. An operation that names memory
//!   which is unknown, freed, out of range, or a peer's without the (directed) right is refused with a typed fault;
//!   memory that is freed while an operation on it is queued makes the device [lost](super::FaultKind::DeviceLost).
//! * **Lost devices** stay lost: a kernel that panics is `CUDA_ERROR_LAUNCH_FAILED` from every later call on its
//!   device, queued work of the device is dropped, the other devices go on, and waits for its events end.
//! * **Deadlocks are reported** ([`FaultKind::Deadlock`](super::FaultKind::Deadlock)): when nothing runs and everyone
//!   waits, waits end with a report of who waits for whom. Where a word in memory is waited for, which a thread of the
//!   application might still write, that takes a second in which nothing happens.
//! * **Races are not undefined behaviour.** Operations whose byte ranges conflict exclude each other in time, whatever
//!   their streams; which of them runs first is open.
//! * Events, streams and addresses mean something only to the devices of the machine that made them.
//! * Dropping the last handle of a machine lets the work that can run finish and gives up the rest.
//!
//! # Mechanism
//!
//! The devices of one [`machine`] share a scheduler: one lock around plain data (`sched`), a few worker threads and two
//! kinds of waiting (`machine`). A stream is a queue of operations (`stream`, `op`); a stream whose head cannot run yet
//! is parked with whatever will let it go on (`wait`), so that no worker ever blocks. A worker takes a ready stream,
//! starts its head operation under the lock (translate addresses, claim byte ranges and the engine), performs it
//! without the lock (`exec`), and finishes it under the lock. An event is a position in a stream (`event`).
//! `Core::pick_next` is the only place that chooses an order; where operations run one at a time ([`Schedule`]) it is
//! `step` instead, when `attend` finds the program at rest, at times from `clock` where time is virtual. `deadlock`
//! looks for what will never end, `watch` for kernels that write what they must not.

mod access;
mod attend;
mod calls;
mod clock;
mod deadlock;
mod event;
mod exec;
mod fault;
#[cfg(feature = "blas")]
mod gemm;
mod gpu;
mod graph;
mod machine;
mod memory;
#[cfg(test)]
mod one_gpu;
mod op;
mod pages;
mod peer;
mod restless;
mod sched;
mod slab;
mod standing;
mod step;
mod stream;
mod trace;
mod wait;
mod watch;
mod window;

use super::{Driver, DriverRef, DriverResult, RawStream};
use crate::topology::{DeviceModel, Topology};
pub use attend::{Attendee, attend};
pub use exec::again;
pub use gpu::HostGpu;
#[cfg(test)]
pub(crate) use one_gpu::on_one_gpu;
pub(crate) use standing::Standing;
use std::{collections::BTreeSet, sync::Arc, thread, time::Duration};
pub use trace::{Step, Trace, What};

/// What one software GPU of a [`machine`] is like.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Bytes of device memory. They are counted, and committed only when touched.
    pub memory: u64,
    /// Ordinals of the devices whose memory this one may be given access to; `None` means all.
    pub peers: Option<Vec<usize>>,
    /// The device's name; `None` means `software GPU`.
    pub name: Option<String>,
    /// Whether it has stream memory operations
    /// ([`write_value`](super::Driver::write_value), [`wait_value`](super::Driver::wait_value)); some GPUs have not.
    pub stream_values: bool,
    /// Whether it has virtual memory management ([`Driver::vm_granularity`]), as far as the operating system lets it.
    pub virtual_memory: bool,
}

impl Default for HostConfig {
    /// 4 GiB of memory, access to all peers, stream memory operations, virtual memory.
    fn default() -> Self {
        HostConfig { memory: 4 << 30, peers: None, name: None, stream_values: true, virtual_memory: true }
    }
}

impl Topology {
    /// Software GPUs with this machine's memory sizes, names and peer rights.
    pub fn host_configs(&self) -> Vec<HostConfig> {
        let linked: BTreeSet<_> = self.links().iter().map(|link| (link.from, link.to)).collect();
        let config = |device: &DeviceModel| HostConfig {
            memory: device.memory,
            peers: Some(Vec::new()),
            name: Some(device.name.clone()),
            ..HostConfig::default()
        };
        let mut configs: Vec<_> = self.devices().iter().map(config).collect();
        for &(from, to) in linked.iter().filter(|&&(from, to)| to < self.len() && linked.contains(&(to, from))) {
            if let Some(peers) = configs.get_mut(from).and_then(|config| config.peers.as_mut()) {
                peers.push(to);
            }
        }
        configs
    }
}

/// In which order the operations of a [`machine`] run.
///
/// # One operation at a time
/// In all but [`Threaded`](Self::Threaded) exactly one operation runs at a time, and the next is chosen only when the
/// program has come to rest: every device thread of every pool on the machine is blocked (in a wait for a stream or
/// event, for a peer, for its next scope). So what can be chosen from does not depend on how fast threads are, and the
/// order is a function of the seed (or list, or of virtual time): the same program has the same [`trace`].
///
/// That holds as long as what each device thread submits is a function of the data. Host threads stay real, so it does
/// *not* hold for
/// * what depends on time: waits with a limit of the program's own, `Instant`, and polls ([`Event::is_complete`] in a
///   loop gets one step for each look);
/// * device threads that wait for each other by channels, locks or atomics of their own, or compute for long: they do
///   not count as blocked. The program stays live: after 50 ms (a second, if Linux says that the thread is running)
///   steps are taken anyway, which then are not a function of the seed;
/// * which of several threads of the application starts its scope first, and words that the host writes without a call;
/// * machines without a pool, used by several threads: steps are taken while any thread waits in the driver;
/// * scopes that fail: how far the other members get before they hear of it;
/// * pools of more than 16 devices whose copies are staged: which pair of devices comes first to make its streams.
///
/// A host function that waits for one of another stream waits in vain, since that one cannot run beside it.
///
/// [`Event::is_complete`]: crate::Event::is_complete
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Schedule {
    /// On several worker threads, as fast as they can.
    #[default]
    Threaded,
    /// One operation at a time, the next one drawn from this seed.
    Seeded(u64),
    /// One operation at a time: at each step the choice that the list names; past its end the first.
    Replay(Arc<[u32]>),
    /// One operation at a time, in the order of virtual time.
    Virtual,
}

/// What concerns a [`machine`] as a whole.
#[derive(Clone, Debug, Default)]
pub struct MachineConfig {
    /// The order of operations.
    pub schedule: Schedule,
    /// What links and engines cost, for [`Schedule::Virtual`].
    pub topology: Option<Arc<crate::topology::Topology>>,
    /// Whether kernels are watched for writes through arguments that they declare as read.
    pub watch_reads: bool,
    /// Operations take virtual time but are not performed, and memory is not touched.
    pub dry: bool,
}

/// [`machine`], with settings.
///
/// # Errors
/// [`FaultKind::InvalidArgument`](super::FaultKind::InvalidArgument) for a topology that cannot be, or that has fewer
/// devices; [`FaultKind::Other`](super::FaultKind::Other) when the process has a million software GPUs at once.
pub fn machine_with(configs: &[HostConfig], config: &MachineConfig) -> DriverResult<Vec<DriverRef>> {
    if let Some(topology) = &config.topology {
        topology.validate().map_err(|error| fault::invalid(error.to_string()))?;
        if topology.len() < configs.len() {
            let (have, want) = (topology.len(), configs.len());
            return Err(fault::invalid(format!("{want} software GPUs of a machine with {have} devices")));
        }
    }
    let owner = Arc::new(machine::Owner::new(configs, config)?);
    let gpu = |(index, config)| Arc::new(HostGpu::new(&owner, index, config)) as DriverRef;
    Ok(configs.iter().enumerate().map(gpu).collect())
}

/// Software GPUs that share one machine: they may be each other's peers, use each other's events, and all see the
/// host and managed memory that any of them allocated.
///
/// ```
/// use gpu_pool::driver::host::{self, HostConfig};
/// let gpus = host::machine(&[HostConfig::default(), HostConfig::default()]);
/// assert!(gpus[0].can_access_peer(&*gpus[1]).unwrap());
/// ```
///
/// # Panics
/// When the process has a million software GPUs at once: [`machine_with`] returns that as an error.
#[track_caller]
pub fn machine(configs: &[HostConfig]) -> Vec<DriverRef> {
    machine_with(configs, &MachineConfig::default()).expect("software GPUs")
}

fn gpu(device: &dyn Driver) -> Option<&HostGpu> {
    device.as_any().downcast_ref()
}

/// What the device's machine has done so far, where operations run one at a time; `None` for others.
pub fn trace(device: &DriverRef) -> Option<Trace> {
    gpu(&**device)?.lock().stepper.as_ref().map(|stepper| stepper.trace.clone())
}

/// Whether the device is a software GPU whose operations run one at a time.
pub fn is_stepped(device: &dyn Driver) -> bool {
    gpu(device).is_some_and(|gpu| gpu.lock().core.stepped)
}

/// Whether the device is a software GPU that only takes note of the time of its operations: [`MachineConfig::dry`].
pub fn is_dry(device: &dyn Driver) -> bool {
    gpu(device).is_some_and(|gpu| gpu.owner().machine().is_dry())
}

/// The calling thread's virtual time, where time is virtual: when its last call was over.
pub fn virtual_now(device: &dyn Driver) -> Option<Duration> {
    let state = gpu(device)?.lock();
    state.core.clock.as_ref().map(|clock| event::duration(clock.now(thread::current().id())))
}

thread_local! {
    static UNCHARGED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls of the calling thread within `f` that submit no operation take no virtual time.
pub(crate) fn uncharged<R>(f: impl FnOnce() -> R) -> R {
    let before = UNCHARGED.replace(true);
    let result = f();
    UNCHARGED.set(before);
    result
}

/// The calling thread's virtual time is at least this: it was handed something by a thread whose time it was.
pub(crate) fn virtual_raise(device: &dyn Driver, time: Duration) {
    if let Some(gpu) = gpu(device)
        && let Some(clock) = gpu.lock().core.clock.as_mut()
    {
        clock.raise(thread::current().id(), event::time(time));
    }
}

/// The virtual time at which the last of all operations so far ended, where time is virtual.
pub fn virtual_end(device: &dyn Driver) -> Option<Duration> {
    let state = gpu(device)?.lock();
    state.core.clock.as_ref().map(|_| event::duration(state.core.latest))
}

/// How far a stream of a software GPU is; `None` for others.
pub(crate) fn standing(device: &dyn Driver, stream: RawStream) -> Option<Standing> {
    gpu(device).map(|gpu| gpu.lock().core.standing(stream.0))
}

/// Looks whether everyone waits for everyone; for a device thread that waits outside the driver, every few
/// milliseconds. See [`FaultKind::Deadlock`](super::FaultKind::Deadlock).
pub(crate) fn find_deadlock(device: &dyn Driver) {
    if let Some(gpu) = gpu(device) {
        gpu.owner().machine().find_deadlock(&mut gpu.lock());
    }
}
