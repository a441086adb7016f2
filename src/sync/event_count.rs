//! Waiting for a condition that other threads make true, without a lost wake-up and without a lock around the
//! condition.
//!
//! # Contract
//!
//! Who makes the condition true does so with any atomic operation, *then* calls [`EventCount::notify`]. Who waits gives
//! the condition to [`EventCount::wait_until`], which returns once it holds. The condition is evaluated without a lock
//! held, so it may take locks and may notify. `notify` costs a fence and a load when nobody waits; the fence is
//! `SeqCst` and comes first, so it also acquires what the caller's relaxed operations read before. Who makes the
//! conditions of several event counts true notifies all of them at the end by [`EventCount::notify_all`], for one
//! fence: a fence waits until all that was written before has left the core, and nothing that is read after it begins
//! earlier.
//!
//! # Mechanism
//!
//! One word counts the *announced* waiters and numbers the *epochs*; a mutex and a condition variable block.
//!
//! ```text
//!   word = epoch << 32 | announced waiters of this epoch
//!
//!   waiter                                          notifier
//!   ------                                          --------
//!   announce: waiters + 1, remember the epoch       make the condition true
//!   fence(SeqCst)                               X   fence(SeqCst)
//!   look at the condition                           look at the word: no waiters => done
//!   lock; while the epoch is the remembered one:    lock; epoch + 1, waiters = 0; unlock
//!       wait on the condition variable              notify_all
//! ```
//!
//! The two fences are Dekker's: either the notifier sees the announcement, or the waiter sees the condition; it cannot
//! be neither. A notifier that sees it ends the epoch *under the lock*, so the waiter either finds the epoch ended or
//! is inside the condition variable when the wake-up comes. Since ending an epoch takes all its waiters off the count,
//! a second `notify` before the woken threads have run finds nobody and costs nothing; that matters when each of N
//! threads notifies N others. The word is [folly's
//! `EventCount`](https://github.com/facebook/folly/blob/main/folly/synchronization/EventCount.h), the spirit rayon's
//! [`sleep`](https://github.com/rayon-rs/rayon/blob/main/rayon-core/src/sleep/README.md).
//!
//! # Who asks whether it sleeps
//!
//! A waiter that is about to block, having looked in vain after its announcement, notes the epoch under the mutex, and
//! takes the note back when it goes on. [`EventCount::asleep`] compares the note with the word, under the mutex too: as
//! long as they agree nobody has ended the epoch since that look. With one waiter at a time that is exact; it is what a
//! software GPU needs to know before it takes the next step of a program that must not depend on how fast threads are.
//!
//! # Before blocking
//!
//! A waiter first pauses in doubling rounds (skipped on one core, where nobody could make progress meanwhile, and where
//! there are as many device threads as cores, see `shim::spin_rounds`), then yields, then blocks. On a loaded 2-core
//! machine a fixed spin of 2000 pauses made a dispatch to 4 threads take 170 us where 6 rounds and 32 yields take 14,
//! and blocking at once takes 50 where the threads are awake anyway.
//!
//! Being woken takes long where a core has to be woken too: two GPUs' threads that had gone to sleep for a peer that
//! was 1 ms late had the sum of 64 KB 47 us after it came, and take 16 for one when awake. So one may *linger*
//! ([`EventCount::wait_lingering`]): go on yielding for so long, on a core that nobody else wants.

use super::{
    shim::{
        Condvar, Mutex,
        atomic::{AtomicU64, Ordering::*},
        cores, is_crowded, spin_loop, spin_rounds, thread, yield_rounds,
    },
    site::{fence_at, flag},
};
use std::time::{Duration, Instant};

const EPOCH: u64 = 1 << 32;
const WAITERS: u64 = EPOCH - 1;
/// After a yield that took this long others want the core, and who yields again pays a slice of theirs each time.
const CROWDED: Duration = Duration::from_micros(500);

