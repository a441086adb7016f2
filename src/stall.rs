//! Deadlines that measure missing progress, not time: a stopped process (debugger, `SIGSTOP`, paused virtual machine)
//! does not expire them. A wait looks at the clock from time to time, and the time between two looks counts as at most
//! a quarter of the deadline. Invariant: a deadline passes only after [`LOOKS`] looks without progress.

use std::time::{Duration, Instant};

/// The fewest looks before a deadline passes.
const LOOKS: u32 = 4;

/// The deadline of one wait; it restarts after progress.
pub struct StallTimer {
    limit: Duration,
    since: Instant,
    looked: Instant,
    /// The part of the time from `since` to `looked` that counts.
    counted: Duration,
}

impl StallTimer {
    /// It ends after so long without progress.
    pub fn new(limit: Duration) -> Self {
        Self::starting(limit, Instant::now())
    }

    /// [`new`](Self::new) with an explicit current time, for tests.
    pub fn starting(limit: Duration, now: Instant) -> Self {
        StallTimer { limit, since: now, looked: now, counted: Duration::ZERO }
    }

    /// How long to sleep between two looks: `at_most`, or less if `LOOKS` such sleeps would exceed the deadline.
    pub fn tick(&self, at_most: Duration) -> Duration {
        at_most.min(self.limit / LOOKS)
    }

    /// Restarts the deadline after progress.
    pub fn renew(&mut self) {
        *self = StallTimer::new(self.limit);
    }

    /// A look without progress. True if the deadline has passed.
    pub fn is_over(&mut self) -> bool {
        self.look(Instant::now())
    }

    /// [`is_over`](Self::is_over) with an explicit current time.
    pub fn look(&mut self, now: Instant) -> bool {
        self.counted += now.saturating_duration_since(self.looked).min(self.limit / LOOKS);
        self.looked = now;
        self.counted >= self.limit / LOOKS * LOOKS
    }

    /// Time without progress, by the clock.
    pub fn waited(&self) -> Duration {
        self.since.elapsed()
    }
}

#[cfg(test)]
#[path = "../tests/unit/stall_tests.rs"]
mod tests;
