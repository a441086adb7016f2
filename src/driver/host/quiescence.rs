//! Who takes part: the host threads whose rest a step or a deadlock report waits for.
//!
//! A *step* must not depend on how fast host threads are. So it is taken only when the program is **quiescent**: every
//! attendee is blocked, and every thread that waits here still has to wait. Then nothing can be submitted before
//! something completes. A pool makes its device threads attend ([`attend`]), and whoever is just starting a scope. All
//! of it is looked at twice under the machine's lock: who was blocked at both looks, with the same number, was so in
//! between, and so they all were at one moment.
//!
//! Threads of the application are not seen. A machine without attendees takes steps while any thread waits for it, or
//! has asked in vain whether something is complete.

use super::{gpu::HostGpu, sched::Core, slab::Key};
use crate::driver::{Driver, check::OpSite};
use std::{
    sync::{Arc, Weak},
    thread::ThreadId,
    time::Instant,
};

/// A host thread (or several) whose rest steps wait for.
pub trait Attendee: Send + Sync {
    /// The thread, by which the machine finds its waits in the driver.
    fn thread(&self) -> Option<ThreadId>;

    /// Whether it waits outside the driver, and only others can end that, and it has nothing new to look at: then a
    /// number that is another one once it has gone on.
    fn blocked(&self) -> Option<u64>;

    /// Whether it has a core or waits for one, as far as the operating system tells; `false` where that is not known.
    fn is_running(&self) -> bool;

    /// For whom it waits outside the driver, if it has work; for reports of deadlocks.
    fn waits_for(&self) -> Option<String>;

    /// Grows whenever the thread begins something new.
    fn progress(&self) -> u64;

    /// The wait that [`waits_for`](Self::waits_for) described will never end.
    fn deadlocked(&self, report: &str);
}

/// Makes the steps of `device`'s machine wait for the attendee, as long as it lives. Nothing for other devices than
/// software GPUs.
pub fn attend(device: &dyn Driver, attendee: &Arc<dyn Attendee>) {
    if let Some(gpu) = device.as_any().downcast_ref::<HostGpu>() {
        gpu.lock().threads.attendees.push(Arc::downgrade(attendee));
    }
}

/// A thread of the host that waits for a stream.
pub(super) struct Wait {
    pub thread: ThreadId,
    pub stream: Key,
    pub seq: u64,
    pub since: Instant,
    pub place: Option<OpSite>,
    number: u64,
}

/// What a machine knows of host threads.
#[derive(Default)]
pub(super) struct HostThreads {
    attendees: Vec<Weak<dyn Attendee>>,
    pub waits: Vec<Wait>,
    /// Waits so far.
    numbers: u64,
    /// Threads that have asked in vain whether something is complete, and may go on asking.
    polls: Vec<ThreadId>,
}

impl HostThreads {
    /// A thread begins to wait; the number is for [`leave`](Self::leave).
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

    /// A thread has asked in vain: one step may be taken as if it waited.
    pub fn polls(&mut self, thread: ThreadId) {
        if !self.polls.contains(&thread) {
            self.polls.push(thread);
        }
    }

    /// A thread does something else.
    pub fn acts(&mut self, thread: ThreadId) {
        self.polls.retain(|polling| *polling != thread);
    }

    /// A step has been taken.
    pub fn stepped(&mut self) {
        self.polls.clear();
    }

    /// The attendees that live.
    pub fn attendees(&mut self) -> Vec<Arc<dyn Attendee>> {
        let mut alive = Vec::with_capacity(self.attendees.len());
        self.attendees.retain(|attendee| attendee.upgrade().map(|attendee| alive.push(attendee)).is_some());
        alive
    }

    /// Whether a thread that waits here need not wait any longer, but has not come back yet.
    pub fn someone_returns(&self, core: &Core) -> bool {
        self.waits.iter().any(|wait| core.has_passed(wait.stream, wait.seq))
    }

    /// Whether nobody can do anything before something completes.
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

    /// Whether an attendee that is not blocked is at work, rather than blocked where nobody can see.
    pub fn someone_works(&mut self) -> bool {
        let attendees = self.attendees();
        let blocked = |a: &Arc<dyn Attendee>| self.waiting(a.thread()).is_some() || a.blocked().is_some();
        attendees.iter().any(|attendee| !blocked(attendee) && attendee.is_running())
    }

    /// Whether all of these are blocked, for a deadlock: polls do not count.
    pub fn all_blocked(&self, attendees: &[Arc<dyn Attendee>]) -> bool {
        let stamp = |a: &Arc<dyn Attendee>| self.waiting(a.thread()).or_else(|| a.blocked());
        let look = || attendees.iter().map(stamp).collect::<Option<Vec<u64>>>();
        let first = look();
        first.is_some() && first == look()
    }

    /// For each attendee a number that is another one once it has gone on; `None` when one is not blocked.
    fn stamps(&self, attendees: &[Arc<dyn Attendee>]) -> Option<Vec<u64>> {
        let stamp = |attendee: &Arc<dyn Attendee>| {
            let thread = attendee.thread();
            let polls = thread.is_some_and(|thread| self.polls.contains(&thread));
            self.waiting(thread).or_else(|| polls.then_some(0)).or_else(|| attendee.blocked())
        };
        attendees.iter().map(stamp).collect()
    }

    /// The number of the thread's wait in the driver.
    pub fn waiting(&self, thread: Option<ThreadId>) -> Option<u64> {
        let thread = thread?;
        self.waits.iter().find(|wait| wait.thread == thread).map(|wait| wait.number)
    }
}
