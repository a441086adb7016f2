//! Early events: recorded by the thread that submits, before anyone waits for them.
//!
//! A late event ([`StreamCore::wait_for`]) covers all that the stream has by then. A stream has early events in two
//! cases, and a wait takes the first one behind its operation:
//!
//! * A device hands memory over ([`StreamCore::record_early`]: `give`, `send`, a pipeline's hop), and must not make the
//!   receiver wait for its own later work.
//! * Software GPUs run one operation at a time (stepped). The work before a late event would depend on the speed of the
//!   stream's thread. So there is an event behind each operation. Recording it costs no virtual time.

use super::StreamCore;
use crate::{
    driver::{RawEvent, host},
    error::Result,
    memory::DeviceHandle,
};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};

/// Early events kept per stream. A wait for an older operation takes the oldest one.
const KEPT: usize = 1024;

/// In order, each with the number of operations that it covers.
#[derive(Default)]
pub(super) struct EarlyEvents(Mutex<VecDeque<(u64, Arc<EarlyEvent>)>>);

pub(super) struct EarlyEvent {
    pub(super) event: RawEvent,
    handle: Arc<DeviceHandle>,
}

impl Drop for EarlyEvent {
    fn drop(&mut self) {
        self.handle.give_event(self.event, false);
    }
}

impl EarlyEvents {
    /// When stepped, behind an operation that was just submitted. Best effort: without it, each wait records an event.
    pub(super) fn step(&self, stream: &StreamCore, sequence: u64) {
        let Ok(event) = stream.handle.take_event(false) else { return };
        let found = EarlyEvent { event, handle: stream.handle.clone() };
        if host::uncharged(|| stream.handle.driver.event_record(event, stream.raw)).is_err() {
            return;
        }
        self.add(sequence, found);
    }

    fn add(&self, covered: u64, found: EarlyEvent) {
        let mut events = self.0.lock();
        events.push_back((covered, Arc::new(found)));
        if events.len() > KEPT {
            events.pop_front();
        }
    }

    pub(super) fn find(&self, sequence: u64) -> Option<(u64, Arc<EarlyEvent>)> {
        let events = self.0.lock();
        let at = events.partition_point(|(covered, _)| *covered < sequence);
        events.get(at).cloned()
    }
}

impl StreamCore {
    /// If the stream has anything new. The device's own thread calls it when it hands memory over.
    pub fn record_early(&self, op: &'static str) -> Result<()> {
        let submitted = self.submitted.get();
        let is_new = |events: &VecDeque<(u64, _)>| events.back().is_none_or(|(covered, _)| *covered < submitted);
        {
            let mut events = self.early.0.lock();
            if self.handle.stepped || submitted == 0 || !is_new(&events) {
                return Ok(());
            }
            let completed = self.completed.get();
            let over = events.partition_point(|(covered, _)| *covered <= completed);
            events.drain(..over);
        }
        let (event, covered) = self.record(op, false)?;
        self.early.add(covered, EarlyEvent { event, handle: self.handle.clone() });
        Ok(())
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/stream/early_tests.rs"]
mod tests;
