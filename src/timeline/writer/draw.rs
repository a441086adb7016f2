//! How records become lines: slices of host threads, work of streams, waits with the arrows from their causes.

use super::{
    super::{Category, Cause, Mark, Route, Row, Slice, THREADS, Work, format::Arg, format::At, timed::Timed},
    Done, KEPT, OneDevice, SHORT, Stream, Writer, stream_row, thread_row,
};
use crate::{
    driver::host::{self, What},
    error::op_site::OpSite,
};
use smallvec::SmallVec;

impl Writer {
    fn flow(&mut self, from: At, to: At) {
        self.flows += 1;
        self.lines.flow(self.flows, from, to);
    }

    fn row(&mut self, row: Row) -> u64 {
        match row {
            Row::Device(device) => thread_row(device),
            Row::Other(thread) => {
                let next = self.others.len() as u64 + 1;
                let row = *self.others.entry(thread).or_insert(next);
                if row == next {
                    let name = THREADS.lock().get(&thread).cloned();
                    self.name(row, &name.unwrap_or_else(|| format!("thread {thread}")));
                }
                row
            }
        }
    }

    /// A slice of a host thread.
    pub(super) fn slice(&mut self, device: usize, slice: &Slice) {
        let row = self.row(slice.row);
        let mut from = None;
        let cause = match slice.cause {
            None => None,
            Some(Cause::Device(peer, call)) => {
                from = Some(At { row: thread_row(peer), time: inside(slice.start, slice.end) });
                Some(described(format!("GPU {peer} thread"), None, call))
            }
            Some(Cause::Stream(raw)) => {
                let to = At { row, time: inside(slice.start, slice.end) };
                let number = self.devices[device].lane.timing.lock().known(raw);
                let stream = number.and_then(|number| self.devices[device].streams.get_mut(number));
                let last = stream.and_then(|stream| {
                    if let Some((work, waiters)) = stream.pending.back_mut() {
                        waiters.push(to);
                        return Some((work.name, work.here));
                    }
                    let done = stream.done.back()?;
                    let row = stream_row(device, number?);
                    from = (done.end > slice.start).then(|| At { row, time: done.end.saturating_sub(1) });
                    Some((done.name, done.here))
                });
                let name = number.map_or_else(String::new, |number| format!(" stream {number}"));
                let (name, (work, call)) = (format!("GPU {device}{name}"), last.unzip());
                Some(described(name, work, call.flatten()))
            }
        };
        let mut args = SmallVec::<[(&str, Arg<'_>); 8]>::new();
        args.extend(slice.here.map(|here| ("place", Arg::Place(here))));
        args.extend(slice.here.map(|here| ("op", Arg::Text(here.op))));
        if slice.bytes > 0 {
            args.push(("bytes", Arg::Number(slice.bytes as u64)));
        }
        if let Some(Route { algorithm, waits_by, members }) = slice.route {
            args.push(("algorithm", Arg::Text(algorithm)));
            args.push(("route", Arg::Text(waits_by)));
            args.push(("members", Arg::Bits(members)));
        }
        args.extend(cause.as_deref().map(|cause| ("cause", Arg::Text(cause))));
        let name = slice.label.as_deref().unwrap_or(slice.name);
        let at = At { row, time: slice.start };
        self.lines.slice(at, slice.end - slice.start, (name, slice.kind.name()), &args);
        if let Some(from) = from {
            self.flow(from, At { row, time: inside(slice.start, slice.end) });
        }
    }

    pub(super) fn stream(&mut self, device: usize, number: usize) -> &mut Stream {
        let known = self.devices[device].streams.len();
        for number in known..=number {
            self.devices[device].streams.push(Stream::default());
            self.name(stream_row(device, number), &format!("GPU {device} stream {number}"));
        }
        &mut self.devices[device].streams[number]
    }

    fn device(&self, lane: u64) -> Option<usize> {
        self.devices.iter().position(|device| device.lane.id == lane)
    }

    /// Whether the time of a stream's work will be known soon.
    pub(super) fn is_pending(&self, mark: Mark) -> bool {
        let stream = self.device(mark.lane).and_then(|device| self.devices[device].streams.get(mark.stream));
        stream.and_then(|stream| stream.pending.front()).is_some_and(|(work, _)| work.number <= mark.work)
    }

    fn done(&self, mark: Mark) -> Option<(usize, Done)> {
        let device = self.device(mark.lane).filter(|_| mark.work > 0)?;
        let done = &self.devices[device].streams.get(mark.stream)?.done;
        done.iter().find(|done| done.number >= mark.work).map(|done| (device, *done))
    }

    pub(super) fn work(&mut self, device: usize, work: &Work, waiters: &[At], timed: &Timed) {
        let before = self.devices[device].streams[work.stream].done.back().map_or(0, |done| done.end);
        let clock = self.devices[device].clock.as_ref();
        let time = |event| clock.and_then(|clock| clock.time(timed, event, work.submitted));
        let Some(end) = time(work.end) else {
            self.dropped += 1;
            return;
        };
        let start = work.begin.and_then(time).unwrap_or(work.submitted).max(before);
        let end = end.max(start);
        // What came last has ended the wait.
        let ended = work.waited.iter().filter_map(|&mark| Some((mark, self.done(mark)?)));
        if let Some((mark, (owner, cause))) = ended.max_by_key(|(_, (_, done))| done.end) {
            let since = before.max(work.waits_since);
            self.stream_wait(device, work.stream, (since, start), (owner, mark.stream, cause));
        }
        let done = Done { number: work.number, kind: work.kind, name: work.name, here: work.here, end };
        self.span(device, work.stream, start, done, (work.bytes, work.calls));
        for to in waiters {
            self.flow(At { row: stream_row(device, work.stream), time: inside(start, end) }, *to);
        }
    }

    /// A stream's wait for another one.
    fn stream_wait(
        &mut self,
        device: usize,
        stream: usize,
        (since, until): (u64, u64),
        (owner, number, cause): (usize, usize, Done),
    ) {
        // Then the stream was idle until it got its next work.
        let until = until.min(cause.end);
        if until < since + SHORT {
            return;
        }
        let row = stream_row(device, stream);
        let why = described(format!("GPU {owner} stream {number}"), Some(cause.name), cause.here);
        let args = [("cause", Arg::Text(&why))];
        self.lines.slice(At { row, time: since }, until - since, ("wait", Category::Wait.name()), &args);
        let from = At { row: stream_row(owner, number), time: cause.end.saturating_sub(1) };
        self.flow(from, At { row, time: until - 1 });
    }

    /// A slice of a stream.
    fn span(&mut self, device: usize, stream: usize, start: u64, done: Done, (bytes, calls): (usize, u32)) {
        let own = self.stream(device, stream);
        own.done.push_back(done);
        if own.done.len() > KEPT {
            own.done.pop_front();
        }
        let mut args = SmallVec::<[(&str, Arg<'_>); 4]>::new();
        args.extend(done.here.map(|here| ("place", Arg::Place(here))));
        args.extend(done.here.map(|here| ("op", Arg::Text(here.op))));
        if bytes > 0 {
            args.push(("bytes", Arg::Number(bytes as u64)));
        }
        let several = (calls > 1).then(|| format!("{} and {} more", done.name, calls - 1));
        if calls > 1 {
            args.push(("calls", Arg::Number(calls.into())));
        }
        let name = several.as_deref().unwrap_or(done.name);
        let at = At { row: stream_row(device, stream), time: start };
        self.lines.slice(at, done.end - start, (name, done.kind.name()), &args);
    }

    /// The steps of a machine in virtual time since the last call.
    pub(super) fn virtual_steps(&mut self) -> bool {
        let Some(driver) = self.devices[0].lane.in_virtual_time.clone() else { return false };
        let steps = host::steps(&*driver, self.steps).unwrap_or_default();
        self.steps += steps.len();
        for step in &steps {
            let ordinal = |device: &OneDevice| device.driver.info().ordinal == step.device;
            let Some(device) = self.devices.iter().position(ordinal) else { continue };
            let (start, end) = (step.time.0 / 1000, step.time.1 / 1000);
            let (kind, name, bytes) = match step.what {
                What::Kernel(name) => (Category::Kernel, name, 0),
                What::CopyUp(bytes) => (Category::Copy, "copy up", bytes),
                What::CopyDown(bytes) => (Category::Copy, "copy down", bytes),
                What::CopyWithin(bytes) => (Category::Copy, "copy within", bytes),
                What::CopyPeer(bytes) => (Category::Copy, "copy peer", bytes),
                What::Fill(bytes) => (Category::Kernel, "fill", bytes),
                What::Gemm => (Category::Kernel, "gemm", 0),
                What::WaitEvent { device: owner, stream, .. } => {
                    let since = self.stream(device, step.stream).done.back().map_or(0, |done| done.end);
                    let since = since.max(step.submitted / 1000);
                    let owner = self.devices.iter().position(|device| device.driver.info().ordinal == owner);
                    let cause = owner.and_then(|owner| Some((owner, stream, *self.stream(owner, stream).done.back()?)));
                    if let Some(cause) = cause {
                        self.stream_wait(device, step.stream, (since, start), cause);
                    }
                    continue;
                }
                _ => continue,
            };
            let done = Done { number: 0, kind, name, here: step.place, end };
            self.span(device, step.stream, start, done, (bytes, 1));
        }
        !steps.is_empty()
    }
}

/// A time within a slice, just before its end.
fn inside(start: u64, end: u64) -> u64 {
    end.saturating_sub(1).max(start)
}

fn described(row: String, work: Option<&str>, call: Option<OpSite>) -> String {
    let work = work.map_or_else(String::new, |work| format!(": {work}"));
    let call =
        call.map_or_else(String::new, |OpSite { op, site }| format!(", {op} at {}:{}", site.file(), site.line()));
    row + &work + &call
}
