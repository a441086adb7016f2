//! Streams: queues of device work. Each operation has a number, so that a wait can name the operation that it needs.
//!
//! Users see [`Stream`]. Invariant: `completed` never runs ahead of the device, and the number of an operation is taken
//! after its submission.

mod early;
mod milestone;
pub(crate) mod word;

use super::DeviceHandle;
use crate::{
    driver::{DriverResult, FailPoint, Fault, FaultKind, RawEvent, RawStream, observe::Token},
    error::{Error, Result},
    memory::{calls::while_waiting, hazard::OPEN},
    stall::StallTimer,
    sync::{Flag, Sequence, unique_id},
    timeline::Cause,
};
use early::EarlyEvents;
use milestone::{LastSeen, Milestones};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{rc::Rc, sync::Arc, time::Duration};

/// Period in which a waiting host thread polls milestones and asks whether it should stop.
const TICK: Duration = Duration::from_millis(20);

/// With the number of operations submitted to it and the number known to be complete.
///
/// The number of an operation is taken *after* its submission. So a thread that reads the counter and then records an
/// event has captured at least all operations up to that number. On its own cache lines, written at every operation.
#[repr(align(128))]
pub struct StreamCore {
    /// Its device.
    pub handle: Arc<DeviceHandle>,
    /// The driver's stream.
    pub raw: RawStream,
    /// Whether other code has created it, and destroys it.
    pub(crate) adopted: bool,
    /// Unique in the process.
    pub(crate) id: u64,
    submitted: Sequence,
    completed: Sequence,
    /// Operations that a wait of the host has covered. Such a wait has also reported the errors of those operations.
    waited: Sequence,
    /// Whether foreign code may submit work that has no number: see [`lend`](Self::lend).
    lent: Flag,
    /// Scopes that have ended, once foreign code has the stream.
    ended: Sequence,
    /// They show progress without a driver call, and tell a long queue from a stuck one.
    milestones: Milestones,
    /// Events that were recorded before anyone waited for them. When stepped, they replace milestones.
    early: EarlyEvents,
    /// By id of another stream: the operations of it that this stream already waits for.
    known: Mutex<SmallVec<[(u64, u64); 8]>>,
}

/// The operations of a stream: how many were submitted, and how many are known to be done.
#[derive(Clone, Debug)]
pub(crate) struct StreamState {
    pub id: u64,
    pub submitted: u64,
    pub completed: u64,
}

impl StreamCore {
    /// Makes no driver call.
    pub(crate) fn state(&self) -> StreamState {
        let submitted = self.submitted.get();
        let completed = if self.milestones.are_words() { self.poll() } else { self.completed.get() };
        StreamState { id: self.id, submitted, completed }
    }

    pub(crate) fn new(handle: &Arc<DeviceHandle>, op: &'static str) -> Result<Arc<Self>> {
        Self::with_priority(handle, op, 0)
    }

    /// Lower numbers run first: see [`Driver::stream_create`](crate::driver::Driver::stream_create).
    pub(crate) fn with_priority(handle: &Arc<DeviceHandle>, op: &'static str, priority: i32) -> Result<Arc<Self>> {
        let raw = handle.check(op, handle.driver.stream_create(priority))?;
        Ok(Self::of(handle, raw, false))
    }

    /// A stream that other code has created, and submits to.
    ///
    /// # Safety
    /// The stream outlives the result.
    pub(crate) unsafe fn adopt(handle: &Arc<DeviceHandle>, raw: RawStream) -> DriverResult<Arc<Self>> {
        // SAFETY: the caller's promise.
        unsafe { handle.driver.stream_adopt(raw)? };
        let core = Self::of(handle, raw, true);
        core.lend();
        Ok(core)
    }

    fn of(handle: &Arc<DeviceHandle>, raw: RawStream, adopted: bool) -> Arc<Self> {
        let stream = Arc::new(StreamCore {
            handle: handle.clone(),
            raw,
            adopted,
            id: unique_id(),
            submitted: Sequence::new(),
            completed: Sequence::new(),
            waited: Sequence::new(),
            lent: Flag::new(),
            ended: Sequence::new(),
            milestones: Milestones::new(handle),
            early: EarlyEvents::default(),
            known: Mutex::default(),
        });
        handle.add_stream(&stream);
        stream
    }

    /// Numbers an operation that was just submitted.
    pub fn submit(&self) -> u64 {
        let sequence = self.submitted.fetch_advance();
        if self.handle.stepped {
            self.early.step(self, sequence);
        } else if sequence.is_multiple_of(milestone::MILESTONE) {
            self.set_milestone();
        }
        sequence
    }

