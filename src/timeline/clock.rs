//! A device's clock against the host's: an event whose time the host knows, renewed every second.
//!
//! The distance of two events is a single-precision number of milliseconds on CUDA, and the clocks drift: so the event
//! must not be old. Invariant: an event is measured from one that was recorded before it.

use super::timed::Timed;
use crate::driver::{DriverResult, RawEvent, RawStream};
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

const RENEWED: Duration = Duration::from_secs(1);
/// How often the host looks at the clock: the fastest look counts.
const LOOKS: usize = 5;
const LIMIT: Duration = Duration::from_millis(20);

pub(super) struct Clock {
    stream: RawStream,
    /// Events, and the host's times when they were recorded.
    zeros: VecDeque<(RawEvent, u64)>,
    renewed: Instant,
}

impl Clock {
    pub fn new(timed: &Timed) -> DriverResult<Clock> {
        let stream = timed.driver().stream_create(0)?;
        let mut clock = Clock { stream, zeros: VecDeque::new(), renewed: Instant::now() };
        clock.zeros.extend(clock.look(timed));
        Ok(clock)
    }

    /// The best of some looks.
    fn look(&self, timed: &Timed) -> Option<(RawEvent, u64)> {
        let driver = timed.driver();
        let mut best: Option<(RawEvent, u64, u64)> = None;
        for _ in 0..LOOKS {
            let event = timed.take_event()?;
            let before = timed.lane.now();
            let done = driver.event_record(event, self.stream).is_ok() && driver.event_wait(event, LIMIT) == Ok(true);
            let took = timed.lane.now() - before;
            if done && best.is_none_or(|(.., shortest)| took < shortest) {
                timed.give_events(best.map(|(event, ..)| event));
                best = Some((event, before + took / 2, took));
            } else {
                timed.give_events([event]);
            }
        }
        best.map(|(event, time, _)| (event, time))
    }

    /// Measures anew if it is time. Returns how far the old measurement is off by now, in nanoseconds. `oldest` is the
    /// time of the oldest work whose time will be asked for.
    pub fn renew(&mut self, timed: &Timed, oldest: u64) -> Option<i128> {
        if self.renewed.elapsed() < RENEWED {
            return None;
        }
        self.renewed = Instant::now();
        let (event, now) = self.look(timed)?;
        let drift = self.zeros.back().and_then(|&(zero, then)| {
            let elapsed = timed.driver().event_elapsed(zero, event).ok()?;
            Some(i128::from(now) - i128::from(then) - elapsed.as_nanos() as i128)
        });
        self.zeros.push_back((event, now));
        while self.zeros.get(1).is_some_and(|(_, time)| *time <= oldest) {
            timed.give_events(self.zeros.pop_front().map(|(event, _)| event));
        }
        drift
    }

    /// The host's time at which a complete event was reached. `submitted`: the host's time before its record.
    pub fn time(&self, timed: &Timed, event: RawEvent, submitted: u64) -> Option<u64> {
        let before = |(_, time): &&(RawEvent, u64)| *time <= submitted;
        let (zero, time) = self.zeros.iter().rev().find(before).or(self.zeros.front())?;
        let elapsed = timed.driver().event_elapsed(*zero, event).ok()?;
        Some(time + elapsed.as_nanos() as u64)
    }

    pub fn end(self, timed: &Timed) {
        timed.give_events(self.zeros.into_iter().map(|(event, _)| event));
        // SAFETY: the stream is of this device, and nothing else uses it. Its work is over, or its driver keeps it.
        let _ = unsafe { timed.driver().stream_destroy(self.stream) };
    }
}
