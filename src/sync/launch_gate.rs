//! Kernels that spin for each other against driver calls that wait for kernels: never both at once.
//!
//! Device A's kernel runs and spins for device B's. B's thread cannot launch it, because a third thread is inside
//! `cuMemAlloc` and holds the driver's lock; and `cuMemAlloc` waits until A's kernel ends. In one process with a thread
//! per GPU nothing but a time-out gets out of that ([nccl#744](https://github.com/NVIDIA/nccl/issues/744): cudaMalloc
//! and cudaFree wait for the device and its peers;
//! [torchcomms#2334](https://github.com/meta-pytorch/torchcomms/pull/2334): so does the loading of a kernel at its
//! first launch). So, over the whole process, two classes exclude each other:
//!
//! * **windows**: from the moment that a gang is bound to launch kernels that spin, to the last of these launches. Not
//!   to the end of the kernels: once all are launched, they end by themselves;
//! * **blocking calls**: map, unmap, allocate, free, module load, graph instantiation.
//!
//! Any number of either class may be in progress, of any gangs and pools.
//!
//! ```text
//!   word = blocking calls (running or waiting) << 32 | launches that open windows still lack
//!
//!   open(n):  if no blocking calls: + n, by compare-and-swap; else wait     close(n): - n
//!   block():  + (1 << 32), then wait until no launch is lacking             drop:     - (1 << 32)
//! ```
//!
//! # Who waits for whom
//!
//! A blocking call announces itself *before* it waits, and an announced one stops new windows, so collectives back to
//! back cannot keep it waiting: the launches that lack only become fewer. Here a blocking call never waits for another
//! (once inside, who loads a module that another thread is loading waits for that). Thus a thread that is inside one
//! may begin a second (a module load that maps memory): no window has opened since, none will, and it goes straight
//! through.
//!
//! There are no deadlines here, since nobody can wait for himself, even round a corner:
//!
//! * `block` waits for launches of members that have met. Such a member is past its last blocking call and has nothing
//!   left to wait for on the host; its launch needs the driver's lock, which no blocking call holds as long as the
//!   window is open.
//! * `open` waits for blocking calls. These wait for kernels that run, and of those that spin all peers are launched:
//!   their windows were closed when the call was let in. It waits for no thread outside of blocking calls, since one
//!   that is inside makes the call and nothing else.
//!
//! It takes two promises of the callers: between its arrival at a meeting and its `close` a member begins no blocking
//! call, and nobody arrives at a meeting (or waits for a thread that does) inside a blocking call.
//!
//! Windows have no such promise: blocking calls that overlap, or follow each other so closely that a sleeping opener
//! misses the gap, keep them waiting as long as they go on. To hold a call back while others run would be wrong for the
//! nested one.

use super::{
    EventCount,
    shim::atomic::{AtomicU64, Ordering::*},
    site::{flag, ord},
};

const BLOCKING: u64 = 1 << 32;
const LAUNCHES: u64 = BLOCKING - 1;

/// Keeps kernels that spin and driver calls that wait for kernels apart, in the whole process.
/// `src/sync/README.md` has the protocol.
#[derive(Debug)]
pub struct LaunchGate {
    word: AtomicU64,
    /// Both classes sleep here: a wake-up that was meant for the other one costs a look at the word.
    changed: EventCount,
}

/// A blocking call in progress; dropping it ends it.
#[derive(Debug)]
#[must_use = "the blocking call ends when it is dropped"]
pub struct Blocking<'a>(&'a LaunchGate);

impl Default for LaunchGate {
    fn default() -> Self {
        Self::new()
    }
}

impl LaunchGate {
    /// No windows, no blocking calls.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        LaunchGate { word: AtomicU64::new(0), changed: EventCount::new() }
    }

    /// No windows, no blocking calls. Not `const`, since loom's atomics are not.
    #[cfg(loom)]
    pub fn new() -> Self {
        LaunchGate { word: AtomicU64::new(0), changed: EventCount::new() }
    }

    /// A window opens: `launches` members will each launch one kernel that spins for the others. Waits while a blocking
    /// call runs or waits. Afterwards all that was done inside blocking calls is visible.
    ///
    /// For the one member that commits the collective for all, before any of them launches. The caller must not be
    /// inside a blocking call: he would wait for himself.
    #[cfg(test)]
    pub fn open(&self, launches: usize) {
        if !self.try_open(launches) {
            self.changed.wait_until(None, || self.try_open(launches).then_some(()));
        }
    }

    /// As [`open`](Self::open) without waiting: false, and no window, if a blocking call runs or waits.
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

    /// `launches` of the members of open windows have launched, or will not, since their gang has failed.
    ///
    /// Each member calls it for itself, after its launch; who gives up for others counts them.
    #[inline]
    pub fn close(&self, launches: usize) {
        let launches = launches as u64;
        let before = self.word.fetch_sub(launches, ord("launch_gate.close", Release));
        debug_assert!(before & LAUNCHES >= launches, "closed more than was opened");
        if before & LAUNCHES == launches && before >= BLOCKING && !flag("launch_gate.close.silent") {
            self.changed.notify();
        }
    }

    /// A blocking call begins: waits until no window is open; new windows wait meanwhile. Many may run at once, also
    /// several of one thread inside each other. Afterwards all that was done inside windows is visible.
    ///
    /// Not for a member between its arrival at a meeting and its [`close`](Self::close): he would wait for himself.
    pub fn block(&self) -> Blocking<'_> {
        if flag("launch_gate.block.looks_before_adding") {
            self.wait_closed();
            self.word.fetch_add(BLOCKING, ord("launch_gate.block", Acquire));
            return Blocking(self);
        }
        let before = self.word.fetch_add(BLOCKING, ord("launch_gate.block", Acquire));
        debug_assert!(before < u64::MAX - BLOCKING, "blocking calls are forgotten by the billion");
        // From here it is counted, and its drop takes it back also if the wait unwinds.
        let blocking = Blocking(self);
        if before & LAUNCHES != 0 || flag("launch_gate.block.waits_for_others") {
            self.wait_closed();
        }
        blocking
    }

    /// Whether a blocking call runs or waits, so that a window could not open now. May be outdated when it returns.
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
#[path = "launch_gate_tests.rs"]
mod tests;
