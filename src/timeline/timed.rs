//! A layer around each device's driver that has its work timed, while a session writes.
//!
//! The builder puts it around drivers, inside all other layers. A stream's work lies between two timing events. An
//! event costs a step two to three microseconds (measured on an H200), so there are few ([`BURST`], [`EVERY`]): the end
//! of the stream's earlier work is the begin, unless the stream has waited in between; faster work shares one event.
//!
//! Invariant: it changes no call's effect. It adds nothing to a capture, nor where time is computed, nor on a GPU that
//! several devices share.

use super::{Category, Lane, Mark, Record, Work};
use crate::{
    driver::{layer::forward, *},
    error::op_site::OpSite,
};
use parking_lot::Mutex;
use smallvec::SmallVec;
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{any::Any, collections::HashMap, mem, sync::Arc, time::Duration};

/// Events that may follow each other at once, and the nanoseconds after which there may be one more.
const BURST: u64 = 64;
const EVERY: u64 = 100_000;
/// Events of a device at most. If the writer has all of them, work is not timed.
const EVENTS: usize = 4096;
/// Events that are made when a session begins: to make one takes longer than to record it.
const AT_FIRST: usize = 128;

/// The knowledge of a lane about its device's streams.
#[derive(Default)]
pub(super) struct Timing {
    spares: Vec<RawEvent>,
    made: usize,
    streams: Vec<Stream>,
    capturing: Vec<RawStream>,
    /// Several devices share the GPU: events of one could stand in front of the kernels that it waits for.
    shared: bool,
    /// The time up to which events are paid for.
    paid: u64,
}

#[derive(Default)]
struct Stream {
    raw: Option<RawStream>,
    works: u64,
    /// The end of the work before says when the next work can begin.
    follows: bool,
    waited: SmallVec<[Mark; 2]>,
    waits_since: u64,
    /// Work without an event behind it.
    untimed: Option<Box<Work>>,
}

/// The layer.
pub(crate) struct Timed {
    inner: DriverRef,
    pub(super) lane: Arc<Lane>,
}

/// The note that is made before a call.
struct Before {
    submitted: u64,
    begin: Option<RawEvent>,
    timed: bool,
}

impl Timed {
    /// Puts the layer around devices, where it can be.
    pub(crate) fn around(drivers: Vec<DriverRef>) -> Vec<DriverRef> {
        if drivers.iter().any(|driver| host::is_stepped(&**driver) || host::virtual_now(&**driver).is_some()) {
            return drivers;
        }
        let marks: Arc<Mutex<HashMap<RawEvent, Mark>>> = Arc::default();
        let wrap = |inner| Arc::new(Timed { inner, lane: Lane::new(None, &marks) }) as DriverRef;
        drivers.into_iter().map(wrap).collect()
    }

    /// The layer around this driver.
    pub(super) fn around_it(driver: &DriverRef) -> Option<&Timed> {
        let mut layer = driver;
        loop {
            match (&**layer as &dyn Any).downcast_ref() {
                Some(timed) => return Some(timed),
                None => layer = layer.inner()?,
            }
        }
    }

    /// The driver, for calls that are not timed.
    pub(super) fn driver(&self) -> &DriverRef {
        &self.inner
    }

    /// A session begins: nothing is known of the streams.
    pub(super) fn begin(&self, shared: bool) -> DriverResult {
        let mut timing = self.lane.timing.lock();
        timing.shared = shared;
        timing.streams.clear();
        timing.paid = 0;
        while timing.spares.len() < AT_FIRST && timing.made < EVENTS {
            let event = self.inner.event_create(true)?;
            timing.spares.push(event);
            timing.made += 1;
        }
        Ok(())
    }

    /// The session ends: work that waits for its event gets one.
    pub(super) fn finish(&self) {
        let mut timing = self.lane.timing.lock();
        for stream in 0..timing.streams.len() {
            self.settle(&mut timing, stream);
        }
        self.lane.marks.lock().clear();
    }

    pub(super) fn take_event(&self) -> Option<RawEvent> {
        self.event(&mut self.lane.timing.lock())
    }

    pub(super) fn give_events(&self, events: impl IntoIterator<Item = RawEvent>) {
        self.lane.timing.lock().spares.extend(events);
    }

    fn event(&self, timing: &mut Timing) -> Option<RawEvent> {
        timing.spares.pop().or_else(|| {
            let event = (timing.made < EVENTS).then(|| self.inner.event_create(true).ok()).flatten()?;
            timing.made += 1;
            Some(event)
        })
    }

