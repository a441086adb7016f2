//! Milestones: behind every sixteenth operation of a stream, a signal that shows when the stream has passed it.
//!
//! The signal is a number in a [word](super::word) that the host polls by a load, or an event, polled by a driver call.
//! Milestones are best effort: without one, others wait for work that may be over, and deadlines are less patient.

use super::{StreamCore, word::Word};
use crate::driver::{
    RawEvent,
    host::{self, Standing},
};
use crate::memory::DeviceHandle;
use crate::sync::{Sequence, load_word};
use parking_lot::Mutex;
use std::{collections::VecDeque, mem};

/// Operations between two milestones.
pub(super) const MILESTONE: u64 = 16;
/// Events kept per stream; when there are more, every second one is dropped.
const EVENTS: usize = 32;

pub(super) enum Milestones {
    Word {
        word: Word,
        /// Operations that the last write covers. Raised under the lock: several threads may submit to one stream.
        published: Sequence,
        writing: Mutex<()>,
    },
    Events(Mutex<VecDeque<(RawEvent, u64)>>),
}

impl Milestones {
    pub(super) fn new(handle: &DeviceHandle) -> Self {
        // When stepped, early events replace milestones.
        match if handle.stepped { None } else { handle.words.take(handle) } {
            Some(word) => Milestones::Word { word, published: Sequence::new(), writing: Mutex::new(()) },
            None => Milestones::Events(Mutex::default()),
        }
    }

    pub(super) fn are_words(&self) -> bool {
        matches!(self, Milestones::Word { .. })
    }

    pub(super) fn end(&mut self, handle: &DeviceHandle) {
        match self {
            Milestones::Word { word, published, .. } => handle.words.give(*word, published.get()),
            Milestones::Events(events) => {
                events.get_mut().drain(..).for_each(|(event, _)| handle.give_event(event, false));
            }
        }
    }
}

/// Progress of a stream as one wait has seen it. Each wait has its own: several threads may wait for one stream.
#[derive(Default)]
pub(super) struct LastSeen {
    completed: u64,
    standing: Standing,
}

impl LastSeen {
    pub(super) fn has_advanced(&mut self, stream: &StreamCore) -> bool {
        match host::standing(&*stream.handle.driver, stream.raw) {
            Some(now) => {
                let advanced = now.has_advanced_since(&self.standing);
                self.standing = now;
                advanced
            }
            None => {
                let before = mem::replace(&mut self.completed, stream.poll());
                self.completed > before
            }
        }
    }
}

impl StreamCore {
    pub(super) fn set_milestone(&self) {
        match &self.milestones {
            Milestones::Word { word, published, writing } => {
                let guard = writing.lock();
                let covered = self.submitted.get();
                if covered <= published.get() {
                    return;
                }
                // SAFETY: the word belongs to this stream, and lives until its last write has arrived.
                let written = unsafe { self.handle.driver.write_value(word.address, word.value(covered), self.raw) };
                if written.is_ok() {
                    published.raise_to(covered);
                }
                drop(guard);
                // Polled now and then, also without a question: a checker keeps a record of all that was not seen yet.
                self.look(covered);
            }
            Milestones::Events(events) => {
                let Ok((event, covered)) = self.record("milestone", false) else { return };
                let mut events = events.lock();
                if events.len() >= EVENTS {
                    self.pass(&mut events);
                }
                if events.len() >= EVENTS {
                    let mut keep = false;
                    events.retain(|&(event, _)| {
                        keep = !keep;
                        if !keep {
                            self.handle.give_event(event, false);
                        }
                        keep
                    });
                }
                events.push_back((event, covered));
            }
        }
    }

    /// To a checker the calling thread has learned nothing; threads that rely on the answer use
    /// [`has_completed`](Self::has_completed).
    pub(crate) fn poll(&self) -> u64 {
        match &self.milestones {
            _ if self.handle.stepped => {}
            Milestones::Word { published, .. } => {
                self.look(published.get());
            }
            Milestones::Events(events) => self.pass(&mut events.lock()),
        }
        self.completed.get()
    }

    /// Whether the word shows that operation `sequence` is over. Polls only if it may; false without a word.
    pub(super) fn look(&self, sequence: u64) -> bool {
        let Milestones::Word { word, published, .. } = &self.milestones else { return false };
        // Usually this is decided without touching the cache line that the device writes.
        if sequence > published.get() || published.get() <= self.completed.get() {
            return false;
        }
        let value = match self.handle.watch() {
            // SAFETY: the word lives as long as the stream. Devices write it atomically.
            Some(watch) => watch.checker.publish_word(watch.device, self.raw, word.address, &mut || unsafe {
                load_word(std::ptr::with_exposed_provenance(word.address as usize))
            }),
            // SAFETY: as above.
            None => unsafe { self.handle.driver.poll_value(word.address) },
        };
        let reached = word.sequence(value);
        self.completed.raise_to(reached);
        reached >= sequence
    }

    fn pass(&self, events: &mut VecDeque<(RawEvent, u64)>) {
        while let Some(&(event, covered)) = events.front() {
            if !matches!(self.handle.driver.event_query(event), Ok(true)) {
                break;
            }
            self.complete(covered);
            self.handle.give_event(event, false);
            events.pop_front();
        }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/stream/milestone_tests.rs"]
mod tests;
