//! Software GPUs: a [`Driver`] for machines without a CUDA device.
//!
//! # Contract
//!
//! A software GPU keeps the rules of the driver contract. Where the behaviour of hardware is undefined, a software GPU
//! reports an error. So a program that is wrong on eight GPUs also fails on a laptop.
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
//! Only `Core::pick_next` chooses an order. Where operations run one at a time ([`ExecutionOrder`]), `step` chooses
//! instead, after `quiescence` has found that the program is blocked; a clock (`timing`) gives the times where time is
//! virtual. `deadlock` looks for waits that will never end, `watch` for kernels that write to read-only arguments.

mod access;
mod block;
mod calls;
mod config;
mod deadlock;
mod event;
mod exec;
#[cfg(all(target_os = "linux", not(miri)))]
mod export;
#[cfg(feature = "blas")]
mod gemm;
mod gpu;
mod grace;
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

use self::event::{Event, Progress, Record};
use self::exec::{Ended, Job};
use self::memory::{Home, HostKind, Memory};
use self::op::{Engine, Graph, Op, Operand, Work};
use self::sched::{Core, Next};
use self::stream::{Stream, Waiter, Who};
use self::timing::{HostCall, Time};
use self::window::{Shared, Windows, not_mapped};
use self::{block::Block, pages::Pages, slab::Key};

use super::{Driver, DriverRef, DriverResult, RawStream, fault};
use crate::error::op_site::OpSite;
pub use config::{ExecutionOrder, HostConfig, MachineConfig};
pub use exec::again;
pub use gpu::HostGpu;
pub(crate) use gpu::uncharged;
#[doc(hidden)]
pub use one_gpu::on_one_gpu;
pub use quiescence::Attendee;
pub(crate) use standing::Standing;
use std::{sync::Arc, thread, time::Duration};
pub use trace::{Step, Trace, What};

/// [`machine()`] with settings. Errors: [`FaultKind::InvalidArgument`](super::FaultKind::InvalidArgument) if the
/// topology is invalid or has too few devices, or if there is none and time is virtual;
/// [`FaultKind::Other`](super::FaultKind::Other) if the process has a million software GPUs at once.
pub fn machine_with(configs: &[HostConfig], config: &MachineConfig) -> DriverResult<Vec<DriverRef>> {
    match &config.topology {
        Some(topology) => {
            topology.validate(OpSite::place()).map_err(|error| fault::invalid(error.to_string()))?;
            let (have, want) = (topology.configs().len(), configs.len());
            fail_if!(have < want, fault::invalid(format!("{want} software GPUs of a machine with {have} devices")));
        }
        None if config.schedule == ExecutionOrder::Virtual => {
            return Err(fault::invalid("the schedule `Virtual` without a topology: see the crate gpu-pool-lab"));
        }
        None => {}
    }
    let owner = Arc::new(machine::Owner::new(configs, config)?);
    let gpu = |(index, config)| Arc::new(HostGpu::new(&owner, index, config)) as DriverRef;
    Ok(configs.iter().enumerate().map(gpu).collect())
}

/// Software GPUs that share one machine. They can be peers, use each other's events, and access all host and managed
/// memory that any of them has allocated. Panics if the process has a million software GPUs at once.
#[track_caller]
pub fn machine(configs: &[HostConfig]) -> Vec<DriverRef> {
    machine_with(configs, &MachineConfig::default()).expect("software GPUs")
}

fn gpu(device: &dyn Driver) -> Option<&HostGpu> {
    device.as_any().downcast_ref()
}

/// Registers an attendee at `device`'s machine while the attendee lives. Does nothing if `device` is no software GPU.
pub fn attend(device: &dyn Driver, attendee: &Arc<dyn Attendee>) {
    if let Some(gpu) = gpu(device) {
        gpu.lock().threads.attend(attendee);
    }
}

/// The steps of the device's machine so far; `None` unless operations run one at a time.
pub fn trace(device: &DriverRef) -> Option<Trace> {
    gpu(&**device)?.lock().stepper.as_ref().map(|stepper| stepper.trace.clone())
}

/// The steps of the device's machine from a number on; `None` unless operations run one at a time.
pub(crate) fn steps(device: &dyn Driver, from: usize) -> Option<Vec<Step>> {
    Some(gpu(device)?.lock().stepper.as_ref()?.trace.steps().get(from..)?.to_vec())
}

/// Where a software GPU's or page-locked memory is in this process: for tests of libraries that take GPU addresses.
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
    gpu(device).is_some_and(|gpu| gpu.owner.machine().is_dry())
}

/// The virtual time at which the calling thread's last call ended; `None` if time is real.
pub fn virtual_now(device: &dyn Driver) -> Option<Duration> {
    let state = gpu(device)?.lock();
    state.core.clock.as_ref().map(|clock| event::duration(clock.now(thread::current().id())))
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

/// Looks for a deadlock. A device thread that waits outside the driver calls this every few milliseconds.
pub(crate) fn find_deadlock(device: &dyn Driver) {
    if let Some(gpu) = gpu(device) {
        gpu.owner.machine().find_deadlock(&mut gpu.lock());
    }
}
