//! Events: an event's record is a position in a stream.
//!
//! A record stores how many operations have been submitted to its stream; its work is complete once that many have
//! completed. So it costs the stream nothing. A wait copies the record, so a later re-record does not change it.

use super::{Key, Time, fault};
use crate::driver::{DriverResult, Fault, RECORDED_BEFORE};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub device: usize,
    pub stream: Key,
    pub number: usize,
    pub seq: u64,
}

pub(super) struct Event {
    pub device: usize,
    pub timing: bool,
    pub record: Option<Record>,
    pub stamp: Option<Stamp>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Stamp {
    Real(Instant),
    Virtual(Time),
}

impl Stamp {
    pub fn since(self, start: Stamp) -> DriverResult<Duration> {
        let since = match (start, self) {
            (Stamp::Virtual(start), Stamp::Virtual(end)) if start.max(end) == Time::MAX => {
                let days = Time::MAX / 1_000_000_000_000 / 86_400;
                return Err(fault::invalid(format!(
                    "virtual time has passed its end, {days} days after its beginning"
                )));
            }
            (Stamp::Virtual(start), Stamp::Virtual(end)) => end.checked_sub(start).map(duration),
            (Stamp::Real(start), Stamp::Real(end)) => end.checked_duration_since(start),
            // A machine's time is either real or virtual.
            _ => None,
        };
        since.ok_or_else(|| fault::invalid(RECORDED_BEFORE))
    }
}

pub(super) fn duration(time: Time) -> Duration {
    Duration::from_nanos(time / 1000)
}

pub(super) fn time(duration: Duration) -> Time {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

pub(super) enum Progress {
    Pending,
    Done,
    /// It will never complete: the device was lost, or the stream's work was given up.
    Failed(Fault),
}
