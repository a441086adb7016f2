//! Step events: one event behind each operation of a stream, when software GPUs run one operation at a time (stepped).
//!
//! Normally a wait records its event late ([`StreamCore::wait_for`]), and so captures all that the stream has by then.
//! How much that is depends on the speed of the stream's own thread. When stepped, the order of operations and virtual
//! time would then depend on it, too. So the stream's own thread records an event behind each operation at once, and a
//! wait finds the event of its operation. Recording costs no virtual time.

use super::StreamCore;
use crate::{
    driver::{RawEvent, host},
    error::Result,
    memory::handle::DeviceHandle,
};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// Step events kept per stream. A wait for an older operation takes the oldest one.
const KEPT: usize = 1024;

/// The step events of one stream, in order.
#[derive(Default)]
pub(super) struct StepEvents(Mutex<VecDeque<(u64, Arc<StepEvent>)>>);

/// A recorded event, given back when nobody waits for it any more.
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
    /// Records an event behind operation `sequence`, which was just submitted. Best effort: without it, each wait
    /// records an event of its own.
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

    /// The first step event behind operation `sequence`, with its number.
    pub(super) fn find(&self, sequence: u64) -> Option<(u64, Arc<StepEvent>)> {
        let step_events = self.0.lock();
        let at = step_events.partition_point(|(number, _)| *number < sequence);
        step_events.get(at).cloned()
    }
}

impl StreamCore {
    /// [`wait_for`](Self::wait_for) by step events; false if there is none.
    pub(super) fn wait_for_step_event(&self, op: &'static str, other: &StreamCore, sequence: u64) -> Result<bool> {
        let Some((covered, found)) = other.step_events.find(sequence) else { return Ok(false) };
        self.wait_event(op, found.event, other, covered).map(|()| true)
    }
}
