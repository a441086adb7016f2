//! Milestones: behind every sixteenth operation of a stream, something that tells when the stream has got there.
//!
//! That is a number which the stream writes into a [word](super::word) where the device can do that, so that a look is
//! a load of the host; else an event, which must be asked for by a call. Either is submitted when work is, never when
//! it is asked for.
//!
//! Best effort, both: without a milestone others wait for what might be over, and the deadline is less patient.

use super::{StreamCore, word::Word};
use crate::{
    driver::{
        RawEvent,
        host::{self, Standing},
    },
    memory::handle::DeviceHandle,
    sync::{Sequence, load_word},
};
use parking_lot::Mutex;
use std::{collections::VecDeque, mem};

/// Operations between two milestones.
const MILESTONE: u64 = 16;
/// Events kept; of more, every second one goes.
const EVENTS: usize = 32;

pub(super) enum Milestones {
    Word {
        word: Word,
        /// Operations that the last write covers. Raised under the lock, which keeps the writes in their order: several
        /// threads may submit to one stream.
        published: Sequence,
        writing: Mutex<()>,
    },
    /// With the number of operations that each covers.
    Events(Mutex<VecDeque<(RawEvent, u64)>>),
}

/// Whether the operation of this number is followed by a milestone.
pub(super) fn is_due(sequence: u64) -> bool {
    sequence.is_multiple_of(MILESTONE)
}

impl Milestones {
    pub(super) fn new(handle: &DeviceHandle) -> Self {
        // In steps there are step_events instead.
        match if handle.stepped { None } else { handle.words.take(handle) } {
            Some(word) => Milestones::Word { word, published: Sequence::new(), writing: Mutex::new(()) },
            None => Milestones::Events(Mutex::default()),
        }
    }

    /// The stream is going.
    pub(super) fn end(&mut self, handle: &DeviceHandle) {
        match self {
            Milestones::Word { word, published, .. } => handle.words.give(*word, published.get()),
            Milestones::Events(events) => {
                events.get_mut().drain(..).for_each(|(event, _)| handle.give_event(event, false));
            }
        }
    }
}

/// What a wait has seen of a stream. Each wait has its own: several threads may wait for one stream.
#[derive(Default)]
pub(super) struct LastSeen {
    completed: u64,
    standing: Standing,
}

impl LastSeen {
    /// Whether the stream has got on since this was last asked: as software GPUs tell, or milestones do.
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
    /// Submits a milestone.
    pub(super) fn set_milestone(&self) {
        match &self.milestones {
            Milestones::Word { word, published, writing } => {
                let guard = writing.lock();
                let covered = self.submitted.get();
                if covered <= published.get() {
                    return;
                }
                // SAFETY: the word is this stream's own, and lives until its last write has arrived.
                let written = unsafe { self.handle.driver.write_value(word.address, word.value(covered), self.raw) };
                if written.is_ok() {
                    published.raise_to(covered);
                }
                drop(guard);
                // Now and then, also if nobody asks: a checker keeps account of what has not been seen.
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

    /// Sees to it that all work submitted so far will tell of its completion: for those who wait for memory.
    #[allow(dead_code, reason = "for the memory pool, when memory is short")]
    pub(crate) fn publish_now(&self) {
        if self.handle.stepped {
            return;
        }
        let told = match &self.milestones {
            Milestones::Word { published, .. } => published.get(),
            Milestones::Events(events) => events.lock().back().map_or(0, |&(_, covered)| covered),
        };
        let submitted = self.submitted.get();
        if submitted > told && self.completed.get() < submitted {
            self.set_milestone();
        }
    }

    /// How many operations are known to have completed, after a look at the word (or the events). To a checker the
    /// calling thread has learned nothing; [`has_completed`](Self::has_completed) is for those who rely on it.
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

    /// Looks at the word, if it may tell that operation `sequence` is over; whether it does. Nothing where there is
    /// none.
    pub(super) fn look(&self, sequence: u64) -> bool {
        let Milestones::Word { word, published, .. } = &self.milestones else { return false };
        // Mostly that can be told without touching a line that the device writes.
        if sequence > published.get() || published.get() <= self.completed.get() {
            return false;
        }
        let value = match self.handle.watch() {
            // SAFETY: the word lives as long as the stream; devices write it atomically.
            Some(watch) => watch.checker.publish_word(watch.device, self.raw, word.address, || unsafe {
                load_word(std::ptr::with_exposed_provenance(word.address as usize))
            }),
            // SAFETY: as above.
            None => unsafe { self.handle.driver.poll_value(word.address) },
        };
        let reached = word.sequence(value);
        self.completed.raise_to(reached);
        reached >= sequence
    }

    /// Takes out the events that the stream has passed.
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
#[path = "milestone_tests.rs"]
mod tests;
