//! [`TaskTrace`]: which tasks there were, what they depended on, and when they ran. As DOT and as SVG.
//!
//! Users make one and give it to [`Tasks::trace`](super::Tasks::trace). A task of a device has the times of its work on
//! the device, by timing events on its stream; a task of the CPU has the host's. To place them on one axis, each device
//! is synchronised once, before its first task.

use super::{engine::Lane, graph::Access, svg};
use crate::{
    Device, Event,
    error::{Result, Site},
};
use parking_lot::Mutex;
use std::{
    fmt::Write,
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
    lane: Lane,
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

    /// Starts it anew.
    pub(super) fn begin(&self, devices: usize) {
        let zero = (0..devices).map(|_| None).collect();
        *self.0.lock() = Data { start: Some(Instant::now()), devices, tasks: Vec::new(), zero };
    }

    /// A new task; returns its number.
    pub(super) fn add(&self, place: usize, lane: Lane, site: Site, name: Option<&str>) -> usize {
        let name = name.map_or_else(|| format!("{}:{}", site.file(), site.line()), str::to_owned);
        let mut data = self.0.lock();
        let entry = Entry { name, place, lane, after: Vec::new(), times: None, span: None, has_failed: false };
        data.tasks.push(entry);
        data.tasks.len() - 1
    }

    /// A task uses a variable.
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

    /// The begin of a task's work on a device, on its current stream.
    pub(super) fn begin_on(&self, dev: &Device) -> Result<Event> {
        let is_new = self.0.lock().zero.get(dev.index()).is_some_and(Option::is_none);
        if is_new {
            let event = dev.record_timed()?;
            dev.synchronize()?;
            let mut data = self.0.lock();
            let now = data.start.map_or(Duration::ZERO, |start| start.elapsed());
            if let Some(zero) = data.zero.get_mut(dev.index()) {
                *zero = Some((event, now));
            }
        }
        dev.record_timed()
    }

    pub(super) fn finish(&self, number: usize, times: Option<Times>, has_failed: bool) {
        if let Some(entry) = self.0.lock().tasks.get_mut(number) {
            (entry.times, entry.has_failed) = (times, has_failed);
        }
    }

    /// Computes all times. All work is over.
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

    /// The graph in Graphviz's language: `dot -Tsvg tasks.dot` draws it. Solid arrows carry a value; dashed ones only
    /// order a write after reads. A task that has failed, or did not run since it depends on one, is red.
    pub fn to_dot(&self) -> String {
        let data = self.0.lock();
        let mut dot =
            String::from("digraph tasks {\n  rankdir=LR;\n  node [shape=box, style=filled, fillcolor=white];\n");
        for (number, task) in data.tasks.iter().enumerate() {
            let (name, row) = (task.name.replace('\\', "\\\\").replace('"', "\\\""), data.row(task));
            let color = data.fill(task);
            // Writing to a string cannot fail.
            let _ = writeln!(dot, "  t{number} [label=\"{name}\\n{row}\", fillcolor=\"{color}\"];");
            for (before, is_data) in &task.after {
                let style = if *is_data { "" } else { " [style=dashed]" };
                let _ = writeln!(dot, "  t{before} -> t{number}{style};");
            }
        }
        dot.push_str("}\n");
        dot
    }

    /// The times as an SVG document: time from left to right, a row for each device's tasks, for its copies in each
    /// direction, and for each task of the CPU that runs beside others. A box has its task's name as a label where
    /// there is room, and always as a tooltip with its times. Tasks that did not run are not in it.
    pub fn to_svg(&self) -> String {
        let data = self.0.lock();
        let mut rows: Vec<Row> = Vec::new();
        let mut ran: Vec<(&Entry, (Duration, Duration))> =
            data.tasks.iter().filter_map(|task| task.span.map(|span| (task, span))).collect();
        ran.sort_by_key(|(_, span)| *span);
        for (task, (start, end)) in ran {
            let fill = data.fill(task);
            let bar = svg::Bar { label: task.name.clone(), start, end, fill };
            let own = |row: &&mut Row| (row.place, row.lane) == (task.place, task.lane);
            // Tasks of one place that overlap stand below each other.
            let free = |row: &&mut Row| row.bars.last().is_none_or(|last| last.end <= start);
            match rows.iter_mut().find(|row| own(row) && free(row)) {
                Some(row) => row.bars.push(bar),
                None => {
                    let depth = rows.iter_mut().filter(own).count();
                    rows.push(Row { place: task.place, lane: task.lane, depth, name: data.row(task), bars: vec![bar] });
                }
            }
        }
        rows.sort_by_key(|row| (row.place, row.lane, row.depth));
        svg::rows(&rows.into_iter().map(|row| (row.name, row.bars)).collect::<Vec<_>>())
    }
}

/// A row of the picture.
struct Row {
    place: usize,
    lane: Lane,
    /// Its number among the rows of its place.
    depth: usize,
    name: String,
    bars: Vec<svg::Bar>,
}

impl Data {
    fn fill(&self, task: &Entry) -> &'static str {
        match task.lane {
            _ if task.has_failed => "#f4a3a3",
            _ if task.place == self.devices => "#8cc084",
            Lane::Compute => "#7fb3e6",
            Lane::Upload => "#f7c873",
            Lane::Download => "#f4a259",
            Lane::Peer => "#c9a0dc",
        }
    }

    fn row(&self, task: &Entry) -> String {
        if task.place == self.devices {
            return "CPU".to_owned();
        }
        let lane = match task.lane {
            Lane::Compute => "",
            Lane::Upload => " upload",
            Lane::Download => " download",
            Lane::Peer => " copy",
        };
        format!("GPU {}{lane}", task.place)
    }
}
