//! Where software GPUs run one operation at a time: an event behind each operation of a stream.
//!
//! Elsewhere the event that others wait for is recorded when they come ([`StreamCore::wait_for`]), and captures all
//! that the stream has by then: how much that is depends on how fast its own thread is. In steps that would make the
//! order of operations, and virtual time, depend on it too. So there the stream's own thread marks each operation at
//! once, and who waits for an operation finds its mark. Marking costs nothing in virtual time.

use super::StreamCore;
use crate::{
    driver::{RawEvent, host},
    error::Result,
    memory::handle::DeviceHandle,
};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// Operations of a stream that have marks of their own; who waits for an older one waits for the oldest of these.
const KEPT: usize = 1024;

/// The marks of one stream, in order.
#[derive(Default)]
pub(super) struct Marks(Mutex<VecDeque<(u64, Arc<Mark>)>>);

/// A recorded event; given back when nobody waits for it any more.
pub(super) struct Mark {
    pub(super) event: RawEvent,
    handle: Arc<DeviceHandle>,
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.handle.give_event(self.event, false);
    }
}

impl Marks {
    /// Operation `sequence` was just submitted. Best effort: without a mark, who waits records an event of his own.
    pub(super) fn set(&self, stream: &StreamCore, sequence: u64) {
        let Ok(event) = stream.handle.take_event(false) else { return };
        let mark = Mark { event, handle: stream.handle.clone() };
        if host::uncharged(|| stream.handle.driver.event_record(event, stream.raw)).is_err() {
            return;
        }
        let mut marks = self.0.lock();
        marks.push_back((sequence, Arc::new(mark)));
        if marks.len() > KEPT {
            marks.pop_front();
        }
    }

    /// The first mark behind operation `sequence`, with its number.
    pub(super) fn find(&self, sequence: u64) -> Option<(u64, Arc<Mark>)> {
        let marks = self.0.lock();
        let at = marks.partition_point(|(number, _)| *number < sequence);
        marks.get(at).cloned()
    }
}

impl StreamCore {
    /// [`wait_for`](Self::wait_for) where there are marks.
    pub(super) fn wait_for_mark(&self, op: &'static str, other: &StreamCore, sequence: u64) -> Result<bool> {
        let Some((covered, mark)) = other.marks.find(sequence) else { return Ok(false) };
        self.wait_event(op, mark.event, other, covered).map(|()| true)
    }
}
