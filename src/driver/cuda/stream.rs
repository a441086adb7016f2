//! Streams and events. Waits poll, so a wait can always be given up.

use std::{
    cell::Cell,
    hint, ptr, thread,
    time::{Duration, Instant},
};

use cudarc::driver::{
    result,
    sys::{self, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags},
};

use super::{CudaGpu, fault};
use crate::{
    driver::{DriverResult, FaultKind, RECORDED_BEFORE, RawEvent, RawStream},
    sync::shim,
};

pub(super) fn stream(s: RawStream) -> CUstream {
    ptr::with_exposed_provenance_mut(s.0 as usize)
}

fn event(e: RawEvent) -> CUevent {
    ptr::with_exposed_provenance_mut(e.0 as usize)
}

impl CudaGpu {
    pub(super) fn stream_create(&self, priority: i32) -> DriverResult<RawStream> {
        self.enter()?;
        let mut s = ptr::null_mut();
        // As in our contract, CUDA runs the lower number first.
        let priority = priority.clamp(self.priorities.0, self.priorities.1.max(self.priorities.0));
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the pointer is to a live handle.
        self.check(unsafe { sys::cuStreamCreateWithPriority(&mut s, flags, priority) })?;
        Ok(RawStream(s.expose_provenance() as u64))
    }

    pub(super) unsafe fn stream_destroy(&self, s: RawStream) -> DriverResult {
        let kept = self.interop.forget(s);
        #[cfg(feature = "blas")]
        if let Some(blas) = self.blas.lock().as_mut() {
            blas.forget(s);
        }
        if kept {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's promise: a stream of this device, not used again.
        self.check(unsafe { sys::cuStreamDestroy_v2(stream(s)) })
    }

    pub(super) fn stream_query(&self, s: RawStream) -> DriverResult<bool> {
        // The numbers of the default streams mean those of the current context.
        self.enter()?;
        // SAFETY: a live stream of this device.
        self.completed(fault::code(unsafe { sys::cuStreamQuery(stream(s)) }))
    }

    pub(super) fn stream_wait_idle(&self, s: RawStream, limit: Duration) -> DriverResult<bool> {
        poll(limit, || self.stream_query(s))
    }

    pub(super) fn stream_wait_event(&self, s: RawStream, e: RawEvent) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        // SAFETY: a live stream of this device, and a live event of any device.
        self.check_shared(s, unsafe { sys::cuStreamWaitEvent(stream(s), event(e), 0) })
    }

    /// [`check`](Self::check) for a call that also names an object of another device. A reported loss counts as a loss
    /// of this device only if this device's own stream reports it, too.
    pub(super) fn check_shared(&self, s: RawStream, result: CUresult) -> DriverResult {
        let reported = fault::fault(fault::code(result), "");
        if reported.kind != FaultKind::DeviceLost {
            return self.check(result);
        }
        // SAFETY: a live stream of this device.
        let own = fault::fault(fault::code(unsafe { sys::cuStreamQuery(stream(s)) }), "");
        Err(if own.kind == FaultKind::DeviceLost { self.remember(own) } else { reported })
    }