    fn recorded(&self, timing: &mut Timing, stream: RawStream) -> Option<RawEvent> {
        let event = self.event(timing)?;
        match self.inner.event_record(event, stream) {
            Ok(()) => Some(event),
            Err(_) => {
                timing.spares.push(event);
                None
            }
        }
    }

    /// A call that gives `stream` work.
    fn work(
        &self,
        (kind, name, bytes): (Category, &'static str, usize),
        stream: RawStream,
        call: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        if !self.lane.is_on() {
            return call();
        }
        let Some(Before { submitted, begin, timed }) = self.before(stream) else { return call() };
        if let Err(fault) = call() {
            self.give_events(begin);
            return Err(fault);
        }
        let mut timing = self.lane.timing.lock();
        let timing = &mut *timing;
        let at = timing.stream(stream);
        let end = if timed { self.recorded(timing, stream) } else { None };
        let own = &mut timing.streams[at];
        own.works += 1;
        own.follows = true;
        let mut work = match own.untimed.take() {
            Some(mut work) => {
                (work.calls, work.bytes, work.number) = (work.calls + 1, work.bytes + bytes, own.works);
                timing.spares.extend(begin);
                work
            }
            None => Box::new(Work {
                kind,
                name,
                here: OpSite::current(),
                bytes,
                calls: 1,
                stream: at,
                number: own.works,
                submitted,
                waited: mem::take(&mut own.waited),
                waits_since: own.waits_since,
                begin,
                end: RawEvent(0),
            }),
        };
        match end {
            Some(end) => {
                work.end = end;
                self.lane.push(Record::Work(work));
            }
            None => own.untimed = Some(work),
        }
        Ok(())
    }

    fn before(&self, stream: RawStream) -> Option<Before> {
        let mut timing = self.lane.timing.lock();
        if timing.is_closed(stream) {
            return None;
        }
        let submitted = self.lane.now();
        let at = timing.stream(stream);
        timing.paid = timing.paid.max(submitted.saturating_sub(BURST * EVERY));
        let left = (submitted.max(timing.paid) - timing.paid) / EVERY;
        let (follows, starts) = (timing.streams[at].follows, timing.streams[at].untimed.is_none());
        // With many left an event of its own is more exact: the device begins later than the host has submitted.
        let begin = starts && (!follows || left > BURST / 2);
        let begin = if begin { self.recorded(&mut timing, stream) } else { None };
        let timed = left > 0;
        timing.paid += EVERY * (u64::from(begin.is_some()) + u64::from(timed));
        Some(Before { submitted, begin, timed })
    }

    /// Gives a stream's work that has no event one.
    fn settle(&self, timing: &mut Timing, at: usize) {
        let (Some(raw), true) = (timing.streams[at].raw, timing.streams[at].untimed.is_some()) else { return };
        let event = self.recorded(timing, raw);
        let work = timing.streams[at].untimed.take();
        match (work, event) {
            (Some(mut work), Some(end)) => {
                work.end = end;
                self.lane.push(Record::Work(work));
            }
            (Some(work), None) => {
                timing.spares.extend(work.begin);
                self.lane.dropped.fetch_advance();
            }
            (None, _) => {}
        }
    }

    /// Something looks at the stream, or makes it wait: the work so far ends here.
    fn look(&self, stream: RawStream, then: impl FnOnce(&mut Timing, usize)) {
        if self.lane.is_on() {
            let mut timing = self.lane.timing.lock();
            if !timing.is_closed(stream) {
                let at = timing.stream(stream);
                self.settle(&mut timing, at);
                then(&mut timing, at);
            }
        }
    }

    /// The stream waits for something.
    fn waits(&self, stream: RawStream, mark: Option<Mark>) {
        self.look(stream, |timing, at| {
            let id = self.lane.id;
            let now = self.lane.now();
            let own = &mut timing.streams[at];
            if mark.is_some_and(|mark| (mark.lane, mark.stream) == (id, at)) {
                return;
            }
            if own.follows || own.waited.is_empty() {
                own.waits_since = now;
            }
            own.follows = false;
            own.waited.extend(mark.filter(|_| own.waited.len() < 16));
        });
    }
}

impl Timing {
    /// The number of a stream.
    fn stream(&mut self, raw: RawStream) -> usize {
        self.streams.iter().position(|stream| stream.raw == Some(raw)).unwrap_or_else(|| {
            self.streams.push(Stream { raw: Some(raw), ..Stream::default() });
            self.streams.len() - 1
        })
    }

