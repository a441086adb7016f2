//! Deadlines that measure missing progress, not time: a stopped process (debugger, `SIGSTOP`, paused virtual machine)
//! does not expire them.
//!
//! By the clock alone, all deadlines of a stopped process would have passed when it continues, although its peers could
//! not run either. So a wait looks at the clock from time to time, and the time between two looks counts as at most a
//! quarter of the deadline.
//!
//! Invariant: a deadline passes only after [`LOOKS`] looks without progress.

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
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The time at which a deadline of 100 ms passes, if the looks are at these times.
    fn over(looks: impl IntoIterator<Item = u32>) -> Option<u32> {
        let start = Instant::now();
        let mut stall = StallTimer::starting(100 * MS, start);
        looks.into_iter().find(|&at| stall.look(start + at * MS))
    }

    #[test]
    fn who_looks_often_goes_by_the_clock() {
        assert_eq!(over(0..1000), Some(100));
        assert_eq!(over((0..1000).step_by(10)), Some(100));
        assert_eq!(over((0..1000).step_by(25)), Some(100));
    }

    #[test]
    fn time_in_which_nobody_looked_counts_a_quarter_at_most() {
        // The process is stopped for an hour at 20 ms: when it continues, 20 + 25 ms are counted.
        assert_eq!(over((0..3).map(|i| 10 * i).chain((0..100).map(|i| 3_600_000 + 10 * i))), Some(3_600_060));
    }

    #[test]
    fn four_looks_are_enough_however_long_they_take() {
        assert_eq!(over([1000, 2000, 3000]), None);
        assert_eq!(over([1000, 2000, 3000, 4000]), Some(4000));
        // A limit that is not a multiple of four needs neither more nor fewer looks.
        let start = Instant::now();
        let mut stall = StallTimer::starting(Duration::from_nanos(103), start);
        assert_eq!([1, 2, 3, 4].map(|s| stall.look(start + s * 1000 * MS)), [false, false, false, true]);
    }

    #[test]
    fn no_deadline_passes_at_once_and_an_endless_one_never() {
        assert!(StallTimer::new(Duration::ZERO).is_over());
        let start = Instant::now();
        let mut endless = StallTimer::starting(Duration::MAX, start);
        assert!(!(1..1000).any(|day| endless.look(start + Duration::from_secs(86_400) * day)));
    }

    #[test]
    fn it_starts_anew_when_somebody_gets_on() {
        let began = Instant::now();
        let mut stall = StallTimer::starting(100 * MS, began);
        let look = |stall: &mut StallTimer| stall.look(stall.looked + 30 * MS);
        assert!((0..3).all(|_| !look(&mut stall)));
        stall.renew();
        assert!(stall.since > began, "from then on is what an error tells");
        assert_eq!((1..9).find(|_| look(&mut stall)), Some(4));
    }

    #[test]
    fn short_deadlines_are_looked_at_in_time() {
        assert_eq!(StallTimer::new(120_000 * MS).tick(500 * MS), 500 * MS);
        assert_eq!(StallTimer::new(200 * MS).tick(500 * MS), 50 * MS);
    }
}