    pub(super) fn event_create(&self, timing: bool) -> DriverResult<RawEvent> {
        self.enter()?;
        let flags = if timing { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut e = ptr::null_mut();
        // SAFETY: the context is current; the pointer is to a live handle.
        self.check(unsafe { sys::cuEventCreate(&mut e, flags as u32) })?;
        Ok(RawEvent(e.expose_provenance() as u64))
    }

    pub(super) unsafe fn event_destroy(&self, e: RawEvent) -> DriverResult {
        self.enter()?;
        // SAFETY: the caller's promise: an event of this device, not used again.
        self.check(unsafe { sys::cuEventDestroy_v2(event(e)) })
    }

    pub(super) fn event_record(&self, e: RawEvent, s: RawStream) -> DriverResult {
        self.enter()?;
        self.check_no_capture(s)?;
        // SAFETY: a live event and a live stream of this device.
        self.check(unsafe { sys::cuEventRecord(event(e), stream(s)) })
    }

    pub(super) fn event_query(&self, e: RawEvent) -> DriverResult<bool> {
        self.alive()?;
        // SAFETY: a live event of this device; the call does not depend on the current context.
        self.completed(fault::code(unsafe { sys::cuEventQuery(event(e)) }))
    }

    pub(super) fn event_wait(&self, e: RawEvent, limit: Duration) -> DriverResult<bool> {
        poll(limit, || self.event_query(e))
    }

    pub(super) fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration> {
        self.enter()?;
        let mut ms = 0.0_f32;
        match self.optional.elapsed {
            Some(elapsed) => {
                // SAFETY: the symbol's own type; live events of this device; the pointer is to a live number.
                self.check_code(unsafe { elapsed(&mut ms, event(start), event(end)) }, String::new)?;
            }
            // libcuda was linked, so the bindings' names exist.
            // SAFETY: live events of this device.
            None => match unsafe { result::event::elapsed(event(start), event(end)) } {
                Ok(v) => ms = v,
                Err(e) => self.check(e.0)?,
            },
        }
        Duration::try_from_secs_f64(f64::from(ms) / 1000.0).map_err(|_| fault::invalid(RECORDED_BEFORE))
    }

    fn completed(&self, code: i32) -> DriverResult<bool> {
        match code {
            fault::SUCCESS => Ok(true),
            fault::NOT_READY => Ok(false),
            code => self.check_code(code, String::new).map(|()| true),
        }
    }
}

thread_local! {
    /// If its limit has ended it: the next wait continues it.
    static CUT_SHORT: Cell<Option<(Instant, Instant)>> = const { Cell::new(None) };
    /// Until then, a wait assumes that other threads want this core.
    static CONTENDED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// For 10 ms it polls without a pause; then it sleeps in between, from 5 us growing to 50 us. With sleeps that began
/// after 100 us, waits of a millisecond ended 80 us late on a machine with 64 idle cores.
///
/// If the thread has lost its core during the wait, sleeps begin after 100 us for a while: a thread that sleeps gets
/// the core back at once, a thread that spins waits milliseconds for its turn. It never yields then: on a host whose
/// cores are busy with other work, a yield costs a time slice of that work (4 ms for an all-reduce of 31 us, on 32
/// cores). With as many device threads as cores, it yields from 20 us on, so that all of them can submit.
fn poll(limit: Duration, mut done: impl FnMut() -> DriverResult<bool>) -> DriverResult<bool> {
    const CROWDED: Duration = Duration::from_micros(20);
    const NAP: Duration = Duration::from_micros(100);
    const ALONE: Duration = Duration::from_millis(10);
    const LONGEST: Duration = Duration::from_micros(50);
    /// A poll that takes longer than this has lost its core, or has waited for a lock of the driver.
    const LOST: Duration = Duration::from_micros(500);
    const WARY: Duration = Duration::from_millis(100);
    let cut_short = CUT_SHORT.take();
    if done()? {
        return Ok(true);
    }
    let start = Instant::now();
    let began = match cut_short {
        Some((began, cut)) if start.duration_since(cut) < Duration::from_millis(1) => began,
        _ => start,
    };
    let contended = || CONTENDED.get().is_some_and(|until| Instant::now() < until);
    let mut spin = match shim::spin_rounds() {
        0 => CROWDED,
        _ if contended() => NAP,
        _ => ALONE,
    };
    let (mut nap, mut last) = (Duration::from_micros(5), start);
    loop {
        let now = Instant::now();
        let waited = now.duration_since(began);
        if now.duration_since(start) >= limit {
            CUT_SHORT.set(Some((began, now)));
            return Ok(false);
        }
        if spin == ALONE && waited < spin && now.duration_since(last) > LOST {
            CONTENDED.set(now.checked_add(WARY));
            spin = NAP;
        }
        last = now;
        if waited < spin {
            (0..16).for_each(|_| hint::spin_loop());
        } else if waited < NAP {
            thread::yield_now();
        } else {
            thread::sleep(nap.min(limit.saturating_sub(now.duration_since(start))));
            nap = (nap * 2).min(LONGEST);
        }
        if done()? {
            return Ok(true);
        }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/stream_tests.rs"]
mod tests;
