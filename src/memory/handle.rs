//! What any thread may need of a device: its identity, its driver, its spare events.

use crate::{
    driver::{
        DriverRef, DriverResult, Fault, FaultKind, RawEvent,
        check::{OpGuard, OpSite, Report, Token, Watch},
        host,
    },
    error::{Error, Result, Site},
    memory::progress::Progress,
    memory::{OutOfMemoryReport, stream::word::Words},
    mutation::Panic,
    sync::{Flag, Spares},
};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// One device of one pool. Outlives the pool while buffers do.
pub(crate) struct DeviceHandle {
    /// The pool's number.
    pub(crate) pool: u64,
    /// Ordinal in the pool.
    pub(crate) device: usize,
    pub(crate) driver: DriverRef,
    /// For those who wait for the device.
    pub(crate) progress: Arc<Progress>,
    /// Devices of the pool that are on this one's GPU, itself included: one, but in tests
    /// ([`Builder::share_gpus`](crate::Builder::share_gpus)).
    pub(crate) sharers: usize,
    /// Who watches the pool's work, if anyone does.
    watch: Option<Watch>,
    in_virtual_time: bool,
    /// Whether anybody writes reports: a checker, the memory pool, or software GPUs of a deadlock.
    reports: bool,
    /// Whether operations run one at a time, in an order that must not depend on time.
    pub(crate) stepped: bool,
    /// What a test wants this pool to do wrong.
    #[cfg(test)]
    inject: Option<crate::mutation::Bug>,
    lost: Flag,
    /// A free that the checker has refused: frees cannot return it, so `close` does.
    refused: Mutex<Option<Arc<Report>>>,
    events: Spares<RawEvent>,
    /// Where its streams tell how far they are.
    pub(crate) words: Words,
    timing_events: Spares<RawEvent>,
    /// For cudarc's `DeviceSlice::stream`, which lends it by reference.
    #[cfg(feature = "cuda")]
    cudarc: once_cell::sync::OnceCell<Arc<cudarc::driver::CudaStream>>,
}

/// What goes with something that one host thread hands to another: what it knows, for a checker, and its virtual time.
/// In a box, since it goes with messages, and mostly there is neither.
pub(crate) struct Handover {
    known: Option<Box<Token>>,
    time: Option<Duration>,
}

impl DeviceHandle {
    pub(crate) fn new(
        pool: u64,
        device: usize,
        driver: DriverRef,
        progress: Arc<Progress>,
        sharers: usize,
        watch: Option<Watch>,
        records: bool,
    ) -> Self {
        DeviceHandle {
            pool,
            device,
            progress,
            sharers,
            reports: records || watch.is_some() || driver.as_any().is::<host::HostGpu>(),
            watch,
            in_virtual_time: host::virtual_now(&*driver).is_some(),
            stepped: host::is_stepped(&*driver),
            #[cfg(test)]
            inject: crate::mutation::here(),
            driver,
            lost: Flag::new(),
            refused: Mutex::new(None),
            events: Spares::new(),
            words: Words::default(),
            timing_events: Spares::new(),
            #[cfg(feature = "cuda")]
            cudarc: Default::default(),
        }
    }

    /// Turns a fault of this device's driver into an error that names device and operation.
    pub(crate) fn error(&self, op: &'static str, fault: Fault) -> Error {
        let Fault { kind, code, name, detail, report } = fault;
        let device = self.device;
        match kind {
            FaultKind::DeviceLost => {
                self.lost.raise();
                let name = if detail.is_empty() { name } else { format!("{name}: {detail}") };
                Error::DeviceLost { device, op, code, name }
            }
            FaultKind::OutOfMemory => {
                let (free, capacity) = self.driver.memory_info().unwrap_or((0, 0));
                let known =
                    OutOfMemoryReport { device, op, driver_free: free, driver_total: capacity, ..Default::default() };
                Error::OutOfMemory { device, op, requested: 0, in_use: 0, free, capacity, report: Arc::new(known) }
            }
            FaultKind::Misuse if report.is_some() => Error::Misuse { device, op, report: report.expect("just seen") },
            FaultKind::Deadlock => Error::Deadlock { device, op, who: detail },
            _ => {
                let detail = if detail.is_empty() { detail } else { format!(": {detail}") };
                Error::Driver { device, op, code, name, detail }
            }
        }
    }

    #[inline]
    pub(crate) fn watch(&self) -> Option<&Watch> {
        self.watch.as_ref()
    }

    /// The driver, for calls that no checker is to see.
    pub(crate) fn unwatched(&self) -> &DriverRef {
        self.watch.as_ref().map_or(&self.driver, |watch| &watch.unwatched)
    }

    /// Until the guard goes, what this thread does belongs to the user's call at `site`: for reports.
    #[inline]
    pub(crate) fn enter(&self, op: &'static str, site: Site) -> Option<OpGuard> {
        self.reports.then(|| OpSite { op, site }.enter())
    }

