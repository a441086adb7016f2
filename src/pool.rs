//! The pool, which a program holds. `builder/` makes pools. Invariant: after `close` or a drop, no device thread of the
//! pool runs (except after a fork, where there are none).

pub(crate) mod collectives;
mod memory;
mod per_device;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod trace;

use crate::driver::host::{self, Trace};
use crate::error::{Error, Kind, Result, listed, op_site::OpSite};
use crate::memory::{Locality, UnifiedBuffer};
use crate::scope::{TICK, check_pid};
use crate::thread::{
    flight_record::FlightRecord,
    worker::{Shared, on_device_thread},
};
use crate::{
    Device, DeviceCopy, PerDevice, PinnedBuffer, PoolReport, Shard, collective::in_words, gang::dispatch::Entry,
    panics, stall::StallTimer,
};
use std::{panic::Location, sync::Arc, time::Duration};

/// GPUs, each with a host thread of its own that lives as long as the pool.
///
/// A closure runs on all devices in parallel, on the device's thread. It may borrow from the caller. Results come back
/// in device order. Any number of threads may start scopes; the scopes run one after the other on each device.
///
/// The crate's page begins with an example.
///
/// All devices call one closure at the same time, so it cannot change its captured variables:
///
/// ```compile_fail,E0594
/// let mut n = 0;
/// gpu_pool::GpuPool::scope(|_, _| { n += 1; Ok(()) }); // return a value instead, or use `run_mut`
/// ```
///
/// # When something fails
///
/// The first member that panics, returns an error or loses its device fails the whole gang. The other members get
/// [`Error::Aborted`] from their next operations, and the scope returns the cause. The pool works again afterwards.
/// Buffers that the failed scope has written have unspecified contents.
///
/// A scope always waits for closures that have started, since they may hold borrows. A caller must not hold a lock that
/// the closure takes: the crate cannot detect that.
pub struct GpuPool {
    pub(crate) shared: Arc<Shared>,
}

impl GpuPool {
    /// State that lives on its device's thread, one `T` per device, made by `f`. See [`PerDevice`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    #[track_caller]
    pub fn per_device<T: 'static>(&self, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<PerDevice<T>> {
        PerDevice::create(&self.shared, f)
    }

    /// `len` zeros in page-locked host memory. Copies between it and any device of this pool do not block the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], the driver's.
    #[track_caller]
    pub fn pinned<T: DeviceCopy>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        let _here = OpSite::here("pinned");
        self.check_open()?;
        self.shared.pinned.buffer("pinned", len, Locality::CallingThread)
    }

    /// `len` zeros in managed memory: one address on the host and on every device. See [`UnifiedBuffer`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::InvalidArgument`] if a device and the host cannot access managed memory at the
    /// same time; the driver's.
    #[track_caller]
    pub fn unified<T: DeviceCopy>(&self, len: usize) -> Result<UnifiedBuffer<T>> {
        self.check_open()?;
        if let Some(i) = (0..self.device_count()).find(|&i| !self.shared.handles[i].driver.info().concurrent_managed) {
            let why = format!("device {i} cannot share managed memory with the host while it works");
            return Err(Error::invalid("unified", why));
        }
        let _here = OpSite::here("unified");
        UnifiedBuffer::new(&self.shared.handles[0], len, self.shared.deadline)
    }

    /// The number of devices.
    pub fn device_count(&self) -> usize {
        self.shared.device_count()
    }

    /// The devices, and how they reach each other, as found when the pool was built.
    pub fn report(&self) -> PoolReport {
        PoolReport {
            devices: self.shared.handles.iter().map(|handle| handle.driver.info().clone()).collect(),
            lost: self.shared.handles.iter().map(|handle| handle.is_lost()).collect(),
            peers: self.shared.peers.get().cloned().unwrap_or_default(),
            collectives: in_words::sizes(self.device_count()),
        }
    }

    /// The last 1,024 calls and waits of each device. Any thread may call it, also while devices hang; it waits for
    /// nothing and makes no driver call. The pool writes others by itself:
    /// [`Builder::flight_record`](crate::Builder::flight_record).
    pub fn flight_record(&self) -> FlightRecord {
        self.shared.recorder.look("GpuPool::flight_record", None)
    }

    /// The operations of the pool's software GPUs so far, if they run one operation at a time
    /// ([`ExecutionOrder`](crate::driver::host::ExecutionOrder)); `None` otherwise.
    pub fn trace(&self) -> Option<Trace> {
        host::trace(&self.shared.handles[0].driver)
    }

    /// Waits for scopes that run, then ends the device threads. Afterwards buffers can only be dropped. A drop of the
    /// pool does the same, but cannot return an error.
    ///
    /// # Errors
    /// [`Error::NestedScope`] on a device thread; [`Error::Forked`]; [`Error::Panicked`] when a device thread panicked
    /// outside of any scope because of a bug in this crate (a drop of a user's value may panic: that is no error);
    /// [`Error::Misuse`] when the checker has refused to free memory that is in use, or has found a write out of
    /// bounds; [`Error::Custom`] when a [trace](crate::Builder::trace) could not be written to its end.
    #[track_caller]
    pub fn close(self) -> Result<()> {
        fail_if!(on_device_thread(), Error::NestedScope { op: "close", site: Location::caller() });
        check_pid(&self.shared)?;
        stop(&self.shared)
    }

    fn check_open(&self) -> Result<()> {
        check_pid(&self.shared)?;
        if self.shared.gate.is_closed() { Err(Error::Closed) } else { Ok(()) }
    }
}

