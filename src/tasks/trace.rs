//! [`TaskTrace`]: the tasks, their dependencies and their times. As a Chrome trace.
//!
//! Users make one and give it to [`Tasks::trace`](super::Tasks::trace). A task of a device has the times of its work on
//! the device, by timing events on its stream; a task of the CPU has the host's. To place them on one axis, each device
//! is synchronised a few times, before its first task.

use super::{engine::StreamKind, graph::Access};
use crate::{
    Device, Event,
    chrome_trace::{ChromeTrace, Row},
    error::{Result, Site},
};
use parking_lot::Mutex;
use serde_json::json;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// The graph of the tasks of one call of [`GpuPool::tasks`](crate::GpuPool::tasks), and their times.
///
/// A trace is for one call at a time; a further call starts it anew. Tracing costs some microseconds for each task.
#[derive(Debug, Default)]
pub struct TaskTrace(Mutex<Data>);

#[derive(Debug, Default)]
struct Data {
    start: Option<Instant>,
    devices: usize,
    tasks: Vec<Entry>,
    /// By device: an event, and the time at which it was complete.
    zero: Vec<Option<(Event, Duration)>>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    place: usize,
    stream: StreamKind,
    /// Earlier tasks, and whether this one takes what they have made (or only comes after them).
    after: Vec<(usize, bool)>,
    times: Option<Times>,
    span: Option<(Duration, Duration)>,
    has_failed: bool,
}

/// The times of a task, as they were measured.
#[derive(Debug)]
pub(super) enum Times {
    Host(Instant, Instant),
    Device(Event, Event),
}

impl Times {
    pub fn on(began: Event, dev: &Device) -> Result<Times> {
        Ok(Times::Device(began, dev.record_timed()?))
    }
}

/// The tasks that have used a variable: the last that wrote it, and those that have read it since.
#[derive(Default)]
pub(super) struct Users {
    writer: Option<usize>,
    readers: Vec<usize>,
}

impl TaskTrace {
    /// An empty trace.
    pub fn new() -> Self {
        TaskTrace::default()
    }

    pub(super) fn begin(&self, devices: usize) {
        let zero = (0..devices).map(|_| None).collect();
        *self.0.lock() = Data { start: Some(Instant::now()), devices, tasks: Vec::new(), zero };
    }

    pub(super) fn add(&self, place: usize, stream: StreamKind, site: Site, name: Option<&str>) -> usize {
        let name = name.map_or_else(|| format!("{}:{}", site.file(), site.line()), str::to_owned);
        let mut data = self.0.lock();
        let entry = Entry { name, place, stream, after: Vec::new(), times: None, span: None, has_failed: false };
        data.tasks.push(entry);
        data.tasks.len() - 1
    }

    pub(super) fn order(&self, number: usize, access: Access, users: &mut Users) {
        let mut data = self.0.lock();
        let Some(Entry { after, .. }) = data.tasks.get_mut(number) else { return };
        let mut add = |task: usize, is_data: bool| match after.iter_mut().find(|(known, _)| *known == task) {
            Some((_, known)) => *known |= is_data,
            None => after.push((task, is_data)),
        };
        users.writer.into_iter().for_each(|writer| add(writer, true));
        if access == Access::Write {
            users.readers.drain(..).for_each(|reader| add(reader, false));
            users.writer = Some(number);
        } else {
            users.readers.push(number);
        }
    }

    pub(super) fn begin_on(&self, dev: &Device) -> Result<Event> {
        let is_new = self.0.lock().zero.get(dev.index()).is_some_and(Option::is_none);
        if is_new {
            let look = || -> Result<_> {
                let began = Instant::now();
                let event = dev.record_timed()?;
                dev.synchronize()?;
                Ok((began.elapsed(), event, Instant::now()))
            };
            // The system may take the core between the event and the clock: the shortest look is the best one.
            let looks = [look()?, look()?, look()?];
            let best = looks.into_iter().min_by_key(|(took, ..)| *took);
            let mut data = self.0.lock();
            let start = data.start;
            if let Some(zero) = data.zero.get_mut(dev.index()) {
                *zero = best.zip(start).map(|((_, event, now), start)| (event, now.saturating_duration_since(start)));
            }
        }
        dev.record_timed()
    }