    /// What the calling thread knows, for whoever is handed something by it. In a box: mostly there is no checker.
    pub(crate) fn release(&self) -> Option<Box<Token>> {
        self.watch.as_ref().map(|watch| Box::new(watch.checker.release()))
    }

    /// The calling thread has been handed something.
    pub(crate) fn acquire(&self, token: Option<&Token>) {
        if let (Some(watch), Some(token)) = (&self.watch, token) {
            watch.checker.acquire(token);
        }
    }

    /// Whether who is handed something is to know what the calling thread knows.
    pub(crate) fn hands_over(&self) -> bool {
        self.watch.is_some() || self.in_virtual_time
    }

    /// The calling thread hands something to another one.
    pub(crate) fn hand_over(&self) -> Option<Box<Handover>> {
        if !self.hands_over() {
            return None;
        }
        let time = if self.in_virtual_time { host::virtual_now(&*self.driver) } else { None };
        Some(Box::new(Handover { known: self.release(), time }))
    }

    /// The calling thread has been handed something.
    pub(crate) fn take_over(&self, from: Option<&Handover>) {
        let Some(Handover { known, time }) = from else { return };
        self.acquire(known.as_deref());
        if let Some(time) = time {
            host::virtual_raise(&*self.driver, *time);
        }
    }

    /// The host is about to touch page-locked or managed memory.
    pub(crate) fn host_access(&self, op: &'static str, address: u64, bytes: usize, write: bool) -> Result<()> {
        match &self.watch {
            Some(watch) => watch.checker.host_access(address, bytes, write).map_err(|report| self.misuse(op, report)),
            None => Ok(()),
        }
    }

    pub(crate) fn misuse(&self, op: &'static str, report: Arc<Report>) -> Error {
        Error::Misuse { device: self.device, op, report }
    }

    /// Keeps the report of a free that was refused.
    pub(crate) fn refuse(&self, report: Arc<Report>) {
        self.refused.lock().get_or_insert(report);
    }

    /// The first free that was refused since this was last asked.
    pub(crate) fn take_refused(&self) -> Option<Arc<Report>> {
        self.refused.lock().take()
    }

    /// Whether a test has injected this bug.
    #[cfg(test)]
    pub(crate) fn injected(&self, bug: crate::mutation::Bug) -> bool {
        self.inject == Some(bug)
    }

    /// Whether a test has injected this bug: outside of the crate's own tests, none is.
    #[cfg(not(test))]
    #[inline(always)]
    pub(crate) fn injected(&self, _bug: crate::mutation::Bug) -> bool {
        false
    }

    /// Panics, if a test has asked for that.
    #[inline(always)]
    pub(crate) fn strike(&self, place: Panic) {
        crate::mutation::strike(self.pool, self.device, place);
    }

    /// From now on the device's thread panics there; once.
    #[cfg(test)]
    pub(crate) fn arm(&self, place: Panic) {
        crate::mutation::arm(self.pool, self.device, place);
    }

    /// Whether its time is computed, not measured.
    pub(crate) fn in_virtual_time(&self) -> bool {
        self.in_virtual_time
    }

    /// `result` with its fault turned into an error.
    pub(crate) fn check<T>(&self, op: &'static str, result: DriverResult<T>) -> Result<T> {
        result.map_err(|fault| self.error(op, fault))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cudarc_stream(
        &self,
        make: impl FnOnce() -> Arc<cudarc::driver::CudaStream>,
    ) -> &Arc<cudarc::driver::CudaStream> {
        self.cudarc.get_or_init(make)
    }

    /// Whether a sticky error was seen.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_raised()
    }

    /// A spare event, or a new one.
    pub(crate) fn take_event(&self, timing: bool) -> DriverResult<RawEvent> {
        self.spares(timing).take().map_or_else(|| self.driver.event_create(timing), Ok)
    }

    /// Gives an event back, after every wait on it was enqueued: see `sync::spares`. Those waits still hold.
    pub(crate) fn give_event(&self, event: RawEvent, timing: bool) {
        if let Some(watch) = &self.watch {
            watch.checker.forget_event(watch.device, event);
        }
        self.spares(timing).give(event);
    }

    fn spares(&self, timing: bool) -> &Spares<RawEvent> {
        if timing { &self.timing_events } else { &self.events }
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        while let Some(event) = self.events.take().or_else(|| self.timing_events.take()) {
            // SAFETY: spare events belong to this device and nobody else has them.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
        std::mem::take(&mut self.words).end(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_result<T>(_: impl Fn(&DeviceHandle) -> T) -> usize {
        size_of::<T>()
    }

    /// It goes with every message between devices, and costs next to nothing where there is no checker.
    #[test]
    fn what_a_thread_knows_is_small() {
        assert_eq!(size_of_result(DeviceHandle::release), size_of::<usize>());
        assert_eq!(size_of_result(DeviceHandle::hand_over), size_of::<usize>());
    }
}
