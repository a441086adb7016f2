//! The grace period of a step: how long a stepped machine with ready work waits for a program that does not become
//! quiescent. Used by `step`.

use crate::stall::StallTimer;
use std::time::{Duration, Instant};

/// Grace period of a program whose threads all sleep, some of them in calls that the machine does not see.
const GRACE: Duration = Duration::from_millis(50);
/// Time between two looks at the program's threads.
const PACE: Duration = Duration::from_millis(2);
/// Grace period of a program that computes, or that waits for a core of a busy computer.
const WORK_GRACE: Duration = Duration::from_secs(1);

/// Runs while there is ready work and the program is not quiescent.
pub(super) struct GraceTimer {
    /// Ends [`WORK_GRACE`].
    work: StallTimer,
    /// The machine's count of submissions when the timer started; a new submission starts a new timer.
    pub submissions: u64,
    looked: Instant,
    /// Ends [`GRACE`]; runs since the last look that found a running thread. One look is not enough: the looking thread
    /// holds the machine's lock, so a thread that waits for this lock in order to submit looks asleep.
    still: Option<StallTimer>,
}

impl GraceTimer {
    pub fn new(now: Instant, submissions: u64) -> Self {
        GraceTimer { work: StallTimer::starting(WORK_GRACE, now), submissions, looked: now, still: None }
    }

    /// Whether the grace period is over. `works`: whether a thread of the program is seen to run.
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

    /// Time is an argument, so the test does not depend on the load of the computer.
    #[test]
    fn a_program_is_blocked_only_if_look_after_look_says_so() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut grace = GraceTimer::new(start, 7);
        // The program is seen at work once every 20 ms.
        for ms in 1..900 {
            assert!(!grace.is_over(at(ms), || ms % 20 == 0), "{ms}");
        }
        assert!(grace.is_over(at(1000), || true), "it computes for too long");
        let mut grace = GraceTimer::new(start, 7);
        let over = (1..).find(|&ms| grace.is_over(at(ms), || false));
        assert!((50..=60).contains(&over.unwrap()), "{over:?}");
        assert!(!grace.is_over(at(70), || true), "it has come back to work");
        // The process was stopped for a minute: no thread had time to block.
        let mut grace = GraceTimer::new(start, 7);
        assert!(![2, 60_000, 60_002].iter().any(|&ms| grace.is_over(at(ms), || false)));
    }
}
