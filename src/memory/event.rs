//! Events: points in a stream's work that other streams, of any device, can wait for.
//!
//! The raw event goes back to the device's spare events when the last clone is dropped.

use super::StreamCore;
use crate::{
    driver::{FaultKind, RawEvent},
    error::{Error, Result, op_site::OpSite},
};
use std::{sync::Arc, time::Duration};

/// A recorded point of a stream, from [`Device::record`](crate::Device::record).
///
/// An `Event` exists only after it was recorded. So no stream can wait for an event before its record; in CUDA such a
/// wait silently does nothing. An event may be sent to any thread, cloned, and waited for any number of times.
#[derive(Clone)]
pub struct Event(pub(crate) Arc<EventCore>);

pub(crate) struct EventCore {
    pub(crate) stream: Arc<StreamCore>,
    pub(crate) raw: RawEvent,
    pub(crate) covered: u64,
    timing: bool,
}

impl Event {
    pub(crate) fn record(stream: &Arc<StreamCore>, op: &'static str, timing: bool) -> Result<Self> {
        let (raw, covered) = stream.record(op, timing)?;
        Ok(Event(Arc::new(EventCore { stream: stream.clone(), raw, covered, timing })))
    }

    /// The ordinal of the device that recorded it.
    pub fn device(&self) -> usize {
        self.0.stream.handle.device
    }

    /// Whether the work before the event has completed. Does not wait.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] and other driver errors of the recording device.
    #[track_caller]
    pub fn is_complete(&self) -> Result<bool> {
        let (core, _here) = (&*self.0, OpSite::here("Event::is_complete"));
        if core.stream.has_completed(core.covered) {
            return Ok(true);
        }
        core.stream.handle.check("Event::is_complete", core.stream.handle.driver.event_query(core.raw))
    }

    /// Gives up when the stream makes no progress for `limit`, or when `stop` returns true.
    pub(crate) fn wait_host(&self, op: &'static str, limit: Duration, stop: &dyn Fn() -> bool) -> Result<()> {
        let EventCore { stream, raw, covered, .. } = &*self.0;
        stream.wait_host_for(op, *raw, *covered, limit, stop)
    }

    /// The time on the device between `earlier` and this event. Both must come from
    /// [`Device::record_timed`](crate::Device::record_timed) of one device and be complete.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for events without timing or of different devices, when this event was recorded
    /// before `earlier`, and when virtual time has passed its end (213 days); driver errors.
    #[track_caller]
    pub fn elapsed_since(&self, earlier: &Event) -> Result<Duration> {
        let (a, b, _here) = (&*earlier.0, &*self.0, OpSite::here("Event::elapsed_since"));
        invalid_if!(!(a.timing && b.timing), "Event::elapsed_since", "an event was recorded without timing");
        if !Arc::ptr_eq(&a.stream.handle, &b.stream.handle) {
            return Err(Error::invalid("Event::elapsed_since", "the events are of different devices"));
        }
        b.stream.handle.driver.event_elapsed(a.raw, b.raw).map_err(|fault| match fault.kind {
            FaultKind::InvalidArgument => Error::invalid("Event::elapsed_since", fault.detail),
            _ => b.stream.handle.error("Event::elapsed_since", fault),
        })
    }
}

debug_as!(Event, |self| device = self.device(), stream = self.0.stream.id);

impl Drop for EventCore {
    fn drop(&mut self) {
        self.stream.handle.give_event(self.raw, self.timing);
    }
}
