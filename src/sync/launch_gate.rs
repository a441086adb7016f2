//! The launch gate: launches of kernels that spin for peers and driver calls that wait for kernels exclude each other.
//!
//! Without it there is a deadlock: device A's kernel spins for device B's kernel; B's thread cannot launch that kernel,
//! because a third thread is inside `cuMemAlloc` and holds the driver's lock; and `cuMemAlloc` waits until A's kernel
//! ends ([nccl#744](https://github.com/NVIDIA/nccl/issues/744);
//! [torchcomms#2334](https://github.com/meta-pytorch/torchcomms/pull/2334): so does the loading of a kernel at its
//! first launch). So two classes exclude each other in the whole process:
//!
//! * **windows**: from the moment that a gang must launch spinning kernels, to the last of these launches. A window
//!   does not include the run of the kernels: once all are launched, they end by themselves;
//! * **blocking calls**: map, unmap, allocate, free, module load, graph instantiation.
//!
//! Any number of one class may be in progress, of any gangs and pools.
//!
//! `README.md` has the proof, and why the gate needs no deadlines, an announced call does not starve, and a thread
//! inside a call may begin a second one (a module load that maps memory). Windows can starve.
//!
//! The callers keep two promises. Between its arrival at a meeting and its `close`, a member begins no blocking call.
//! Inside a blocking call, no thread arrives at a meeting or waits for a thread that does.

use super::{
    EventCount,
    shim::atomic::{AtomicU64, Ordering::*},
    site::{flag, ord},
};

const BLOCKING: u64 = 1 << 32;
const LAUNCHES: u64 = BLOCKING - 1;

/// `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct LaunchGate {
    word: AtomicU64,
    /// Both classes sleep here. A wake-up for the other class only costs a look at the word.
    changed: EventCount,
}

/// A blocking call in progress; its drop ends the call.
#[derive(Debug)]
#[must_use = "the blocking call ends when it is dropped"]
pub struct Blocking<'a>(&'a LaunchGate);

impl LaunchGate {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        LaunchGate { word: AtomicU64::new(0), changed: EventCount::new() }
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        LaunchGate { word: AtomicU64::new(0), changed: EventCount::new() }
    }

    /// Opens a window: `launches` members will each launch one kernel that spins for the others. Waits while a blocking
    /// call runs or waits. Afterwards everything done inside blocking calls is visible.
    ///
    /// One member calls it, when it commits the collective for all and before any of them launches. The caller must not
    /// be inside a blocking call, because it would wait for itself.
    #[cfg(test)]
    pub fn open(&self, launches: usize) {
        if !self.try_open(launches) {
            self.changed.wait_until(None, || self.try_open(launches).then_some(()));
        }
    }

    /// Like `open`, without a wait. False, and no window, if a blocking call runs or waits.
    #[inline]
    #[must_use = "whether the window is open"]
    pub fn try_open(&self, launches: usize) -> bool {
        let open = |word: u64| {
            debug_assert!((word & LAUNCHES) + (launches as u64) < BLOCKING, "four billion launches");
            let free = word < BLOCKING
                || flag("launch_gate.open.ignores_blocking")
                || flag("launch_gate.open.overtakes") && word & LAUNCHES != 0;
            free.then(|| word + launches as u64)
        };
        self.word.fetch_update(ord("launch_gate.open", Acquire), Relaxed, open).is_ok()
    }

    /// Tells that `launches` members of open windows have launched, or will not launch because their gang has failed.
    ///
    /// Each member calls it after its own launch. A thread that gives up for other members calls it for them.
    #[inline]
    pub fn close(&self, launches: usize) {
        let launches = launches as u64;
        let before = self.word.fetch_sub(launches, ord("launch_gate.close", Release));
        debug_assert!(before & LAUNCHES >= launches, "closed more than was opened");
        if before & LAUNCHES == launches && before >= BLOCKING && !flag("launch_gate.close.silent") {
            self.changed.notify();
        }
    }

    /// Begins a blocking call: waits until no window is open. New windows wait until it ends. Many calls may run at the
    /// same time, also nested calls of one thread. Afterwards everything done inside windows is visible.
    ///
    /// A member must not call it between arrival at a meeting and its [`close`](Self::close): it would wait for itself.
    pub fn block(&self) -> Blocking<'_> {
        if flag("launch_gate.block.looks_before_adding") {
            self.wait_closed();
            self.word.fetch_add(BLOCKING, ord("launch_gate.block", Acquire));
            return Blocking(self);
        }
        let before = self.word.fetch_add(BLOCKING, ord("launch_gate.block", Acquire));
        debug_assert!(before < u64::MAX - BLOCKING, "blocking calls are forgotten by the billion");
        // From here the call is counted; the drop removes it, also if the wait unwinds.
        let blocking = Blocking(self);
        if before & LAUNCHES != 0 || flag("launch_gate.block.waits_for_others") {
            self.wait_closed();
        }
        blocking
    }

    #[cfg(test)]
    pub fn is_blocked(&self) -> bool {
        self.word.load(Relaxed) >= BLOCKING
    }

    #[cold]
    fn wait_closed(&self) {
        self.changed.wait_until(None, || {
            let word = self.word.load(ord("launch_gate.wait", Acquire));
            let others = flag("launch_gate.block.waits_for_others") && word >= 2 * BLOCKING;
            (word & LAUNCHES == 0 && !others).then_some(())
        });
    }
}

impl Drop for Blocking<'_> {
    fn drop(&mut self) {
        let before = self.0.word.fetch_sub(BLOCKING, ord("launch_gate.unblock", Release));
        if before < 2 * BLOCKING && !flag("launch_gate.unblock.silent") {
            self.0.changed.notify();
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/sync/launch_gate_tests.rs"]
mod tests;