fn stop(shared: &Arc<Shared>) -> Result<()> {
    if shared.gate.close() {
        shared.gate.wait_drained(None);
        shared.queues.iter().for_each(|queue| queue.post(Entry::Stop));
    }
    let threads = std::mem::take(&mut *shared.threads.lock());
    let mut ended = Ok(());
    for (device, thread) in threads.into_iter().enumerate() {
        warn_of_delay(shared, device, &thread);
        ended = ended.and(thread.join().unwrap_or_else(|payload| Err(panics::error(device, payload, None))));
    }
    shared.stages.lock().clear();
    let traced = shared.timeline.stop().map_err(|error| {
        event!(error, "trace_incomplete", %error, "a trace is not whole");
        Error::custom(error)
    });
    ended = ended.and(shared.pinned.audit("close")).and(traced);
    let refused = shared.handles.iter().find_map(|handle| {
        let report = handle.take_refused()?;
        let op = if report.kind == Kind::OutOfBounds { "close" } else { "free" };
        Some(handle.misuse(op, report))
    });
    refused.map_or(ended, Err)
}

/// Logs if the thread has not ended in time: a drop of the user's may be stuck.
fn warn_of_delay(shared: &Shared, device: usize, thread: &std::thread::JoinHandle<Result<()>>) {
    let mut stall = StallTimer::new(shared.deadline.saturating_add(TICK));
    let mut pause = Duration::from_micros(20);
    while !thread.is_finished() {
        std::thread::sleep(pause);
        pause = stall.tick((2 * pause).min(Duration::from_millis(20)));
        if stall.is_over() {
            let (waited, last_calls) = (stall.waited(), listed(&shared.last_calls(&[device])));
            event!(
                warn, "pool_end_stalls", device, ?waited, %last_calls,
                "a pool that ends waits for the thread of a device"
            );
            return;
        }
    }
}

impl Drop for GpuPool {
    fn drop(&mut self) {
        if std::process::id() != self.shared.pid {
            // After a fork there are no device threads, and calls of the driver are forbidden: leak everything.
            std::mem::forget(self.shared.clone());
            return;
        }
        if on_device_thread() {
            // A device thread cannot wait for itself, nor for a scope that waits for it: another thread waits.
            let shared = self.shared.clone();
            let name = "gpu-pool:close".to_owned();
            let started = std::thread::Builder::new().name(name).spawn(move || drop(stop(&shared)));
            if let Err(error) = started {
                event!(
                    error, "pool_not_closed", %error,
                    "a pool that was dropped on a device thread could not be closed"
                );
            }
            return;
        }
        if let Err(error) = stop(&self.shared) {
            event!(error, "pool_ended_badly", %error, "a pool did not end well");
        }
    }
}

debug_as! {
    GpuPool, |self|
    devices = self.shared.handles.iter().map(|handle| &handle.driver.info().name).collect::<Vec<_>>()
}

#[cfg(test)]
#[path = "../tests/unit/pool_tests.rs"]
mod tests;
