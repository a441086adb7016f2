//! Software GPUs: a [`Driver`] for machines without a CUDA device.
//!
//! # Contract
//!
//! A software GPU keeps the rules of the [driver contract](super#contract). Where the behaviour of hardware is
//! undefined, a software GPU reports an error. So a program that is wrong on eight GPUs also fails on a laptop.
//!
//! * **Asynchronous.** A submitted operation runs on a worker thread, never inside the call. Streams advance
//!   independently: operations that no stream or event orders run in any order. As on hardware, copies queue for the
//!   device's three copy engines (up, down, peer), and host functions queue for its one host thread.
//! * **Separate memory spaces.** Every device has its own window of addresses. An operation fails with a typed fault
//!   if its memory is unknown, freed, out of range, or belongs to a peer without the (directed) right. If memory is
//!   freed while an operation on it is queued, the device is [lost](super::FaultKind::DeviceLost).
//! * **Lost devices** stay lost. After a kernel panics, every later call on its device returns
//!   `CUDA_ERROR_LAUNCH_FAILED`. Queued work of the device is dropped, waits for its events end, and the other devices
//!   continue.
//! * **Deadlocks are reported** ([`FaultKind::Deadlock`](super::FaultKind::Deadlock)): when nothing runs and all
//!   streams and threads wait, the waits end with a report that lists them. If a stream waits for a word in memory, a
//!   thread of the application might still write that word; then the report comes only after a second without progress.
//! * **Races are not undefined behaviour.** Operations with conflicting byte ranges never run at the same time, also on
//!   different streams. Their order is not defined.
//! * Events, streams and addresses are valid only for the devices of the machine that made them.
//! * When the last handle of a machine is dropped, the work that can run finishes, and the rest is dropped.
//!
//! # Mechanism
//!
//! The devices of one [`machine()`] share a scheduler: one lock around plain data (`sched`), a few worker threads and
//! two kinds of waiting (`machine`). A stream is a queue of operations (`stream`, `op`). A stream whose head operation
//! cannot run yet is parked in the wait list of its obstacle (`wait`), so no worker ever blocks. A worker takes a ready
//! stream, starts its head operation under the lock (translate addresses, claim byte ranges and the engine), performs
//! it without the lock (`exec`), and finishes it under the lock. An event is a position in a stream (`event`).
//!
//! Only `Core::pick_next` chooses an order. Where operations run one at a time ([`Schedule`]), `step` chooses instead,
//! after `quiescence` has found that the program is blocked; a clock (`timing`) gives the times where time is virtual. `deadlock`
//! looks for waits that will never end, `watch` for kernels that write to read-only arguments.

mod access;
mod block;
mod calls;
mod deadlock;
mod event;
mod exec;
#[cfg(all(target_os = "linux", not(miri)))]
mod export;
mod fault;
#[cfg(feature = "blas")]
mod gemm;
mod gpu;
mod grace;
mod graph;
mod machine;
mod memory;
mod one_gpu;
mod op;
mod pages;
mod peer;
mod quiescence;
mod sched;
mod slab;
mod standing;
mod step;
mod stream;
pub mod timing;
mod trace;
mod wait;
mod watch;
mod window;

use super::{Driver, DriverRef, DriverResult, RawStream};
use crate::error::op_site::OpSite;
pub use exec::again;
pub(crate) use exec::{again_after, misused};
pub use gpu::HostGpu;
#[doc(hidden)]
pub use one_gpu::on_one_gpu;
pub use quiescence::{Attendee, attend};
pub(crate) use standing::Standing;
use std::{sync::Arc, thread, time::Duration};
pub use trace::{Step, Trace, What};

