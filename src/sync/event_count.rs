//! Waits for a condition that other threads make true, without lost wake-ups and without a lock around the condition.
//! `README.md` has the protocol and its proof.
//!
//! A notifier makes the condition true with any atomic operation, and *then* calls [`EventCount::notify`]. A waiter
//! gives the condition to [`EventCount::wait_until`], which returns once it holds. It is evaluated without a lock, so
//! it may take locks and may notify. Without a waiter, `notify` costs a fence and a load; the fence is `SeqCst` and
//! comes first, so it also acquires the values that the caller's relaxed operations have read before. A thread with
//! several event counts notifies all of them by [`EventCount::notify_all`], for one fence.
//!
//! A waiter first pauses in doubling rounds, then yields, then blocks. The pauses are skipped on one core, and if there
//! are as many device threads as cores (`shim::spin_rounds`). A waiter may *linger* ([`EventCount::wait_lingering`]):
//! it yields for some time before it blocks, on a core that no other thread wants.

use super::shim::{
    Condvar, Mutex,
    atomic::{AtomicU64, Ordering::*},
    cores, is_crowded, spin_loop, spin_rounds, thread, yield_rounds,
};
use super::site::{fence_at, flag};
use std::time::{Duration, Instant};

const EPOCH: u64 = 1 << 32;
const WAITERS: u64 = EPOCH - 1;
/// A yield that takes this long means that other threads want the core: each further one costs a time slice.
const CROWDED: Duration = Duration::from_micros(500);

/// First make the condition true, then call [`notify`](Self::notify).
// On its own cache lines: its waiter reads it all the time.
#[derive(Debug)]
#[repr(align(128))]
pub struct EventCount {
    word: AtomicU64,
    /// Guards changes of the epoch, so that no change comes between a waiter's last look and its sleep. The value is
    /// one more than the epoch in which the waiter has found the condition false and blocks; 0 if it does not block.
    lock: Mutex<u64>,
    ended: Condvar,
}

