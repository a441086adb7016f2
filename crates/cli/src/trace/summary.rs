//! The sums of a trace: how busy each GPU was, how much of its communication nothing hid, and the longest waits.
//!
//! The rows of a GPU's streams have its work; the row of its thread has the calls. Work of a stream is communication if
//! its call is one of the collectives that the threads have called.

use super::read::Event;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};

/// All times are in microseconds.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub version: u32,
    pub events: usize,
    /// False if the program was killed.
    pub whole: bool,
    /// From the first slice's begin to the last one's end.
    pub span_us: f64,
    pub gpus: Vec<Gpu>,
    /// The longest first.
    pub waits: Vec<Wait>,
    /// Those that took the most of the GPUs' time first.
    pub work: Vec<Work>,
}

#[derive(Debug, Serialize)]
pub struct Gpu {
    pub name: String,
    /// Any stream worked.
    pub busy_us: f64,
    /// Any stream communicated.
    pub communication_us: f64,
    /// A stream communicated, and no other one worked.
    pub exposed_us: f64,
    /// The GPU's thread waited.
    pub thread_waits_us: f64,
}

#[derive(Debug, Serialize)]
pub struct Wait {
    pub row: String,
    pub name: String,
    pub start_us: f64,
    pub us: f64,
    pub place: Option<String>,
    pub cause: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Work {
    pub kind: String,
    pub name: String,
    pub count: usize,
    pub us: f64,
}

type Span = (f64, f64);

#[derive(Default)]
struct Spans {
    computation: Vec<Span>,
    communication: Vec<Span>,
    waits: Vec<Span>,
}

pub fn summary(events: &[Event], whole: bool, most: usize) -> Summary {
    let named = |what| events.iter().filter(move |event| event.ph == "M" && event.name == what);
    let rows: BTreeMap<(u64, u64), &str> =
        named("thread_name").filter_map(|event| Some(((event.pid, event.tid), event.args.name.as_deref()?))).collect();
    let hosts: BTreeMap<u64, &str> =
        named("process_name").filter_map(|event| Some((event.pid, event.args.name.as_deref()?))).collect();
    let slices: Vec<&Event> = events.iter().filter(|event| event.ph == "X").collect();
    let calls: HashSet<&str> =
        slices.iter().filter(|slice| slice.cat == "collective").map(|slice| call(slice)).collect();
    let mut gpus = BTreeMap::<(u64, usize), Spans>::new();
    let (mut waits, mut work) = (Vec::new(), BTreeMap::<(&str, &str), (usize, f64)>::new());
    for &slice in &slices {
        let row = rows.get(&(slice.pid, slice.tid)).copied().unwrap_or("a thread");
        let is_wait = slice.cat == "wait";
        if is_wait {
            waits.push((slice, row));
        }
        let Some((gpu, is_stream)) = gpu_of(row) else { continue };
        let spans = gpus.entry((slice.pid, gpu)).or_default();
        let span = (slice.ts, slice.ts + slice.dur);
        match (is_stream, is_wait) {
            (false, true) => spans.waits.push(span),
            (true, false) => {
                let communicates = slice.cat == "collective" || calls.contains(call(slice));
                if communicates { &mut spans.communication } else { &mut spans.computation }.push(span);
                let (count, time) = work.entry((&slice.cat, &slice.name)).or_default();
                (*count, *time) = (*count + 1, *time + slice.dur);
            }
            _ => {}
        }
    }
    let start = slices.iter().map(|slice| slice.ts).fold(f64::INFINITY, f64::min);
    let end = slices.iter().map(|slice| slice.ts + slice.dur).fold(start, f64::max);
    let host = |pid: &u64| match hosts.len() {
        0 | 1 => String::new(),
        _ => format!("{}, ", hosts.get(pid).copied().unwrap_or("a host")),
    };
    waits.sort_by(|(a, _), (b, _)| b.dur.total_cmp(&a.dur));
    let mut work: Vec<Work> = work
        .into_iter()
        .map(|((kind, name), (count, us))| Work { kind: kind.to_owned(), name: name.to_owned(), count, us })
        .collect();
    work.sort_by(|a, b| b.us.total_cmp(&a.us));
    work.truncate(most);
    let gpu = |((pid, gpu), spans): (&(u64, usize), &Spans)| {
        let (computation, communication) = (length(&spans.computation), length(&spans.communication));
        let busy = length(&[&spans.computation[..], &spans.communication].concat());
        Gpu {
            name: format!("{}GPU {gpu}", host(pid)),
            busy_us: busy,
            communication_us: communication,
            exposed_us: busy - computation,
            thread_waits_us: length(&spans.waits),
        }
    };
    Summary {
        version: 1,
        events: events.len(),
        whole,
        span_us: if slices.is_empty() { 0.0 } else { end - start },
        gpus: gpus.iter().map(gpu).collect(),
        waits: waits
            .into_iter()
            .take(most)
            .map(|(slice, row)| Wait {
                row: format!("{}{row}", host(&slice.pid)),
                name: slice.args.op.clone().unwrap_or_else(|| slice.name.clone()),
                start_us: slice.ts - start,
                us: slice.dur,
                place: slice.args.place.clone(),
                cause: slice.args.cause.clone(),
            })
            .collect(),
        work,
    }
}

/// The call that a slice belongs to.
fn call(slice: &Event) -> &str {
    slice.args.op.as_deref().unwrap_or(&slice.name)
}

/// The GPU of a row, and whether it is a stream: `GPU 0 thread`, `GPU 0 stream 1`.
fn gpu_of(row: &str) -> Option<(usize, bool)> {
    let (gpu, what) = row.strip_prefix("GPU ")?.split_once(' ')?;
    Some((gpu.parse().ok()?, what.starts_with("stream")))
}

/// The length of the union of spans.
fn length(spans: &[Span]) -> f64 {
    let mut sorted = spans.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut sum, mut covered) = (0.0, f64::NEG_INFINITY);
    for (start, end) in sorted {
        sum += (end - start.max(covered)).max(0.0);
        covered = covered.max(end);
    }
    sum
}
