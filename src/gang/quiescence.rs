//! What the threads of a pool are waiting for, as far as others need to know.
//!
//! Software GPUs that run one operation at a time take a step only when every device thread is blocked ([`Attendee`]),
//! and a deadlock is certain only then. A device thread is blocked when it waits in the driver (which the machine sees
//! itself), sleeps on its waker ([`EventCount::asleep`]: its queue, its peers), or in [`Quiescence::while_so`].

use super::gpu_order::GpuOrder;
use crate::{
    driver::host::Attendee,
    sync::{EventCount, shim},
};
use parking_lot::Mutex;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, ThreadId},
};

/// What one device thread is doing.
pub(crate) struct Quiescence {
    waker: shim::Arc<EventCount>,
    gpu_order: Arc<GpuOrder>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    thread: Option<ThreadId>,
    /// Where Linux tells what the thread does.
    stat: Option<PathBuf>,
    /// The thread has ended, or will never begin.
    over: bool,
    /// The thread waits for as long as this holds.
    holds: Option<Box<dyn Fn() -> bool + Send>>,
    /// For whom the thread waits, once it has waited for a while.
    waits_for: Option<String>,
    /// The report that such a wait will never end.
    deadlock: Option<String>,
}

impl Quiescence {
    /// Of a thread that is about to start.
    pub(crate) fn new(waker: shim::Arc<EventCount>, gpu_order: Arc<GpuOrder>) -> Arc<Self> {
        Arc::new(Quiescence { waker, gpu_order, state: Mutex::default() })
    }

    /// The calling thread is the one; until the guard goes.
    pub(crate) fn begin(self: &Arc<Self>) -> Present {
        let mut state = self.state.lock();
        state.thread = Some(thread::current().id());
        let task = fs::read_link("/proc/thread-self").ok();
        state.stat = task.map(|task| Path::new("/proc").join(task).join("stat"));
        drop(state);
        Present(self.clone())
    }

    /// Runs `wait`, which blocks exactly as long as `holds`; others see it so.
    pub(crate) fn while_so(&self, holds: impl Fn() -> bool + Send + 'static, wait: impl FnOnce()) {
        self.state.lock().holds = Some(Box::new(holds));
        wait();
        self.state.lock().holds = None;
    }

    /// The thread waits for a peer, on its waker; until the guard goes. `what` says so in a report.
    pub(crate) fn meeting(&self, what: String) -> Meeting<'_> {
        let mut state = self.state.lock();
        state.waits_for = Some(what);
        state.deadlock = None;
        Meeting(self)
    }
}

/// Ends a thread's presence.
pub(crate) struct Present(Arc<Quiescence>);

impl Drop for Present {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
    }
}

/// A wait for a peer that takes its time.
pub(crate) struct Meeting<'a>(&'a Quiescence);

impl Meeting<'_> {
    /// The report, if this wait has been found to have no end.
    pub(crate) fn deadlock(&self) -> Option<String> {
        self.0.state.lock().deadlock.take()
    }
}

impl Drop for Meeting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waits_for = None;
    }
}

impl Attendee for Quiescence {
    fn thread(&self) -> Option<ThreadId> {
        self.state.lock().thread
    }

    fn blocked(&self) -> Option<u64> {
        let state = self.state.lock();
        let holds = state.holds.as_ref().is_some_and(|holds| holds());
        (state.over || holds).then_some(u64::MAX).or_else(|| self.waker.asleep())
    }

    fn is_running(&self) -> bool {
        let Some(stat) = self.state.lock().stat.clone() else { return false };
        // "tid (name) state ...", and the name may hold anything.
        let text = fs::read_to_string(stat).unwrap_or_default();
        let state = text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        matches!(state, Some('R' | 'D'))
    }

    fn waits_for(&self) -> Option<String> {
        self.state.lock().waits_for.clone()
    }

    fn progress(&self) -> u64 {
        self.gpu_order.progress.own()
    }

    fn deadlocked(&self, report: &str) {
        self.state.lock().deadlock = Some(report.to_owned());
    }
}

/// Where scopes enter: while one does, device threads that have not heard of it yet must not count as idle.
#[derive(Default)]
pub(crate) struct Door(Mutex<Entering>);

#[derive(Default)]
struct Entering {
    now: usize,
    ever: u64,
}

impl Door {
    /// A scope enters, until the guard goes.
    pub(crate) fn enter(&self) -> Through<'_> {
        let mut entering = self.0.lock();
        entering.now += 1;
        entering.ever += 1;
        Through(self)
    }
}

/// A scope that is entering.
pub(crate) struct Through<'a>(&'a Door);

impl Drop for Through<'_> {
    fn drop(&mut self) {
        self.0.0.lock().now -= 1;
    }
}

impl Attendee for Door {
    fn thread(&self) -> Option<ThreadId> {
        None
    }

    fn blocked(&self) -> Option<u64> {
        let entering = self.0.lock();
        (entering.now == 0).then_some(entering.ever)
    }

    fn is_running(&self) -> bool {
        true
    }

    fn waits_for(&self) -> Option<String> {
        None
    }

    fn progress(&self) -> u64 {
        self.0.lock().ever
    }

    fn deadlocked(&self, _report: &str) {}
}