impl EventCount {
    /// An event count without waiters.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        EventCount { word: AtomicU64::new(0), lock: Mutex::new(0), ended: Condvar::new() }
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        EventCount { word: AtomicU64::new(0), lock: Mutex::new(0), ended: Condvar::new() }
    }

    /// Makes all waiters evaluate their conditions again. Call it after the condition was made true.
    #[inline]
    pub fn notify(&self) {
        fence_at("event.notify.fence", SeqCst);
        self.wake();
    }

    /// Like [`notify`](Self::notify) for each event count, with one fence.
    #[inline]
    pub fn notify_all<'e>(events: impl IntoIterator<Item = &'e EventCount>) {
        fence_at("event.notify_all.fence", SeqCst);
        events.into_iter().for_each(EventCount::wake);
    }

    /// The caller has made a fence after its change.
    #[inline]
    fn wake(&self) {
        if self.word.load(Relaxed) & WAITERS != 0 {
            self.end_epoch();
        }
    }

    /// A number if the waiter blocks, has found its condition false after its announcement, and has not been notified
    /// since. The number changes with a notification. For an event count with one waiter at a time.
    pub fn asleep(&self) -> Option<u64> {
        let looked = self.lock.lock();
        let epoch = self.word.load(Relaxed) / EPOCH;
        (*looked == epoch + 1).then_some(epoch)
    }

    /// Waits at most `limit` until `cond` returns a value. `None` if the limit came first. `cond` is called at least
    /// once, and a last time before `None` is returned.
    pub fn wait_until<R>(&self, limit: Option<Duration>, cond: impl FnMut() -> Option<R>) -> Option<R> {
        self.wait_lingering(limit, Duration::ZERO, cond)
    }

    /// Like [`wait_until`](Self::wait_until), but a waiter with a core of its own yields for at least `linger` before
    /// it blocks: it sees a change in that time within a microsecond. It blocks earlier if a yield takes long, and does
    /// not linger at all if there are as many device threads as cores.
    pub fn wait_lingering<R>(
        &self,
        limit: Option<Duration>,
        linger: Duration,
        mut cond: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        if let Some(result) = cond() {
            return Some(result);
        }
        // A limit beyond the range of `Instant` is no limit.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        if cores() > 1 {
            for round in 0..spin_rounds() {
                for _ in 0..1 << round {
                    spin_loop();
                }
                if let Some(result) = cond() {
                    return Some(result);
                }
            }
        }
        let since = Instant::now();
        let linger = if is_crowded() { Duration::ZERO } else { linger };
        let mut rounds = yield_rounds();
        loop {
            let start = Instant::now();
            match rounds.checked_sub(1) {
                Some(left) => rounds = left,
                None if start.duration_since(since) >= linger => break,
                None => {}
            }
            if deadline.is_some_and(|deadline| start >= deadline) {
                return None;
            }
            thread::yield_now();
            if let Some(result) = cond() {
                return Some(result);
            }
            if start.elapsed() > CROWDED {
                break;
            }
        }
        self.block_until(deadline, cond)
    }

    #[cold]
    fn block_until<R>(&self, deadline: Option<Instant>, mut cond: impl FnMut() -> Option<R>) -> Option<R> {
        loop {
            let announced = self.announce();
            fence_at("event.wait.fence", SeqCst);
            if !flag("event.wait.no_second_look")
                && let Some(result) = cond()
            {
                return Some(result); // `announced` takes itself back
            }
            let timed_out = announced.sleep(deadline);
            // One more look after the limit: the condition may have become true just before it.
            if let Some(result) = cond() {
                return Some(result);
            }
            if timed_out {
                return None;
            }
        }
    }

    /// Runs `f` as if it were a sleep: meanwhile [`asleep`](Self::asleep) returns a number, until a notification. If
    /// `cond` returns a value before, `f` does not run; else the result is that of `cond` after `f`.
    pub fn while_asleep<R>(&self, mut cond: impl FnMut() -> Option<R>, f: impl FnOnce()) -> Option<R> {
        let announced = self.announce();
        fence_at("event.wait.fence", SeqCst);
        if let Some(result) = cond() {
            return Some(result);
        }
        *self.lock.lock() = announced.epoch + 1;
        let noted = Noted(self);
        f();
        drop((noted, announced));
        cond()
    }

    fn announce(&self) -> Announced<'_> {
        let before = self.word.fetch_add(1, Relaxed);
        debug_assert!(before & WAITERS < WAITERS, "four billion waiters");
        Announced { event: self, epoch: before / EPOCH }
    }

    #[cold]
    fn end_epoch(&self) {
        let guard = (!flag("event.notify.no_lock")).then(|| self.lock.lock());
        let next = |word: u64| (word & WAITERS != 0).then(|| (word & !WAITERS).wrapping_add(EPOCH));
        // Relaxed: the mutex orders this for sleepers, the fences for waiters that announce in the new epoch.
        let ended = self.word.fetch_update(Relaxed, Relaxed, next).is_ok();
        // Unlocked first, so that a woken thread does not wait for the lock that its waker still holds.
        drop(guard);
        if ended {
            if flag("event.notify.one") {
                self.ended.notify_one();
            } else {
                self.ended.notify_all();
            }
        }
    }
}

struct Noted<'a>(&'a EventCount);

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        *self.0.lock.lock() = 0;
    }
}

/// An announced waiter. The drop withdraws the announcement, also if the condition panics.
struct Announced<'a> {
    event: &'a EventCount,
    epoch: u64,
}

impl Announced<'_> {
    /// Blocks until the epoch ends. True if the deadline came first.
    fn sleep(&self, deadline: Option<Instant>) -> bool {
        let event = self.event;
        let mut looked = event.lock.lock();
        *looked = self.epoch + 1;
        let mut timed_out = false;
        // Only while the epoch counts the announcement, a notifier will end the epoch and wake this thread.
        while !timed_out && event.word.load(Relaxed) / EPOCH == self.epoch {
            match deadline {
                None => event.ended.wait(&mut looked),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    timed_out = left.is_zero()
                        || event.ended.wait_for(&mut looked, left).timed_out() && Instant::now() >= deadline;
                }
            }
        }
        *looked = 0;
        timed_out
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        // A notifier that has ended the epoch has already removed the announcement from the count.
        let take_back = |word: u64| (word / EPOCH == self.epoch || flag("event.take_back.always")).then(|| word - 1);
        let _ = self.event.word.fetch_update(Relaxed, Relaxed, take_back);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/unit/sync/event_count_tests.rs"]
mod tests;
