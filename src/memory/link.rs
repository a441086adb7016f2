//! What any thread may need of a device: its identity, its driver, its spare events.

use crate::{
    driver::{DriverRef, DriverResult, Fault, FaultKind, RawEvent},
    error::{Error, Result},
    sync::Flag,
};
use parking_lot::Mutex;

/// One device of one pool. Outlives the pool while buffers do.
pub(crate) struct Link {
    /// The pool's number.
    pub(crate) pool: u64,
    /// Ordinal in the pool.
    pub(crate) device: usize,
    pub(crate) driver: DriverRef,
    lost: Flag,
    events: Mutex<Vec<RawEvent>>,
    timing_events: Mutex<Vec<RawEvent>>,
    /// For cudarc's `DeviceSlice::stream`, which lends it by reference.
    #[cfg(feature = "cuda")]
    cudarc: once_cell::sync::OnceCell<std::sync::Arc<cudarc::driver::CudaStream>>,
}

impl Link {
    pub(crate) fn new(pool: u64, device: usize, driver: DriverRef) -> Self {
        Link {
            pool,
            device,
            driver,
            lost: Flag::new(),
            events: Mutex::default(),
            timing_events: Mutex::default(),
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
                Error::OutOfMemory { device, op, requested: 0, in_use: 0, free, capacity }
            }
            FaultKind::Misuse if report.is_some() => Error::Misuse { device, op, report: report.expect("just seen") },
            FaultKind::Deadlock => Error::Deadlock { device, op, who: detail },
            _ => {
                let detail = if detail.is_empty() { detail } else { format!(": {detail}") };
                Error::Driver { device, op, code, name, detail }
            }
        }
    }

    /// `result` with its fault turned into an error.
    pub(crate) fn check<T>(&self, op: &'static str, result: DriverResult<T>) -> Result<T> {
        result.map_err(|fault| self.error(op, fault))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cudarc_stream(
        &self,
        make: impl FnOnce() -> std::sync::Arc<cudarc::driver::CudaStream>,
    ) -> &std::sync::Arc<cudarc::driver::CudaStream> {
        self.cudarc.get_or_init(make)
    }

    /// Whether a sticky error was seen.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_raised()
    }

    /// A spare event, or a new one.
    pub(crate) fn take_event(&self, timing: bool) -> DriverResult<RawEvent> {
        let spare = self.spares(timing).lock().pop();
        spare.map_or_else(|| self.driver.event_create(timing), Ok)
    }

    /// Gives an event back. Waits that captured it still hold.
    pub(crate) fn give_event(&self, event: RawEvent, timing: bool) {
        self.spares(timing).lock().push(event);
    }

    fn spares(&self, timing: bool) -> &Mutex<Vec<RawEvent>> {
        if timing { &self.timing_events } else { &self.events }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for event in self.events.get_mut().drain(..).chain(self.timing_events.get_mut().drain(..)) {
            // SAFETY: spare events belong to this device and nobody else has them.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
    }
}
