//! Software GPUs: a [`Driver`](super::Driver) for machines without a CUDA device.
//!
//! # Contract
//!
//! A software GPU keeps the rules of the [driver contract](super#contract) and is strict where hardware is merely
//! undefined, so that a program that is wrong on eight GPUs is also wrong on a laptop:
//!
//! * **Asynchronous.** A submitted operation runs on a worker thread, never inside the call, and streams advance
//!   independently: what no stream or event orders happens in any order. Copies queue for the device's three copy
//!   engines (up, down, peer), host functions for its one host thread, as on hardware.
//! * **Memory spaces are apart.** Every device has a window of addresses of its own. An operation that names memory which
//!   is unknown, freed, out of range, or a peer's without the (directed) right is refused with a typed fault; memory that
//!   is freed while an operation on it is queued makes the device [lost](super::FaultKind::DeviceLost).
//! * **Lost devices** stay lost: a kernel that panics is `CUDA_ERROR_LAUNCH_FAILED` from every later call on its device,
//!   queued work of the device is dropped, the other devices go on, and waits for its events end.
//! * **Races are not undefined behaviour.** Operations whose byte ranges conflict exclude each other in time, whatever
//!   their streams; which of them runs first is open.
//! * Events, streams and addresses mean something only to the devices of the machine that made them.
//! * Dropping the last handle of a machine lets the work that can run finish and gives up the rest.
//!
//! # Mechanism
//!
//! The devices of one [`machine`] share a scheduler: one lock around plain data (`sched`), a few worker threads and two
//! kinds of waiting (`machine`). A stream is a queue of operations (`stream`, `op`); a stream whose head cannot run yet is
//! parked with whatever will let it go on (`wait`), so that no worker ever blocks. A worker takes a ready stream, starts
//! its head operation under the lock (translate addresses, claim byte ranges and the engine), performs it without the lock
//! (`exec`), and finishes it under the lock. An event is a position in a stream (`event`). `Core::pick_next` is the only
//! place that chooses an order.

mod access;
mod clock;
mod event;
mod exec;
mod fault;
#[cfg(feature = "blas")]
mod gemm;
mod gpu;
mod machine;
mod memory;
mod op;
mod peer;
mod sched;
mod slab;
mod stream;
mod wait;

use super::DriverRef;
pub use gpu::HostGpu;
use std::sync::Arc;

/// What one software GPU of a [`machine`] is like.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Bytes of device memory. They are counted, and committed only when touched.
    pub memory: u64,
    /// Ordinals of the devices whose memory this one may be given access to; `None` means all.
    pub peers: Option<Vec<usize>>,
    /// The device's name; `None` means `software GPU`.
    pub name: Option<String>,
}

impl Default for HostConfig {
    /// 4 GiB of memory, access to all peers.
    fn default() -> Self {
        HostConfig { memory: 4 << 30, peers: None, name: None }
    }
}

/// In which order the operations of a [`machine`] run.
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
pub fn machine_with(configs: &[HostConfig], _config: &MachineConfig) -> Vec<DriverRef> {
    machine(configs)
}

/// Software GPUs that share one machine: they may be each other's peers, use each other's events, and all see the
/// host and managed memory that any of them allocated.
///
/// ```
/// use gpu_pool::driver::host::{self, HostConfig};
/// let gpus = host::machine(&[HostConfig::default(), HostConfig::default()]);
/// assert!(gpus[0].can_access_peer(&*gpus[1]).unwrap());
/// ```
pub fn machine(configs: &[HostConfig]) -> Vec<DriverRef> {
    let owner = Arc::new(machine::Owner::new(configs));
    (0..configs.len()).map(|index| Arc::new(HostGpu::new(&owner, index, &configs[index])) as DriverRef).collect()
}

/// Shim until t3-step is merged.
pub fn virtual_now(_driver: &dyn super::Driver) -> Option<std::time::Duration> {
    None
}
