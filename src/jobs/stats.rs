//! The statistics of a queue of jobs: counts, shares of time, spans.

use super::{Packet, placement::Waits};
use crate::timeline::{Category, Running};
use crate::{Error, contain::contain, error::op_site::OpSite, thread::worker::Worker};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// Jobs that are over, of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Jobs that have ended well.
    pub done: u64,
    /// Jobs that have failed or were cancelled.
    pub failed: u64,
}

pub(super) type OnProgress = dyn Fn(Progress) + Send + Sync;

/// The state of a queue of jobs, from [`Jobs::stats`](super::Jobs::stats).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobStats {
    /// Jobs that have not begun.
    pub queued: usize,
    /// Jobs that have begun and are not over.
    pub running: usize,
    /// Jobs that have ended well.
    pub done: u64,
    /// Jobs that have failed.
    pub failed: u64,
    /// Jobs that were cancelled, or could not begin before the queue was closed.
    pub cancelled: u64,
    /// Jobs that have begun again after a failure.
    pub retried: u64,
    /// Jobs that were given to a device that was lost before they had begun.
    pub moved: u64,
    /// Why the first job of the queue does not begin.
    pub waits: Option<Waits>,
    /// The devices, in order.
    pub devices: Vec<DeviceJobs>,
}

/// A device's part in [`JobStats`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceJobs {
    /// Jobs in flight.
    pub running: usize,
    /// Jobs that are over.
    pub ended: u64,
    /// Booked bytes.
    pub booked: u64,
    /// Most bytes that can be booked.
    pub limit: u64,
    /// The share of the time since the queue was built in which the device had a job.
    pub busy: f64,
    /// Whether the device was lost.
    pub lost: bool,
}

impl fmt::Display for JobStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JobStats { queued, running, done, failed, cancelled, retried, moved, waits, devices } = self;
        write!(f, "jobs: {queued} queued, {running} running, {done} done, {failed} failed, {cancelled} cancelled")?;
        write!(f, ", {retried} retried, {moved} moved")?;
        if let Some(waits) = waits {
            write!(
                f,
                "; the first one waits for {}",
                match waits {
                    Waits::Device => "a device",
                    Waits::Memory => "memory",
                    Waits::Gang => "several devices",
                }
            )?;
        }
        for (device, DeviceJobs { running, ended, booked, limit, busy, lost }) in devices.iter().enumerate() {
            let lost = if *lost { ", LOST" } else { "" };
            let busy = 100.0 * busy;
            write!(f, "\n  device {device}: {running} running, {ended} over, busy {busy:.0} %")?;
            write!(f, ", {booked} of {limit} bytes booked{lost}")?;
        }
        Ok(())
    }
}

pub(super) struct Meter {
    built: Instant,
    devices: Vec<Busy>,
    done: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub retried: u64,
    pub moved: u64,
}

#[derive(Clone, Default)]
struct Busy {
    flying: usize,
    since: Option<Instant>,
    total: Duration,
    ended: u64,
}

impl Meter {
    pub fn new(devices: usize) -> Self {
        let devices = vec![Busy::default(); devices];
        Meter { built: Instant::now(), devices, done: 0, failed: 0, cancelled: 0, retried: 0, moved: 0 }
    }

    pub fn began(&mut self, devices: &[usize]) {
        for &device in devices {
            let busy = &mut self.devices[device];
            busy.flying += 1;
            busy.since.get_or_insert_with(Instant::now);
        }
    }

    /// A job has left these devices; `over` if it had begun.
    pub fn ended(&mut self, devices: &[usize], over: bool) {
        for &device in devices {
            let busy = &mut self.devices[device];
            busy.flying -= 1;
            busy.ended += u64::from(over);
            if busy.flying == 0
                && let Some(since) = busy.since.take()
            {
                busy.total += since.elapsed();
            }
        }
    }

    pub fn count(&mut self, how: &crate::Result<()>) {
        match how {
            Ok(()) => self.done += 1,
            Err(Error::Cancelled { .. } | Error::Closed) => self.cancelled += 1,
            Err(_) => self.failed += 1,
        }
    }

    /// Jobs that are over, and jobs that have begun again.
    pub fn ever(&self) -> u64 {
        self.done + self.failed + self.cancelled + self.retried
    }

    pub fn progress(&self) -> Progress {
        Progress { done: self.done, failed: self.failed + self.cancelled }
    }
}

impl super::state::State {
    pub(super) fn stats(&self) -> JobStats {
        let meter = &self.meter;
        let all = meter.built.elapsed().as_secs_f64().max(1e-9);
        let device = |(device, busy): (usize, &Busy)| {
            let (booked, limit) = self.table.memory(device);
            let now = busy.since.map_or(Duration::ZERO, |since| since.elapsed());
            DeviceJobs {
                running: self.table.flying(device),
                ended: busy.ended,
                booked,
                limit,
                busy: ((busy.total + now).as_secs_f64() / all).min(1.0),
                lost: self.table.is_lost(device),
            }
        };
        JobStats {
            queued: self.table.len(),
            running: self.begun(),
            done: meter.done,
            failed: meter.failed,
            cancelled: meter.cancelled,
            retried: meter.retried,
            moved: meter.moved,
            waits: self.table.why(),
            devices: meter.devices.iter().enumerate().map(device).collect(),
        }
    }
}

/// The slice of a job's closure in the timeline.
pub(super) fn slice<'w>(worker: &'w Worker, job: &Packet) -> Running<'w> {
    let slice = worker.handle.lane.slice(Category::Job, "job", Some(OpSite { op: "submit", site: job.site }));
    slice.note(|slice| slice.label = Some(job.name().into()))
}

/// Runs a job's closure in its span. A subscriber that panics does not stop it.
pub(super) fn in_span<R>(job: &Packet, seq: u64, device: usize, f: impl FnOnce() -> R) -> R {
    let (mut span, mut entered, name) = (tracing::Span::none(), None, job.name());
    if crate::log::has_subscriber() {
        contain(|| span = tracing::info_span!("gpu_pool.job", name, job = seq, device));
    }
    contain(|| entered = Some(span.enter()));
    let result = f();
    contain(|| drop(entered));
    contain(|| drop(span));
    result
}
