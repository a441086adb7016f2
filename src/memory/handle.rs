//! [`DeviceHandle`]: the part of a device that any thread may use: its identity, its driver, its spare events.
//!
//! Streams, blocks, events and hazards keep it, so it outlives the pool as long as one of them exists.

use super::{Progress, StreamCore, StreamState};
use crate::driver::observe::{Token, Watch};
use crate::driver::{
    Address, DriverRef, DriverResult, FailPoint, Fault, FaultKind, Observer, RawEvent, RawStream, host,
};
use crate::error::{DeviceCall, Error, Result, misuse::Report, op_site::OpSite};
use crate::memory::{OutOfMemoryReport, calls::Calls, stream::word::Words};
use crate::sync::{Flag, Spares};
use crate::timeline::Lane;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};

/// One device of one pool. It lives as long as any buffer of the device.
pub struct DeviceHandle {
    pub(crate) pool: u64,
    /// Ordinal in the pool.
    pub device: usize,
    /// Its driver.
    pub driver: DriverRef,
    pub(crate) progress: Arc<Progress>,
    /// The last calls of the device's thread. Set when the thread has started.
    pub(crate) calls: OnceCell<Arc<Calls>>,
    /// The device's streams, for reports.
    streams: Mutex<Vec<Weak<StreamCore>>>,
    /// The pool's devices on this GPU: one except in tests ([`Builder::share_gpus`](crate::Builder::share_gpus)).
    pub(crate) sharers: usize,
    watch: Option<Watch>,
    in_virtual_time: bool,
    /// Stepped: software GPUs run one operation at a time, in an order that must not depend on time.
    pub(crate) stepped: bool,
    observer: Option<Arc<dyn Observer>>,
    lost: Flag,
    /// A free that the checker has refused. A free cannot return an error, so `close` returns it.
    refused: Mutex<Option<Arc<Report>>>,
    events: Spares<RawEvent>,
    pub(crate) words: Words,
    timing_events: Spares<RawEvent>,
    /// Where the device's timeline is noted.
    pub(crate) lane: Arc<Lane>,
    /// For operations on memory of this device that a graph names: see [`turn`](super::turn).
    pub(super) turn: Mutex<()>,
    /// For cudarc's `DeviceSlice::stream`, which returns a reference.
    #[cfg(feature = "cuda")]
    cudarc: OnceCell<Arc<cudarc::driver::CudaStream>>,
}

/// The knowledge that one host thread passes to another together with a value. Boxed, since usually there is neither.
pub struct Handover {
    known: Option<Box<Token>>,
    time: Option<Duration>,
}

impl Handover {
    #[cfg(feature = "tasks")]
    pub(crate) fn add(to: &mut Option<Box<Handover>>, other: Option<Box<Handover>>) {
        match (to, other) {
            (Some(to), Some(other)) => {
                Token::add(&mut to.known, other.known);
                to.time = to.time.max(other.time);
            }
            (to, Some(other)) => *to = Some(other),
            (_, None) => {}
        }
    }
}

impl DeviceHandle {
    pub(crate) fn new(
        pool: u64,
        device: usize,
        driver: DriverRef,
        progress: Arc<Progress>,
        sharers: usize,
        observer: Option<Arc<dyn Observer>>,
    ) -> Self {
        DeviceHandle {
            pool,
            device,
            progress,
            calls: OnceCell::new(),
            streams: Mutex::default(),
            sharers,
            watch: Watch::of(&driver),
            observer,
            in_virtual_time: host::virtual_now(&*driver).is_some(),
            stepped: host::is_stepped(&*driver),
            lane: Lane::of(&driver),
            driver,
            lost: Flag::new(),
            refused: Mutex::new(None),
            events: Spares::new(),
            words: Words::default(),
            timing_events: Spares::new(),
            turn: Mutex::new(()),
            #[cfg(feature = "cuda")]
            cudarc: Default::default(),
        }
    }

    pub(crate) fn error(&self, op: &'static str, fault: Fault) -> Error {
        self.error_of(op, 0, fault)
    }

