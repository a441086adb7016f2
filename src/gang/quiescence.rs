//! Quiescence: whether each thread of a pool is blocked, and why.
//!
//! Software GPUs ask it ([`Attendee`]). A device thread is blocked when it waits in the driver (the software GPUs see
//! that themselves), when it sleeps on its waker ([`EventCount::asleep`]), and within [`Quiescence::while_blocked`].

use super::GpuOrder;
use crate::{
    contain::Finally,
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

pub(crate) struct Quiescence {
    waker: shim::Arc<EventCount>,
    gpu_order: Arc<GpuOrder>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    thread: Option<ThreadId>,
    /// The file in which Linux reports the thread's state.
    stat: Option<PathBuf>,
    ended: bool,
    holds: Option<Box<dyn Fn() -> bool + Send>>,
    /// A description of the thread's wait for a peer, if the thread has waited for a while.
    waits_for: Option<String>,
    deadlock: Option<String>,
}

impl Quiescence {
    pub(crate) fn new(waker: shim::Arc<EventCount>, gpu_order: Arc<GpuOrder>) -> Arc<Self> {
        Arc::new(Quiescence { waker, gpu_order, state: Mutex::default() })
    }

    /// The calling thread is this one, until the guard is dropped.
    pub(crate) fn register(self: &Arc<Self>) -> Finally<impl FnMut() + use<>> {
        let mut state = self.state.lock();
        state.thread = Some(thread::current().id());
        let task = fs::read_link("/proc/thread-self").ok();
        state.stat = task.map(|task| Path::new("/proc").join(task).join("stat"));
        drop(state);
        let ended = self.clone();
        Finally(move || ended.state.lock().ended = true)
    }

    /// Runs `wait`, which blocks exactly as long as `holds` returns true. The thread counts as blocked so long.
    pub(crate) fn while_blocked(&self, holds: impl Fn() -> bool + Send + 'static, wait: impl FnOnce()) {
        self.state.lock().holds = Some(Box::new(holds));
        wait();
        self.state.lock().holds = None;
    }

    /// Notes until the guard is dropped that the thread waits for a peer on its waker; `what` is for a report.
    pub(crate) fn wait_for_peer(&self, what: String) -> PeerWait<'_> {
        let mut state = self.state.lock();
        state.waits_for = Some(what);
        state.deadlock = None;
        PeerWait(self)
    }
}

pub(crate) struct PeerWait<'a>(&'a Quiescence);

impl PeerWait<'_> {
    pub(crate) fn deadlock(&self) -> Option<String> {
        self.0.state.lock().deadlock.take()
    }
}

impl Drop for PeerWait<'_> {
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
        (state.ended || holds).then_some(u64::MAX).or_else(|| self.waker.asleep())
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

/// Scopes that are entering the queues. Meanwhile the pool is not quiescent, also if no thread has seen the entry.
#[derive(Default)]
pub(crate) struct EnteringScopes(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    now: usize,
    ever: u64,
}

impl EnteringScopes {
    pub(crate) fn enter(&self) -> Finally<impl FnMut()> {
        let mut entering = self.0.lock();
        entering.now += 1;
        entering.ever += 1;
        Finally(|| self.0.lock().now -= 1)
    }
}

impl Attendee for EnteringScopes {
    fn blocked(&self) -> Option<u64> {
        let entering = self.0.lock();
        (entering.now == 0).then_some(entering.ever)
    }

    fn progress(&self) -> u64 {
        self.0.lock().ever
    }
}