    /// From now on its work may have no number: waits for an idle stream always ask the driver.
    pub(crate) fn lend(&self) {
        self.lent.raise();
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.lent.is_raised()
    }

    /// The number of a use by foreign code that is over when it is closed, or when the scope has ended.
    #[cfg(feature = "cuda")]
    pub(crate) fn open_number(&self) -> u64 {
        OPEN + self.ended.get()
    }

    /// A scope has ended, and the stream is idle.
    pub(crate) fn end_scope(&self) {
        if self.lent.is_raised() {
            self.ended.fetch_advance();
        }
    }

    pub(crate) fn submitted(&self) -> u64 {
        self.submitted.get()
    }

    /// Whether operation `sequence` is known to have completed, without a driver call. The thread may rely on it.
    pub(crate) fn has_completed(&self, sequence: u64) -> bool {
        let over = self.is_over(sequence);
        if let Some(watch) = self.handle.watch().filter(|_| over) {
            watch.checker.observe(watch.device, self.raw);
        }
        over
    }

    /// For housekeeping: to the checker the calling thread has learned nothing. A thread that relies on the answer
    /// later must get [`known_over`](Self::known_over).
    pub(crate) fn is_over(&self, sequence: u64) -> bool {
        if sequence >= OPEN {
            return self.ended.get() > sequence - OPEN;
        }
        self.completed.get() >= sequence
            || self.look(sequence)
            || self.handle.injected(FailPoint::CompletedTooEarly) && sequence <= self.submitted.get()
    }

    /// With a checker: the knowledge of a thread that has seen that operations [are over](Self::is_over).
    pub(crate) fn known_over(&self) -> Option<Box<Token>> {
        self.handle.watch().map(|watch| Box::new(watch.checker.observed(watch.device, self.raw)))
    }

    /// The driver has told the calling thread that the first `sequence` operations are over.
    fn complete(&self, sequence: u64) {
        if let Some(watch) = self.handle.watch() {
            watch.checker.publish(watch.device, self.raw);
        }
        self.completed.raise_to(sequence);
    }

    fn complete_waited(&self, sequence: u64) {
        self.complete(sequence);
        self.waited.raise_to(sequence);
    }

    /// Records a fresh event. Returns it with the number of operations that it covers.
    pub(crate) fn record(&self, op: &'static str, timing: bool) -> Result<(RawEvent, u64)> {
        let event = self.handle.check(op, self.handle.take_event(timing))?;
        let covered = self.submitted.get();
        if let Err(fault) = self.handle.driver.event_record(event, self.raw) {
            self.handle.give_event(event, timing);
            return Err(self.handle.error(op, fault));
        }
        // A time stamp is an operation itself: a wait for the stream must wait for it, too.
        let covered = if timing { self.submit() } else { covered };
        Ok((event, covered))
    }

