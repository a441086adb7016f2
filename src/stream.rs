//! Streams: queues of device work, numbered so that anyone can say what he waits for.

use crate::{
    driver::{RawEvent, RawStream},
    error::{Error, Result},
    memory::link::Link,
    sync::{Sequence, unique_id},
};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    marker::PhantomData,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

/// A stream with the count of operations submitted to it and known to be complete.
///
/// The number of an operation is taken *after* it was submitted. So who reads the counter and then records an event has
/// captured at least all operations up to the number read.
pub(crate) struct StreamCore {
    pub(crate) link: Arc<Link>,
    pub(crate) raw: RawStream,
    /// Unique in the process.
    pub(crate) id: u64,
    submitted: Sequence,
    completed: Sequence,
    /// For other streams (by id): up to which of their operations this stream already waits.
    known: Mutex<SmallVec<[(u64, u64); 8]>>,
}

impl StreamCore {
    pub(crate) fn new(link: &Arc<Link>, op: &'static str) -> Result<Arc<Self>> {
        let raw = link.check(op, link.driver.stream_create(0))?;
        Ok(Arc::new(StreamCore {
            link: link.clone(),
            raw,
            id: unique_id(),
            submitted: Sequence::new(),
            completed: Sequence::new(),
            known: Mutex::default(),
        }))
    }

    /// Numbers an operation that was just submitted.
    pub(crate) fn submit(&self) -> u64 {
        self.submitted.fetch_advance()
    }

    /// Operations submitted so far.
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted.get()
    }

    /// Whether operation `sequence` is known to have completed, without asking the driver.
    pub(crate) fn has_completed(&self, sequence: u64) -> bool {
        self.completed.get() >= sequence
    }

    /// Records a fresh event; returns it with the number of operations that it covers.
    pub(crate) fn record(&self, op: &'static str, timing: bool) -> Result<(RawEvent, u64)> {
        let event = self.link.check(op, self.link.take_event(timing))?;
        let covered = self.submitted.get();
        if let Err(fault) = self.link.driver.event_record(event, self.raw) {
            self.link.give_event(event, timing);
            return Err(self.link.error(op, fault));
        }
        Ok((event, covered))
    }

    /// All later work of this stream waits for an event that covers `other` up to `covered`.
    pub(crate) fn wait_event(&self, op: &'static str, event: RawEvent, other: &StreamCore, covered: u64) -> Result<()> {
        if let Err(fault) = self.link.driver.stream_wait_event(self.raw, event) {
            // The event of a lost device reports that device's loss, which must not be taken for this one's.
            let own = other.link.device == self.link.device || self.link.driver.stream_query(self.raw).is_err();
            return Err(if own { &self.link } else { &other.link }.error(op, fault));
        }
        let mut known = self.known.lock();
        match known.iter_mut().find(|(id, _)| *id == other.id) {
            Some((_, upto)) => *upto = covered.max(*upto),
            None => {
                if known.len() >= 64 {
                    known.remove(0);
                }
                known.push((other.id, covered));
            }
        }
        Ok(())
    }

    /// All later work of this stream waits, on the device, for operation `sequence` of `other`. Records the event only
    /// now, and only when the wait is not implied already: most blocks are never shared, so most events never exist.
    ///
    /// Recording late captures more than asked for (everything `other` has by now). That cannot deadlock: every wait
    /// refers to work submitted before it, so the waits have no cycle; and kernels that spin for peers are launched only
    /// after all of the gang have met.
    pub(crate) fn wait_for(&self, op: &'static str, other: &StreamCore, sequence: u64) -> Result<()> {
        if self.id == other.id || other.has_completed(sequence) || self.knows(other, sequence) {
            return Ok(());
        }
        let (event, covered) = other.record(op, false)?;
        let waited = self.wait_event(op, event, other, covered);
        // A wait captures the record, so the event may be recorded anew at once.
        other.link.give_event(event, false);
        waited
    }

    fn knows(&self, other: &StreamCore, sequence: u64) -> bool {
        self.known.lock().iter().any(|&(id, upto)| id == other.id && upto >= sequence)
    }

    /// The calling host thread waits for all work submitted so far; gives up when nothing completes for `limit`, or when
    /// `stop` says so (asked every few milliseconds).
    pub(crate) fn wait_idle(&self, op: &'static str, limit: Duration, stop: impl Fn() -> bool) -> Result<()> {
        let covered = self.submitted.get();
        if self.completed.get() >= covered {
            return Ok(());
        }
        let start = Instant::now();
        loop {
            if self.link.check(op, self.link.driver.stream_wait_idle(self.raw, Duration::from_millis(20)))? {
                self.completed.raise_to(covered);
                return Ok(());
            }
            if start.elapsed() >= limit || stop() {
                return Err(Error::Timeout { device: self.link.device, op, waited: start.elapsed(), missing: vec![] });
            }
        }
    }

    /// The calling host thread waits until operation `sequence` has completed.
    pub(crate) fn wait_host(&self, op: &'static str, sequence: u64, limit: Duration) -> Result<()> {
        if self.has_completed(sequence) {
            return Ok(());
        }
        let (event, covered) = self.record(op, false)?;
        let done = self.link.driver.event_wait(event, limit);
        self.link.give_event(event, false);
        if self.link.check(op, done)? {
            self.completed.raise_to(covered);
            return Ok(());
        }
        Err(Error::Timeout { device: self.link.device, op, waited: limit, missing: vec![] })
    }
}

impl Drop for StreamCore {
    fn drop(&mut self) {
        // SAFETY: the last reference is going, so nobody submits to the stream any more.
        let _ = unsafe { self.link.driver.stream_destroy(self.raw) };
    }
}

/// A further stream of a device, from [`Device::stream`](crate::Device::stream); used through
/// [`Device::on`](crate::Device::on).
///
/// It cannot leave its device's thread, so `dev.on(&stream)` cannot meet a stream of another device:
///
/// ```compile_fail,E0277
/// # use gpu_pool::GpuPool;
/// let pool = GpuPool::builder().host(1).build().unwrap();
/// pool.run(|dev, _| {
///     let s = dev.stream()?;
///     std::thread::spawn(move || drop(s)); // `Stream` is not `Send`
///     Ok(())
/// }).unwrap();
/// ```
pub struct Stream {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) stays: PhantomData<Rc<()>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("device", &self.core.link.device).field("id", &self.core.id).finish()
    }
}