/// The properties of one software GPU of a [`machine()`].
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Capacity of the device memory in bytes. Host memory behind it is committed only when touched.
    pub memory: u64,
    /// Ordinals of the devices that this device can have peer access to; `None` means all.
    pub peers: Option<Vec<usize>>,
    /// The device's name; `None` means `software GPU`.
    pub name: Option<String>,
    /// Whether the device has stream memory operations ([`write_value`](super::Driver::write_value),
    /// [`wait_value`](super::Driver::wait_value)); some GPUs have none.
    pub stream_values: bool,
    /// Whether the device has virtual memory management ([`Driver::vm_granularity`]), if the operating system allows
    /// it.
    pub virtual_memory: bool,
}

impl Default for HostConfig {
    /// 4 GiB of memory, access to all peers, stream memory operations, virtual memory.
    fn default() -> Self {
        HostConfig { memory: 4 << 30, peers: None, name: None, stream_values: true, virtual_memory: true }
    }
}

/// The order in which the operations of a [`machine()`] run.
///
/// # One operation at a time
/// In every schedule but [`Threaded`](Self::Threaded), one operation runs at a time. The next one is chosen only when
/// the program is quiescent: every device thread of every pool on the machine is blocked (in a wait for a stream or
/// event, for a peer, for its next scope). So the set of candidates does not depend on the speed of threads, and the
/// order is a function of the seed (or of the list, or of virtual time): the same program has the same [`trace()`].
///
/// That holds as long as each device thread's submissions are a function of the data. Host threads are real threads.
/// So the order is *not* a function of the seed for
/// * programs that depend on time: waits with a limit of the program's own, `Instant`, and polls
///   ([`Event::is_complete`] in a loop gets one step for each poll);
/// * device threads that wait for each other by channels, locks or atomics of their own, or that compute for long. They
///   do not count as blocked. The program stays live: after 50 ms (a second, if Linux says that the thread is running)
///   the machine takes a step anyway;
/// * the order in which several threads of the application start their scopes, and words that the host writes without
///   a call;
/// * machines without a pool, used by several threads: the machine takes steps while any thread waits in the driver;
/// * scopes that fail: how far the other members get before they see the failure;
/// * pools of more than 16 devices whose copies are staged: which pair of devices creates its streams first.
///
/// A host function must not wait for a host function of another stream: the two cannot run at the same time.
///
/// [`Event::is_complete`]: crate::Event::is_complete
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Schedule {
    /// On several worker threads, as fast as possible.
    #[default]
    Threaded,
    /// One operation at a time, chosen at random from this seed.
    Seeded(u64),
    /// One operation at a time: each step takes the next choice of the list, and choice 0 after the end of the list.
    Replay(Arc<[u32]>),
    /// One operation at a time, in the order of virtual time.
    Virtual,
}

/// Settings of a [`machine()`] as a whole.
#[derive(Clone, Debug, Default)]
pub struct MachineConfig {
    /// The order of operations.
    pub schedule: Schedule,
    /// Speeds of links and engines, for [`Schedule::Virtual`].
    pub topology: Option<Arc<dyn timing::Machine>>,
    /// Whether the machine looks for kernels that write to arguments which they declare as read-only.
    pub watch_reads: bool,
    /// Dry run: operations take virtual time, but they are not performed and touch no memory.
    pub dry: bool,
}

/// [`machine()`] with settings.
///
/// # Errors
/// [`FaultKind::InvalidArgument`](super::FaultKind::InvalidArgument) if the topology is invalid or has too few
/// devices, or if there is none and time is virtual; [`FaultKind::Other`](super::FaultKind::Other) if the process has a million software GPUs at once.
pub fn machine_with(configs: &[HostConfig], config: &MachineConfig) -> DriverResult<Vec<DriverRef>> {
    match &config.topology {
        Some(topology) => {
            topology.validate(OpSite::place()).map_err(|error| fault::invalid(error.to_string()))?;
            let (have, want) = (topology.configs().len(), configs.len());
            if have < want {
                return Err(fault::invalid(format!("{want} software GPUs of a machine with {have} devices")));
            }
        }
        None if config.schedule == Schedule::Virtual => {
            return Err(fault::invalid("the schedule `Virtual` without a topology: see the crate gpu-pool-lab"));
        }
        None => {}
    }
    let owner = Arc::new(machine::Owner::new(configs, config)?);
    let gpu = |(index, config)| Arc::new(HostGpu::new(&owner, index, config)) as DriverRef;
    Ok(configs.iter().enumerate().map(gpu).collect())
}