    fn error_of(&self, op: &'static str, requested: u64, fault: Fault) -> Error {
        let Fault { kind, code, name, detail, report } = fault;
        let (device, here) = (self.device, OpSite::current());
        let op = here.map_or(op, |here| here.op);
        match kind {
            FaultKind::DeviceLost => {
                self.lost.raise();
                let name = if detail.is_empty() { name } else { format!("{name}: {detail}") };
                Error::DeviceLost { device, op, code, name, site: here.map(|here| here.site) }
            }
            FaultKind::OutOfMemory => {
                let (free, capacity) = self.driver.memory_info().unwrap_or((0, 0));
                let (driver_free, driver_total, site) = (free, capacity, here.map(Into::into));
                let known =
                    OutOfMemoryReport { device, op, site, requested, driver_free, driver_total, ..Default::default() };
                Error::OutOfMemory { device, op, requested, in_use: 0, free, capacity, report: Arc::new(known) }
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

    /// Tells the checker that a library beside the driver uses memory on a stream. Errors: [`Error::Misuse`].
    pub fn lent(&self, op: &'static str, stream: RawStream, at: Address, bytes: usize, write: bool) -> Result<()> {
        let Some(watch) = self.watch() else { return Ok(()) };
        watch.checker.lent(watch.device, stream, at, bytes, write).map_err(|report| self.misuse(op, report))
    }

    /// The device makes progress.
    pub fn advance(&self) {
        self.progress.advance();
    }

    pub(crate) fn unwatched(&self) -> &DriverRef {
        self.watch.as_ref().map_or(&self.driver, |watch| &watch.unwatched)
    }

    /// The knowledge of the calling thread, to pass to another thread. None without a checker.
    pub(crate) fn release(&self) -> Option<Box<Token>> {
        self.watch.as_ref().map(|watch| Box::new(watch.checker.release()))
    }

    pub(crate) fn acquire(&self, token: Option<&Token>) {
        if let (Some(watch), Some(token)) = (&self.watch, token) {
            watch.checker.acquire(token);
        }
    }

    pub(crate) fn hands_over(&self) -> bool {
        self.watch.is_some() || self.in_virtual_time
    }

    /// Makes the knowledge that goes with a value to another thread.
    pub fn hand_over(&self) -> Option<Box<Handover>> {
        if !self.hands_over() {
            return None;
        }
        let time = if self.in_virtual_time { host::virtual_now(&*self.driver) } else { None };
        Some(Box::new(Handover { known: self.release(), time }))
    }

    /// Takes the knowledge that came with a value from another thread.
    pub fn take_over(&self, from: Option<&Handover>) {
        let Some(Handover { known, time }) = from else { return };
        self.acquire(known.as_deref());
        if let Some(time) = time {
            host::virtual_raise(&*self.driver, *time);
        }
    }

    /// Tells the checker that the host will touch page-locked or managed memory.
    pub(crate) fn host_access(&self, op: &'static str, address: u64, bytes: usize, write: bool) -> Result<()> {
        let Some(watch) = &self.watch else { return Ok(()) };
        watch.checker.host_access(address, bytes, write).map_err(|report| self.misuse(op, report))
    }

    pub(crate) fn misuse(&self, op: &'static str, report: Arc<Report>) -> Error {
        let op = OpSite::current().map_or(op, |here| here.op);
        Error::Misuse { device: self.device, op, report }
    }

    pub(crate) fn refuse(&self, report: Arc<Report>) {
        self.refused.lock().get_or_insert(report);
    }

    /// The driver has not taken memory back.
    pub(crate) fn not_returned(&self, fault: Fault) {
        event!(warn, "memory_not_returned", device = self.device, %fault, "memory could not be given back");
        if let Some(report) = fault.report {
            self.refuse(report);
        }
    }

    pub(crate) fn take_refused(&self) -> Option<Arc<Report>> {
        self.refused.lock().take()
    }

    #[inline]
    pub(crate) fn injected(&self, point: FailPoint) -> bool {
        self.observer.as_ref().is_some_and(|observer| observer.fails(self.device, point))
    }

    #[inline]
    pub(crate) fn strike(&self, point: FailPoint) {
        if self.injected(point) {
            panic!("injected: {point:?}");
        }
    }

    pub(crate) fn in_virtual_time(&self) -> bool {
        self.in_virtual_time
    }

    /// The error of a call that the driver has refused for an argument of the user, or that has failed.
    #[track_caller]
    pub(crate) fn refused(&self, op: &'static str, fault: Fault) -> Error {
        if fault.kind == FaultKind::InvalidArgument { Error::invalid(op, fault.detail) } else { self.error(op, fault) }
    }

    /// Turns a fault in `result` into an error.
    pub fn check<T>(&self, op: &'static str, result: DriverResult<T>) -> Result<T> {
        result.map_err(|fault| self.error(op, fault))
    }

    pub(crate) fn check_alloc<T>(&self, op: &'static str, bytes: usize, result: DriverResult<T>) -> Result<T> {
        result.map_err(|fault| self.error_of(op, bytes as u64, fault))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn cudarc_stream(
        &self,
        make: impl FnOnce() -> Arc<cudarc::driver::CudaStream>,
    ) -> &Arc<cudarc::driver::CudaStream> {
        self.cudarc.get_or_init(make)
    }

    pub(crate) fn last_call(&self) -> Option<DeviceCall> {
        let (op, site) = self.calls.get()?.last()?;
        Some(DeviceCall { device: self.device, op, site })
    }

    pub(crate) fn add_stream(&self, stream: &Arc<StreamCore>) {
        let mut streams = self.streams.lock();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// The states of the device's streams that have had work.
    pub(crate) fn stream_states(&self) -> Vec<StreamState> {
        // The drop of a stream calls the driver, so it must not be the last handle that ends under the lock.
        let streams: Vec<_> = self.streams.lock().iter().filter_map(Weak::upgrade).collect();
        streams.iter().map(|stream| stream.state()).filter(|state| state.submitted > 0).collect()
    }

    /// Work that may never end uses memory of this device. A software GPU keeps its memory until its work ends. The
    /// context of a GPU is kept for good: its end could wait for that work, or free memory under it.
    pub(crate) fn keep_context(self: &Arc<Self>) {
        if !self.driver.as_any().is::<host::HostGpu>() {
            std::mem::forget(self.clone());
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_raised()
    }

    pub(crate) fn take_event(&self, timing: bool) -> DriverResult<RawEvent> {
        self.spares(timing).take().map_or_else(|| self.driver.event_create(timing), Ok)
    }

    /// Gives an event back for reuse, after every wait on it was enqueued. Those waits still hold: see `sync::spares`.
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
            // SAFETY: spare events belong to this device, and no other code has them.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
        std::mem::take(&mut self.words).end(self);
    }
}

#[cfg(test)]
#[path = "../../tests/unit/memory/handle_tests.rs"]
mod tests;