    /// All later work of this stream waits for an event that covers `other` up to `covered`.
    pub(crate) fn wait_event(&self, op: &'static str, event: RawEvent, other: &StreamCore, covered: u64) -> Result<()> {
        self.wait_raw(op, event, &other.handle)?;
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

    /// An error names the device that has failed.
    pub(crate) fn wait_raw(&self, op: &'static str, event: RawEvent, owner: &DeviceHandle) -> Result<()> {
        let Err(fault) = self.handle.driver.stream_wait_event(self.raw, event) else { return Ok(()) };
        let is_loss = |fault: &Fault| fault.kind == FaultKind::DeviceLost;
        // A lost device's event reports that device's loss, not this one's. Any other fault is the called driver's.
        let theirs = is_loss(&fault)
            && owner.device != self.handle.device
            && !self.handle.driver.stream_query(self.raw).is_err_and(|fault| is_loss(&fault));
        Err(if theirs { owner } else { &self.handle }.error(op, fault))
    }

    /// All later work of this stream waits, on the device, for operation `sequence` of `other`, unless an earlier wait
    /// implies this one: for an [`early`] event behind the operation, or one recorded only now (most blocks are never
    /// shared, so most events never exist). That captures all that `other` has submitted, which cannot deadlock: every
    /// wait refers to earlier work; and kernels that spin for peers are launched only after the whole gang has met.
    pub fn wait_for(&self, op: &'static str, other: &StreamCore, sequence: u64) -> Result<()> {
        if self.comes_after(other, sequence) {
            return Ok(());
        }
        // When stepped, the stream waits even if the operation is over: whether it is over depends on time.
        if !other.handle.stepped && other.has_completed(sequence) {
            return Ok(());
        }
        if let Some((covered, found)) = other.early.find(sequence) {
            return self.wait_event(op, found.event, other, covered);
        }
        let (event, covered) = other.record(op, false)?;
        let waited = self.wait_event(op, event, other, covered);
        // A wait captures the record, so the event may be recorded again at once.
        other.handle.give_event(event, false);
        waited
    }

    /// Whether all later work of this stream comes after operation `sequence` of `other` without a further wait.
    pub(crate) fn comes_after(&self, other: &StreamCore, sequence: u64) -> bool {
        self.id == other.id || self.knows(other, sequence)
    }

    fn knows(&self, other: &StreamCore, sequence: u64) -> bool {
        self.known.lock().iter().any(|&(id, upto)| id == other.id && upto >= sequence)
    }

    /// The calling host thread waits for all work submitted so far. It gives up when nothing completes for `limit`, or
    /// when `stop` returns true; `stop` is asked every few milliseconds.
    pub(crate) fn wait_idle(&self, op: &'static str, limit: Duration, stop: impl Fn() -> bool) -> Result<()> {
        let covered = self.submitted.get();
        // A completion word is not enough here: only the driver reports errors.
        if !self.lent.is_raised() && self.waited.get() >= covered && self.has_completed(covered) {
            return Ok(());
        }
        let idle = || self.handle.check(op, self.handle.driver.stream_wait_idle(self.raw, TICK));
        self.wait_while_advancing(op, limit, idle, stop)?;
        self.complete_waited(covered);
        Ok(())
    }

    /// The deadline starts again whenever the stream makes progress; the device's progress counter then tells other
    /// waits that this device is not stuck.
    pub(crate) fn wait_while_advancing(
        &self,
        op: &'static str,
        limit: Duration,
        done: impl Fn() -> Result<bool>,
        stop: impl Fn() -> bool,
    ) -> Result<()> {
        let _slice = self.handle.lane.wait(op, || Some(Cause::Stream(self.raw)));
        let wait = || {
            let (mut stall, mut seen) = (StallTimer::new(limit), LastSeen::default());
            while !done()? {
                if seen.has_advanced(self) {
                    self.handle.progress.advance();
                    stall.renew();
                }
                if stop() || stall.is_over() {
                    let (device, waited) = (self.handle.device, stall.waited());
                    let last_calls = self.handle.last_call().into_iter().collect();
                    return Err(Error::Timeout { device, op, waited, missing: vec![device], last_calls });
                }
            }
            Ok(())
        };
        while_waiting(op, self.handle.device, wait)
    }

    pub(crate) fn wait_host(&self, op: &'static str, sequence: u64, limit: Duration) -> Result<()> {
        self.wait_host_unless(op, sequence, limit, &|| false)
    }

    pub(super) fn wait_host_for(
        &self,
        op: &'static str,
        event: RawEvent,
        covered: u64,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        if self.has_completed(covered) {
            return Ok(());
        }
        let passed = || self.handle.check(op, self.handle.driver.event_wait(event, TICK));
        self.wait_while_advancing(op, limit, passed, stop)?;
        self.complete_waited(covered);
        Ok(())
    }

    /// Like [`wait_host`](Self::wait_host), but gives up when `stop` returns true.
    pub fn wait_host_unless(
        &self,
        op: &'static str,
        sequence: u64,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        if self.has_completed(sequence) {
            return Ok(());
        }
        let passed = |event| self.handle.check(op, self.handle.driver.event_wait(event, TICK));
        if let Some((covered, found)) = self.early.find(sequence) {
            self.wait_while_advancing(op, limit, || passed(found.event), stop)?;
            self.complete_waited(covered);
            return Ok(());
        }
        let (event, covered) = self.record(op, false)?;
        let waited = self.wait_while_advancing(op, limit, || passed(event), stop);
        self.handle.give_event(event, false);
        waited?;
        self.complete_waited(covered);
        Ok(())
    }
}

impl Drop for StreamCore {
    fn drop(&mut self) {
        self.milestones.end(&self.handle);
        if !self.adopted {
            // SAFETY: this is the last reference, so no code submits to the stream any more.
            let _ = unsafe { self.handle.driver.stream_destroy(self.raw) };
        }
    }
}

/// A further stream of a device, from [`Device::stream`](crate::Device::stream). It is used through
/// [`Device::on`](crate::Device::on).
///
/// A stream cannot leave its device's thread, so `dev.on(&stream)` never gets a stream of another device.
pub struct Stream {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) _held: Rc<()>,
}

crate::sync::device_thread_only! { [] Stream }

debug_as!(Stream, |self| device = self.core.handle.device, id = self.core.id);
