//! Deadlocks: all threads and streams wait, and nothing runs that could end a wait.
//!
//! A waiting thread looks for one ([`State::find_deadlock`]): no operation runs, no head operation of a stream can run,
//! every attendee is blocked, and no thread that waits in the driver could return. A false report is worse than a late
//! one, so this state must last for [`CONFIRM`]; or for [`WORDS`] if a stream waits for a word or its kernel spins,
//! since the application might write the word without a call. Slow work, and a thread that blocks in a call that the
//! library does not see, are never reported. A misuse that was found in a kernel, and that no wait has returned, is
//! reported instead: it is the cause.
//!
//! Threads that wait in the driver get the report. The streams that they wait for, directly or not, are given up: their
//! operations never run, and the report is their fault until a wait for the whole stream has returned it. A thread of
//! the application counts only if its call has waited for [`WORDS`]. If no thread waits in the driver, the attendees
//! that wait for each other get the report.

use super::{
    Core, Key, Progress, Work, fault,
    machine::State,
    quiescence::{Attendee, Wait},
};
use crate::{
    driver::{Fault, FaultKind},
    error::op_site::OpSite,
};
use std::{
    fmt::Write,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long nothing may move before a deadlock among device threads is reported.
const CONFIRM: Duration = Duration::from_millis(30);
/// [`CONFIRM`] if a stream waits for a word in memory.
const WORDS: Duration = Duration::from_secs(1);
const PACE: Duration = Duration::from_millis(4);
/// The longest time between two looks that find all threads blocked. A wait that looks at the clock is not blocked for
/// a moment, which is long on a busy computer; progress would show in [`Suspicion::seen`].
const GAP: Duration = Duration::from_millis(200);

pub(super) struct Suspicion {
    since: Instant,
    looked: Instant,
    blocked: Instant,
    seen: Vec<u64>,
}

impl State {
    /// If it is certain, gives up streams, or tells attendees.
    pub fn find_deadlock(&mut self) {
        if self.suspicion.as_ref().is_some_and(|s| s.looked.elapsed() < PACE) {
            return;
        }
        if self.crew.retrying > 0 && self.crew.retrying == self.crew.performing {
            // A kernel that spins is tried again now and then. That is neither progress nor a blocked state.
            return;
        }
        if self.crew.performing > 0 || self.core.can_go_on() {
            self.suspicion = None;
            return;
        }
        let attendees = self.threads.attendees();
        let seen: Vec<u64> = [self.core.submissions, self.core.completions]
            .into_iter()
            .chain(attendees.iter().map(|attendee| attendee.progress()))
            .collect();
        let blocked = self.threads.all_blocked(&attendees) && !self.threads.someone_returns(&self.core);
        let now = Instant::now();
        match &mut self.suspicion {
            Some(suspicion) if suspicion.seen == seen && now - suspicion.blocked <= GAP => {
                suspicion.looked = now;
                if !blocked {
                    return;
                }
                suspicion.blocked = now;
                let stall = if self.core.awaits_words() { WORDS } else { CONFIRM };
                let since = suspicion.since;
                if now - since >= stall && self.resolve(&attendees, since) {
                    self.suspicion = None;
                }
            }
            other => *other = blocked.then_some(Suspicion { since: now, looked: now, blocked: now, seen }),
        }
    }

    /// False if no thread could be told.
    fn resolve(&mut self, attendees: &[Arc<dyn Attendee>], since: Instant) -> bool {
        let threads: Vec<_> = attendees.iter().filter_map(|attendee| attendee.thread()).collect();
        let counts = |wait: &&Wait| threads.contains(&wait.thread) || wait.since.max(since).elapsed() >= WORDS;
        let waits: Vec<&Wait> = self.threads.waits.iter().filter(counts).collect();
        let meeting: Vec<(&Arc<dyn Attendee>, String)> = attendees
            .iter()
            .filter(|attendee| self.threads.waiting(attendee.thread()).is_none())
            .filter_map(|attendee| attendee.waits_for().map(|what| (attendee, what)))
            .collect();
        if waits.is_empty() && meeting.is_empty() {
            return false;
        }
        let mut stuck: Vec<Key> = waits.iter().map(|wait| wait.stream).collect();
        self.core.close_over(&mut stuck);
        let mut report = String::from("nothing runs, and everyone waits:");
        for wait in &waits {
            let _ = write!(report, "\n  a host thread waits for {}", self.core.name(wait.stream));
            at(&mut report, wait.place);
        }
        for (_, what) in &meeting {
            let _ = write!(report, "\n  {what}");
        }
        // Also streams that no host thread waits for: other streams may wait for them.
        let mut all = stuck.clone();
        all.extend(self.core.streams.keys().into_iter().filter(|key| !stuck.contains(key)));
        for key in all {
            self.core.describe(key, &mut report);
        }
        if waits.is_empty() {
            for (attendee, _) in meeting {
                attendee.deadlocked(&report);
            }
        } else {
            // A misuse that no wait has returned yet: its kernel ended early, so others wait for what it has not done.
            let fault = self.core.misuse().unwrap_or_else(|| fault::deadlock(&report));
            for key in stuck {
                self.core.forsake(key, fault.clone());
            }
        }
        true
    }
}

fn at(report: &mut String, place: Option<OpSite>) {
    if let Some(place) = place {
        let _ = write!(report, ", in {} at {}", place.op, place.site);
    }
}

impl Core {
    fn misuse(&self) -> Option<Fault> {
        let harm = |key: &Key| self.streams.get(*key)?.harm.as_ref();
        let faults = |key: &Key| harm(key).map(|harm| harm.fault.clone());
        self.streams.keys().iter().filter_map(faults).find(|fault| fault.kind == FaultKind::Misuse)
    }

    /// A thread of the application might write it without a call.
    fn awaits_words(&self) -> bool {
        let head = |key: &Key| self.streams.get(*key).and_then(|stream| stream.queue.front()).map(|op| &op.work);
        self.streams.keys().iter().any(|key| matches!(head(key), Some(work) if !matches!(work, Work::WaitEvent(_))))
    }

    fn close_over(&self, keys: &mut Vec<Key>) {
        let mut i = 0;
        while let Some(&key) = keys.get(i) {
            let head = self.streams.get(key).and_then(|stream| stream.queue.front());
            if let Some(Work::WaitEvent(record)) = head.map(|op| &op.work)
                && !keys.contains(&record.stream)
            {
                keys.push(record.stream);
            }
            i += 1;
        }
        keys.sort_unstable();
        keys.dedup();
    }

    fn name(&self, key: Key) -> String {
        self.streams.get(key).map_or("a stream that is gone".to_owned(), |stream| {
            format!("stream {} of device {}", stream.number, stream.device)
        })
    }

    fn describe(&self, key: Key, report: &mut String) {
        let Some((stream, op)) = self.streams.get(key).and_then(|s| s.queue.front().map(|op| (s, op))) else { return };
        let _ = write!(report, "\n  {} waits ", self.name(key));
        let _ = match op.work {
            Work::WaitEvent(record) if matches!(self.progress(record), Progress::Pending) => {
                let done = self.streams.get(record.stream).map_or(record.seq, |awaited| awaited.completed);
                let behind = self.name(record.stream);
                write!(report, "for operation {} of {behind}, which has completed {done}", record.seq)
            }
            Work::WaitValue { address, value } => match self.flag(address, false) {
                Ok(Some(flag)) => {
                    write!(report, "until the word at {address:#x} is at least {value}; it is {}", flag.load())
                }
                _ => write!(report, "until the word at {address:#x} is at least {value}"),
            },
            Work::Kernel { name, .. } => write!(report, "for its kernel `{name}`, which spins and does not finish"),
            _ => write!(report, "for its turn"),
        };
        at(report, op.place);
        let after = stream.queue.len() - 1;
        if after > 0 {
            let _ = write!(report, " ({after} more behind it)");
        }
    }
}