/// `src/sync/README.md` has the protocol.
///
/// ```
/// use gpu_pool::sync::EventCount;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// let (ready, event) = (AtomicBool::new(false), EventCount::new());
/// std::thread::scope(|s| {
///     s.spawn(|| event.wait_until(None, || ready.load(Ordering::Acquire).then_some(())));
///     ready.store(true, Ordering::Release); // first the condition,
///     event.notify(); // then the call
/// });
/// ```
// On cache lines of its own: its waiter looks at it all the time.
#[derive(Debug)]
#[repr(align(128))]
pub struct EventCount {
    word: AtomicU64,
    /// Guards changes of the epoch, so that none falls between a waiter's last look at it and its sleep. Holds one more
    /// than the epoch in which the waiter has looked in vain and blocks; 0 when it does not.
    lock: Mutex<u64>,
    ended: Condvar,
}

impl Default for EventCount {
    fn default() -> Self {
        Self::new()
    }
}

impl EventCount {
    /// One that nobody waits on.
    ///
    /// ```
    /// gpu_pool::sync::EventCount::new().notify(); // wakes nobody
    /// ```
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        EventCount { word: AtomicU64::new(0), lock: Mutex::new(0), ended: Condvar::new() }
    }

    /// One that nobody waits on. Not `const`, since loom's types are not.
    #[cfg(loom)]
    pub fn new() -> Self {
        EventCount { word: AtomicU64::new(0), lock: Mutex::new(0), ended: Condvar::new() }
    }

    /// Lets everyone who waits look at his condition again. To be called after the condition was made true.
    ///
    /// ```
    /// let event = gpu_pool::sync::EventCount::new();
    /// let shared = std::sync::atomic::AtomicU32::new(7);
    /// shared.fetch_add(1, std::sync::atomic::Ordering::Release);
    /// event.notify();
    /// ```
    #[inline]
    pub fn notify(&self) {
        fence_at("event.notify.fence", SeqCst);
        self.wake();
    }

    /// As [`notify`](Self::notify) of each, for one fence. To be called after the conditions of all of them were made
    /// true.
    ///
    /// ```
    /// use gpu_pool::sync::EventCount;
    /// let events = [EventCount::new(), EventCount::new()];
    /// EventCount::notify_all(&events); // wakes nobody
    /// ```
    #[inline]
    pub fn notify_all<'e>(events: impl IntoIterator<Item = &'e EventCount>) {
        fence_at("event.notify_all.fence", SeqCst);
        events.into_iter().for_each(EventCount::wake);
    }

    /// Ends the epoch if anybody waits. After a fence that is after the change.
    #[inline]
    fn wake(&self) {
        if self.word.load(Relaxed) & WAITERS != 0 {
            self.end_epoch();
        }
    }

    /// Whether the waiter blocks, has found nothing since it announced itself, and has not been notified since: then a
    /// number that is another one once it was notified. For an event count with one waiter at a time.
    ///
    /// ```
    /// let event = gpu_pool::sync::EventCount::new();
    /// assert_eq!(event.asleep(), None); // nobody waits
    /// ```
    pub fn asleep(&self) -> Option<u64> {
        let looked = self.lock.lock();
        let epoch = self.word.load(Relaxed) / EPOCH;
        (*looked == epoch + 1).then_some(epoch)
    }

    /// Waits until `cond` yields something, at most `limit`. `None` when the time ran out; without a limit never.
    ///
    /// `cond` is called at least once, also with a limit of zero, and is the last thing called before `None`.
    ///
    /// ```
    /// use std::time::Duration;
    /// let event = gpu_pool::sync::EventCount::new();
    /// assert_eq!(event.wait_until(None, || Some(5)), Some(5));
    /// assert_eq!(event.wait_until(Some(Duration::from_millis(1)), || None::<u8>), None);
    /// ```
    pub fn wait_until<R>(&self, limit: Option<Duration>, cond: impl FnMut() -> Option<R>) -> Option<R> {
        self.wait_lingering(limit, Duration::ZERO, cond)
    }

    /// As [`wait_until`](Self::wait_until), but a waiter that has a core to itself yields for at least `linger` before
    /// it blocks: what comes in that time is met within a microsecond. It blocks earlier as soon as a yield takes long,
    /// and does not linger at all where there are as many device threads as cores.
    ///
    /// ```
    /// use std::time::Duration;
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// let (event, found) = (gpu_pool::sync::EventCount::new(), AtomicU32::new(0));
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| {
    ///         found.store(20, Ordering::Release);
    ///         event.notify(); // it may be asleep by now
    ///     });
    ///     let look = || Some(found.load(Ordering::Acquire)).filter(|found| *found > 0);
    ///     assert_eq!(event.wait_lingering(None, Duration::from_millis(2), look), Some(20));
    /// });
    /// ```
    pub fn wait_lingering<R>(
        &self,
        limit: Option<Duration>,
        linger: Duration,
        mut cond: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        if let Some(result) = cond() {
            return Some(result);
        }
        // A limit beyond the end of time is none.
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
            // A look of its own after the time ran out: the wake-up may have come too late to be seen as one.
            if let Some(result) = cond() {
                return Some(result);
            }
            if timed_out {
                return None;
            }
        }
    }

    /// Runs `f` as if it were a sleep: [`asleep`](Self::asleep) holds meanwhile, and ends with a notification. Not if
    /// `cond` yields something before; else what it yields after.
    ///
    /// ```
    /// let event = gpu_pool::sync::EventCount::new();
    /// let looked = event.while_asleep(|| None::<u8>, || {
    ///     assert!(event.asleep().is_some());
    ///     event.notify();
    ///     assert!(event.asleep().is_none());
    /// });
    /// assert_eq!(looked, None);
    /// ```
    pub fn while_asleep<R>(&self, mut cond: impl FnMut() -> Option<R>, f: impl FnOnce()) -> Option<R> {
        let announced = self.announce();
        fence_at("event.wait.fence", SeqCst);
        if let Some(result) = cond() {
            return Some(result);
        }
        *self.lock.lock() = announced.epoch + 1;
        // Taken back also when `f` panics.
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
        // Relaxed: the mutex orders this for sleepers, the fences for those who announce themselves in the new epoch.
        let ended = self.word.fetch_update(Relaxed, Relaxed, next).is_ok();
        // Unlocked first: a woken thread does not run into the lock that its waker still holds.
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

/// A note under the mutex. Dropping it takes it back.
struct Noted<'a>(&'a EventCount);

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        *self.0.lock.lock() = 0;
    }
}

/// A waiter that notifiers can see. Dropping it takes the announcement back, also when the condition panics.
struct Announced<'a> {
    event: &'a EventCount,
    epoch: u64,
}

impl Announced<'_> {
    /// Blocks until the epoch ends. Whether the time ran out first.
    fn sleep(&self, deadline: Option<Instant>) -> bool {
        let event = self.event;
        let mut looked = event.lock.lock();
        *looked = self.epoch + 1;
        let mut timed_out = false;
        // In the epoch that the announcement is counted in, and only in it, a notifier is bound to end it.
        while !timed_out && event.word.load(Relaxed) / EPOCH == self.epoch {
            match deadline {
                None => event.ended.wait(&mut looked),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    timed_out = left.is_zero() || event.ended.wait_for(&mut looked, left) && Instant::now() >= deadline;
                }
            }
        }
        *looked = 0;
        timed_out
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        // A notifier that has ended the epoch has taken the announcement off the count already.
        let take_back = |word: u64| (word / EPOCH == self.epoch || flag("event.take_back.always")).then(|| word - 1);
        let _ = self.event.word.fetch_update(Relaxed, Relaxed, take_back);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "event_count_tests.rs"]
mod tests;
