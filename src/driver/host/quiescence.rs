//! Quiescence: whether every host thread of a program is blocked, so that only the machine can make progress.
//!
//! Steps (`machine::steps`) and deadlock reports ask for it. A pool registers its device threads and the threads that
//! start its scopes as *attendees* ([`attend`](super::attend)). A machine without attendees takes steps while any
//! thread waits in the driver or has polled something that is not complete.
//!
//! Invariant: a step does not depend on the speed of host threads: it is taken only if every attendee is blocked and
//! every thread in the driver still has to wait. The threads are looked at twice. One that was blocked with one number
//! at both looks was blocked in between, so all of them were blocked at one moment.

use super::{Core, Key};
use crate::error::op_site::OpSite;
use std::{
    sync::{Arc, Weak},
    thread::ThreadId,
    time::Instant,
};

/// A host thread (or several) that must be blocked before a stepped machine takes a step.
pub trait Attendee: Send + Sync {
    /// The thread; the machine uses it to find the thread's waits in the driver.
    fn thread(&self) -> Option<ThreadId> {
        None
    }

    /// A number if the thread waits outside the driver, only other threads can end the wait, and there is nothing new
    /// for it to look at. The number changes when the thread continues.
    fn blocked(&self) -> Option<u64>;

    /// Whether the operating system reports the thread as running or runnable; `false` if that is not known.
    fn is_running(&self) -> bool {
        true
    }

    /// The peers that the thread waits for outside the driver, if it has work; for deadlock reports.
    fn waits_for(&self) -> Option<String> {
        None
    }

    /// A counter that grows whenever the thread begins something new.
    fn progress(&self) -> u64;

    /// Called when the wait that [`waits_for`](Self::waits_for) has described will never end.
    fn deadlocked(&self, _report: &str) {}
}

pub(super) struct Wait {
    pub thread: ThreadId,
    pub stream: Key,
    pub seq: u64,
    pub since: Instant,
    pub place: Option<OpSite>,
    number: u64,
}

#[derive(Default)]
pub(super) struct HostThreads {
    attendees: Vec<Weak<dyn Attendee>>,
    pub waits: Vec<Wait>,
    numbers: u64,
    /// Threads whose last call was a poll with the answer "not complete".
    polls: Vec<ThreadId>,
}

impl HostThreads {
    pub fn attend(&mut self, attendee: &Arc<dyn Attendee>) {
        // Those of calls that are over.
        self.attendees.retain(|attendee| attendee.strong_count() > 0);
        self.attendees.push(Arc::downgrade(attendee));
    }

    /// Returns the number for [`leave`](Self::leave).
    pub fn enter(&mut self, thread: ThreadId, stream: Key, seq: u64) -> u64 {
        self.acts(thread);
        self.numbers += 1;
        let number = self.numbers;
        self.waits.push(Wait { thread, stream, seq, since: Instant::now(), place: OpSite::current(), number });
        number
    }

    pub fn leave(&mut self, number: u64) {
        self.waits.retain(|wait| wait.number != number);
    }

    /// The next step treats the thread as a waiting one.
    pub fn polls(&mut self, thread: ThreadId) {
        if !self.polls.contains(&thread) {
            self.polls.push(thread);
        }
    }

    pub fn acts(&mut self, thread: ThreadId) {
        self.polls.retain(|polling| *polling != thread);
    }

    pub fn stepped(&mut self) {
        self.polls.clear();
    }

    pub fn attendees(&mut self) -> Vec<Arc<dyn Attendee>> {
        let mut alive = Vec::with_capacity(self.attendees.len());
        self.attendees.retain(|attendee| attendee.upgrade().map(|attendee| alive.push(attendee)).is_some());
        alive
    }

    pub fn someone_returns(&self, core: &Core) -> bool {
        self.waits.iter().any(|wait| core.has_passed(wait.stream, wait.seq))
    }

    /// Whether all host threads are blocked until something completes.
    pub fn is_quiet(&mut self, core: &Core) -> bool {
        if self.someone_returns(core) {
            return false;
        }
        let attendees = self.attendees();
        if attendees.is_empty() {
            return !self.waits.is_empty() || !self.polls.is_empty();
        }
        let first = self.stamps(&attendees);
        first.is_some() && first == self.stamps(&attendees)
    }

    pub fn someone_works(&mut self) -> bool {
        let attendees = self.attendees();
        let blocked = |a: &Arc<dyn Attendee>| self.waiting(a.thread()).is_some() || a.blocked().is_some();
        attendees.iter().any(|attendee| !blocked(attendee) && attendee.is_running())
    }

    /// A thread that polls is not blocked.
    pub fn all_blocked(&self, attendees: &[Arc<dyn Attendee>]) -> bool {
        let stamp = |a: &Arc<dyn Attendee>| self.waiting(a.thread()).or_else(|| a.blocked());
        let look = || attendees.iter().map(stamp).collect::<Option<Vec<u64>>>();
        let first = look();
        first.is_some() && first == look()
    }

    /// Each changes when the attendee continues; `None` if any attendee is not blocked.
    fn stamps(&self, attendees: &[Arc<dyn Attendee>]) -> Option<Vec<u64>> {
        let stamp = |attendee: &Arc<dyn Attendee>| {
            let thread = attendee.thread();
            let polls = thread.is_some_and(|thread| self.polls.contains(&thread));
            self.waiting(thread).or_else(|| polls.then_some(0)).or_else(|| attendee.blocked())
        };
        attendees.iter().map(stamp).collect()
    }

    pub fn waiting(&self, thread: Option<ThreadId>) -> Option<u64> {
        let thread = thread?;
        self.waits.iter().find(|wait| wait.thread == thread).map(|wait| wait.number)
    }
}