    pub(super) fn finish(&self, number: usize, times: Option<Times>, has_failed: bool) {
        if let Some(entry) = self.0.lock().tasks.get_mut(number) {
            (entry.times, entry.has_failed) = (times, has_failed);
        }
    }

    pub(super) fn resolve(&self) {
        let Data { start, tasks, zero, .. } = &mut *self.0.lock();
        let Some(start) = *start else { return };
        for entry in tasks {
            entry.span = match entry.times.take() {
                None => None,
                Some(Times::Host(began, ended)) => {
                    Some((began.saturating_duration_since(start), ended.saturating_duration_since(start)))
                }
                Some(Times::Device(began, ended)) => {
                    zero.get(entry.place).and_then(Option::as_ref).and_then(|(event, offset)| {
                        let at = |other: &Event| other.elapsed_since(event).map(|time| *offset + time).ok();
                        at(&began).zip(at(&ended))
                    })
                }
            };
        }
        // They hold events of the devices.
        zero.clear();
    }

    /// The number of tasks.
    pub fn len(&self) -> usize {
        self.0.lock().tasks.len()
    }

    /// Whether there are no tasks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The graph and the times in the Chrome trace format, as JSON: <https://ui.perfetto.dev> opens it.
    ///
    /// There is a row for each device's tasks, for its copies in each direction, and for each task of the CPU that runs
    /// beside others. A box has its task's name. Arrows lead from a task to those after it: those of category `data`
    /// carry a value, those of category `order` only order a write after reads. Tasks that did not run are not in it.
    pub fn to_chrome_trace(&self) -> String {
        let data = self.0.lock();
        let mut ran: Vec<(usize, &Entry, (Duration, Duration))> =
            data.tasks.iter().enumerate().filter_map(|(number, task)| Some((number, task, task.span?))).collect();
        ran.sort_by_key(|(_, _, span)| *span);
        let mut trace = ChromeTrace::default();
        for place in 0..=data.devices {
            let name = if place == data.devices { "CPU".to_owned() } else { format!("GPU {place}") };
            trace.name_process(place, &name);
        }
        // By row: its place, its stream, and the end of its last task.
        let mut rows: Vec<(usize, StreamKind, Duration)> = Vec::new();
        let mut shown: HashMap<usize, (Row, Duration)> = HashMap::new();
        for &(number, task, (start, end)) in &ran {
            // Tasks of one place that overlap stand below each other.
            let free = |&(place, stream, last): &(usize, StreamKind, Duration)| {
                (place, stream) == (task.place, task.stream) && last <= start
            };
            let thread = rows.iter().position(free).unwrap_or_else(|| {
                rows.push((task.place, task.stream, Duration::ZERO));
                trace.name_row(Row { process: task.place, thread: rows.len() - 1 }, &data.row(task));
                rows.len() - 1
            });
            rows[thread].2 = end;
            let row = Row { process: task.place, thread };
            let state = if task.has_failed { "failed" } else { "ran" };
            trace.slice(row, &task.name, state, (start, end), json!({ "task": number }));
            shown.insert(number, (row, start));
        }
        for (number, task, _) in ran {
            for (before, is_data) in &task.after {
                if let Some(&from) = shown.get(before) {
                    let category = if *is_data { "data" } else { "order" };
                    trace.arrow(from, shown[&number], &format!("t{before} -> t{number}"), category);
                }
            }
        }
        trace.finish()
    }
}

impl Data {
    fn row(&self, task: &Entry) -> String {
        if task.place == self.devices {
            return "CPU".to_owned();
        }
        let stream = match task.stream {
            StreamKind::Compute => "",
            StreamKind::Upload => " upload",
            StreamKind::Download => " download",
            StreamKind::Peer => " copy",
        };
        format!("GPU {}{stream}", task.place)
    }
}
