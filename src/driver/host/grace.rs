//! Programs that do not come to rest: how long a step waits for them.

use crate::stall::StallTimer;
use std::time::{Duration, Instant};

/// How long ready work waits for a program that does not come to rest: one that blocks where nobody can see,
const GRACE: Duration = Duration::from_millis(50);
/// (looked at so often),
const PACE: Duration = Duration::from_millis(2);
/// and one that computes, or that a loaded machine keeps from running.
const WORK_GRACE: Duration = Duration::from_secs(1);

/// There is work that could be stepped, but the program does not come to rest.
pub(super) struct GraceTimer {
    /// How long it may take.
    work: StallTimer,
    /// The count, which has not changed since.
    pub submissions: u64,
    looked: Instant,
    /// Since when no look has found a thread of it at work. One look is not enough: a thread that wants the machine's
    /// lock in order to submit something is found asleep by whoever looks, since he has the lock.
    still: Option<StallTimer>,
}

impl GraceTimer {
    pub fn new(now: Instant, submissions: u64) -> Self {
        GraceTimer { work: StallTimer::starting(WORK_GRACE, now), submissions, looked: now, still: None }
    }

    /// Whether its time is over.
    pub fn is_over(&mut self, now: Instant, works: impl FnOnce() -> bool) -> bool {
        if self.work.look(now) {
            return true;
        }
        if now - self.looked < PACE {
            return false;
        }
        self.looked = now;
        if works() {
            self.still = None;
            return false;
        }
        self.still.get_or_insert_with(|| StallTimer::starting(GRACE, now)).look(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time is an argument, so that a loaded machine does not matter.
    #[test]
    fn a_program_is_blocked_only_if_look_after_look_says_so() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut grace = GraceTimer::new(start, 7);
        // Once every 20 ms it is seen at work.
        for ms in 1..900 {
            assert!(!grace.is_over(at(ms), || ms % 20 == 0), "{ms}");
        }
        assert!(grace.is_over(at(1000), || true), "it computes for too long");
        let mut grace = GraceTimer::new(start, 7);
        let over = (1..).find(|&ms| grace.is_over(at(ms), || false));
        assert!((50..=60).contains(&over.unwrap()), "{over:?}");
        assert!(!grace.is_over(at(70), || true), "it has come back to work");
        // Stopped for a minute: nobody had time to come to rest.
        let mut grace = GraceTimer::new(start, 7);
        assert!(![2, 60_000, 60_002].iter().any(|&ms| grace.is_over(at(ms), || false)));
    }
}