/// Software GPUs that share one machine. They can be peers, use each other's events, and access all host and managed
/// memory that any of them has allocated.
///
/// ```
/// use gpu_pool::driver::host::{self, HostConfig};
/// let gpus = host::machine(&[HostConfig::default(), HostConfig::default()]);
/// assert!(gpus[0].can_access_peer(&*gpus[1]).unwrap());
/// ```
///
/// # Panics
/// If the process has a million software GPUs at once; [`machine_with`] returns an error instead.
#[track_caller]
pub fn machine(configs: &[HostConfig]) -> Vec<DriverRef> {
    machine_with(configs, &MachineConfig::default()).expect("software GPUs")
}

fn gpu(device: &dyn Driver) -> Option<&HostGpu> {
    device.as_any().downcast_ref()
}

/// The steps of the device's machine so far; `None` unless operations run one at a time.
pub fn trace(device: &DriverRef) -> Option<Trace> {
    gpu(&**device)?.lock().stepper.as_ref().map(|stepper| stepper.trace.clone())
}

/// Where a range of a software GPU's memory, or of page-locked memory, is in this process: for tests of libraries that
/// take a GPU's addresses.
pub fn in_process(device: &dyn Driver, address: super::Address, bytes: usize) -> Option<*mut u8> {
    let state = gpu(device)?.lock();
    let found = state.core.memory.resolve(address, bytes).ok()?;
    Some(found.block.at(found.offset))
}

/// Whether the device is a software GPU whose operations run one at a time.
pub fn is_stepped(device: &dyn Driver) -> bool {
    gpu(device).is_some_and(|gpu| gpu.lock().core.stepped)
}

/// Whether the device is a software GPU of a dry machine ([`MachineConfig::dry`]).
pub fn is_dry(device: &dyn Driver) -> bool {
    gpu(device).is_some_and(|gpu| gpu.owner().machine().is_dry())
}

/// The virtual time at which the calling thread's last call ended; `None` if time is real.
pub fn virtual_now(device: &dyn Driver) -> Option<Duration> {
    let state = gpu(device)?.lock();
    state.core.clock.as_ref().map(|clock| event::duration(clock.now(thread::current().id())))
}

thread_local! {
    static UNCHARGED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Within `f`, calls of this thread that submit no operation take no virtual time.
pub(crate) fn uncharged<R>(f: impl FnOnce() -> R) -> R {
    let before = UNCHARGED.replace(true);
    let result = f();
    UNCHARGED.set(before);
    result
}

/// Raises the calling thread's virtual time to at least `time`: the time of a thread that has handed it a value.
pub(crate) fn virtual_raise(device: &dyn Driver, time: Duration) {
    if let Some(gpu) = gpu(device)
        && let Some(clock) = gpu.lock().core.clock.as_mut()
    {
        clock.raise(thread::current().id(), event::time(time));
    }
}

/// The virtual time at which the last operation so far ended; `None` if time is real.
pub fn virtual_end(device: &dyn Driver) -> Option<Duration> {
    let state = gpu(device)?.lock();
    state.core.clock.as_ref().map(|_| event::duration(state.core.latest))
}

/// The progress of a stream and of the streams that it waits for; `None` for devices that are no software GPUs.
pub(crate) fn standing(device: &dyn Driver, stream: RawStream) -> Option<Standing> {
    gpu(device).map(|gpu| gpu.lock().core.standing(stream.0))
}

/// Looks for a deadlock. A device thread that waits outside the driver calls this every few milliseconds. See
/// [`FaultKind::Deadlock`](super::FaultKind::Deadlock).
pub(crate) fn find_deadlock(device: &dyn Driver) {
    if let Some(gpu) = gpu(device) {
        gpu.owner().machine().find_deadlock(&mut gpu.lock());
    }
}
