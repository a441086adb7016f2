//! The grace period of `step`: how long a machine with ready work waits for a program that does not become quiescent.

use crate::stall::StallTimer;
use std::time::{Duration, Instant};

/// For a program whose threads all sleep, some of them in calls that the machine does not see.
const GRACE: Duration = Duration::from_millis(50);
const PACE: Duration = Duration::from_millis(2);
/// For a program that computes, or that waits for a core of a busy computer.
const WORK_GRACE: Duration = Duration::from_secs(1);

/// Runs while there is ready work and the program is not quiescent.
pub(super) struct GraceTimer {
    work: StallTimer,
    /// A new submission starts a new timer.
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

    /// `works`: whether a thread of the program is seen to run.
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
#[path = "../../../tests/unit/driver/host/grace_tests.rs"]
mod tests;