    /// Whether the stream takes no events.
    fn is_closed(&self, stream: RawStream) -> bool {
        self.shared || self.capturing.contains(&stream)
    }

    /// The number of a stream that has had work.
    pub(super) fn known(&self, raw: RawStream) -> Option<usize> {
        self.streams.iter().position(|stream| stream.raw == Some(raw))
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        let spares = mem::take(&mut self.lane.timing.lock().spares);
        for event in spares {
            // SAFETY: spare events belong to this device, and no other code has them.
            let _ = unsafe { self.inner.event_destroy(event) };
        }
    }
}

impl Driver for Timed {
    fn inner(&self) -> Option<&DriverRef> {
        Some(&self.inner)
    }

    forward! { |this, call| this.inner;
        info();
        as_any();
        bind();
        memory_info();
        mem_alloc(bytes);
        mem_free(address);
        host_alloc(bytes);
        host_free(ptr);
        managed_alloc(bytes);
        managed_free(ptr);
        adopt(address, bytes);
        disown(address);
        vm_granularity();
        vm_reserve(bytes);
        vm_release(address, bytes);
        vm_map(address, bytes);
        vm_unmap(address, bytes);
        vm_move(from, to, bytes);
        #[cfg(target_os = "linux")]
        vm_export(address, bytes);
        #[cfg(target_os = "linux")]
        vm_import(address, bytes, memory);

        stream_create(priority);
        stream_adopt(stream);
        stream_destroy(stream) => {
            this.look(stream, |timing, at| timing.streams[at].raw = None);
            call()
        };
        stream_query(stream);
        stream_wait_idle(stream, limit) => {
            this.look(stream, |_, _| {});
            call()
        };
        stream_wait_event(stream, event) => {
            if this.lane.is_on() {
                let mark = this.lane.marks.lock().get(&event).copied();
                this.waits(stream, mark);
            }
            call()
        };
        event_create(timing);
        event_destroy(event) => {
            if this.lane.is_on() {
                this.lane.marks.lock().remove(&event);
            }
            call()
        };
        event_record(event, stream) => {
            this.look(stream, |timing, at| {
                let mark = Mark { lane: this.lane.id, stream: at, work: timing.streams[at].works };
                this.lane.marks.lock().insert(event, mark);
            });
            call()
        };
        event_query(event);
        event_wait(event, limit);
        event_elapsed(start, end);

        copy_to_device(dst, src, bytes, stream) => this.work((Category::Copy, "copy up", bytes), stream, call);
        copy_to_host(dst, src, bytes, stream) => this.work((Category::Copy, "copy down", bytes), stream, call);
        copy_within(dst, src, bytes, stream) => this.work((Category::Copy, "copy within", bytes), stream, call);
        copy_peer(dst, dst_device, src, src_device, bytes, stream) => {
            this.work((Category::Copy, "copy peer", bytes), stream, call)
        };
        fill_u8(dst, value, bytes, stream) => this.work((Category::Kernel, "fill", bytes), stream, call);
        fill_u32(dst, value, count, stream) => this.work((Category::Kernel, "fill", 4 * count), stream, call);

        can_access_peer(peer);
        enable_peer(peer);
        disable_peer(peer);
        module_load(image);
        module_unload(module);
        function(module, name);
        launch(launch, stream) => {
            let bytes = || launch.args.iter().map(|arg| match arg {
                KernelArg::Slice { bytes, .. } => *bytes,
                KernelArg::Value(_) => 0,
            });
            this.work((Category::Kernel, launch.name, if this.lane.is_on() { bytes().sum() } else { 0 }), stream, call)
        };
        launch_host(stream, f) => {
            this.waits(stream, None);
            call()
        };
        gemm(gemm, stream) => this.work((Category::Kernel, "gemm", 0), stream, call);

        capture_begin(stream) => {
            this.look(stream, |_, _| {});
            call()?;
            this.lane.timing.lock().capturing.push(stream);
            Ok(())
        };
        capture_end(stream) => {
            this.lane.timing.lock().capturing.retain(|capturing| *capturing != stream);
            call()
        };
        graph_launch(graph, stream) => this.work((Category::Kernel, "graph", 0), stream, call);
        graph_destroy(graph);
        write_value(address, value, stream) => {
            this.look(stream, |_, _| {});
            call()
        };
        wait_value(address, value, stream) => {
            this.waits(stream, None);
            call()
        };
        poll_value(address);
    }
}
