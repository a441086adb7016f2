//! Where software GPUs run one operation at a time: an event behind each operation of a stream.
//!
//! Elsewhere the event that others wait for is recorded when they come ([`StreamCore::wait_for`]), and captures all
//! that the stream has by then: how much that is depends on how fast its own thread is. In steps that would make the
//! order of operations, and virtual time, depend on it too. So there the stream's own thread step_events each operation at
//! once, and who waits for an operation finds its found. Marking costs nothing in virtual time.

use super::StreamCore;
use crate::{
    driver::{RawEvent, host},
    error::Result,
    memory::handle::DeviceHandle,
};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// Operations of a stream that have step_events of their own; who waits for an older one waits for the oldest of these.
const KEPT: usize = 1024;

/// The step_events of one stream, in order.
#[derive(Default)]
pub(super) struct StepEvents(Mutex<VecDeque<(u64, Arc<StepEvent>)>>);

/// A recorded event; given back when nobody waits for it any more.
pub(super) struct StepEvent {
    pub(super) event: RawEvent,
    handle: Arc<DeviceHandle>,
}

impl Drop for StepEvent {
    fn drop(&mut self) {
        self.handle.give_event(self.event, false);
    }
}

impl StepEvents {
    /// Operation `sequence` was just submitted. Best effort: without a found, who waits records an event of his own.
    pub(super) fn set(&self, stream: &StreamCore, sequence: u64) {
        let Ok(event) = stream.handle.take_event(false) else { return };
        let found = StepEvent { event, handle: stream.handle.clone() };
        if host::uncharged(|| stream.handle.driver.event_record(event, stream.raw)).is_err() {
            return;
        }
        let mut step_events = self.0.lock();
        step_events.push_back((sequence, Arc::new(found)));
        if step_events.len() > KEPT {
            step_events.pop_front();
        }
    }

    /// The first found behind operation `sequence`, with its number.
    pub(super) fn find(&self, sequence: u64) -> Option<(u64, Arc<StepEvent>)> {
        let step_events = self.0.lock();
        let at = step_events.partition_point(|(number, _)| *number < sequence);
        step_events.get(at).cloned()
    }
}

impl StreamCore {
    /// [`wait_for`](Self::wait_for) where there are step_events.
    pub(super) fn wait_for_step_event(&self, op: &'static str, other: &StreamCore, sequence: u64) -> Result<bool> {
        let Some((covered, found)) = other.step_events.find(sequence) else { return Ok(false) };
        self.wait_event(op, found.event, other, covered).map(|()| true)
    }
}
