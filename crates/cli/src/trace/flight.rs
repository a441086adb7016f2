//! Flight records (`GpuPool::flight_record`) for `gpu-pool trace`: those of one hang, of one process or of several, on
//! one axis of time. Processes of a cluster tell by rank 0's clock when their records were made.

use super::{left, table};
use serde::{Deserialize, Serialize};

/// A record's JSON; the guide's page "My program hangs" has the fields.
#[derive(Deserialize)]
pub struct Record {
    reason: String,
    missing: Vec<usize>,
    pid: u32,
    process: Option<usize>,
    unix_seconds: f64,
    devices: Vec<Device>,
}

#[derive(Deserialize)]
struct Device {
    device: usize,
    now_us: f64,
    streams: Vec<Stream>,
    records: Vec<Entry>,
}

#[derive(Deserialize)]
struct Stream {
    stream: u64,
    submitted: u64,
    completed: u64,
}

#[derive(Deserialize)]
struct Entry {
    kind: String,
    op: String,
    call: String,
    file: String,
    line: u32,
    column: u32,
    bytes: u64,
    members: Vec<usize>,
    awaited: Option<usize>,
    algorithm: Option<String>,
    stream: u64,
    begin_us: f64,
    ended: bool,
    end_us: Option<f64>,
    done: Option<bool>,
}

/// Times are in milliseconds.
#[derive(Debug, Default, Serialize)]
pub struct Summary {
    pub version: u32,
    /// Why the records were made, by process.
    pub reasons: Vec<String>,
    /// Those that are missing first.
    pub devices: Vec<Now>,
    /// Streams with work that is not known to be done.
    pub open: Vec<Open>,
    /// The last calls of each device, the oldest first.
    pub calls: Vec<Call>,
}

/// The present call of a device's thread.
#[derive(Debug, Serialize)]
pub struct Now {
    pub device: String,
    /// Others wait for it, and it does not wait.
    pub missing: bool,
    pub state: String,
    pub place: Option<String>,
    pub for_ms: Option<f64>,
}

#[derive(Debug, Serialize)]
pub struct Open {
    pub device: String,
    pub stream: u64,
    pub operations: u64,
    /// The oldest one that is still in the record.
    pub first: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Call {
    /// Before the last record was made.
    pub ago_ms: f64,
    pub device: String,
    pub call: String,
    pub place: String,
    pub ended: bool,
    pub took_ms: Option<f64>,
    /// Whether the device is known to have carried it out.
    pub done: Option<bool>,
}

impl Entry {
    fn text(&self) -> String {
        let Entry { op, call, bytes, members, .. } = self;
        let mut text = match self.awaited {
            Some(device) => return format!("waits for device {device} in {call}"),
            None if op == call => op.clone(),
            None => format!("{op} of {call}"),
        };
        if *bytes > 0 {
            text += &format!(", {bytes} bytes");
        }
        if !members.is_empty() {
            text += &format!(", devices {members:?}");
        }
        self.algorithm.iter().for_each(|name| text += &format!(", by {name}"));
        text
    }

    fn place(&self) -> String {
        format!("{}:{}:{}", self.file, self.line, self.column)
    }
}

impl Device {
    fn now(&self, device: String, missing: bool) -> Now {
        let open = self.records.iter().rposition(|entry| !entry.ended);
        let state = match open.map(|at| (&self.records[at], &self.records[at + 1..])) {
            None => "runs no closure".to_owned(),
            Some((closure, later)) if closure.kind == "scope" => {
                let last = later.iter().rfind(|entry| entry.kind == "call");
                let last = last.map_or("none".to_owned(), |last| format!("{} ({})", last.text(), last.place()));
                format!("runs its closure; last call: {last}")
            }
            Some((wait, _)) if wait.awaited.is_some() => wait.text(),
            Some((call, _)) => format!("is in {}", call.text()),
        };
        let open = open.map(|at| &self.records[at]);
        let for_ms = open.map(|open| (self.now_us - open.begin_us) / 1e3);
        Now { device, missing, state, place: open.map(Entry::place), for_ms }
    }

    fn open(&self, device: &str) -> impl Iterator<Item = Open> {
        self.streams.iter().filter(|stream| stream.completed < stream.submitted).map(move |stream| {
            let first = self.records.iter().find(|entry| entry.stream == stream.stream && entry.done == Some(false));
            let first = first.map(|first| format!("{} ({})", first.text(), first.place()));
            let operations = stream.submitted - stream.completed;
            Open { device: device.to_owned(), stream: stream.stream, operations, first }
        })
    }
}

/// `most`: calls of each device. Of several records of one process the last one counts.
pub fn summary(mut records: Vec<Record>, most: usize) -> Summary {
    records.sort_by(|a, b| (a.process, a.pid).cmp(&(b.process, b.pid)).then(a.unix_seconds.total_cmp(&b.unix_seconds)));
    let last = records.iter().map(|record| record.unix_seconds).fold(0.0, f64::max);
    let process = |record: &Record| match record.process {
        Some(number) => format!("process {number}"),
        None => format!("pid {}", record.pid),
    };
    let before = |record: &Record| (last - record.unix_seconds) * 1e3;
    let reason = |record: &Record| format!("{}, {:.1} ms ago: {}", process(record), before(record), record.reason);
    let mut all = Summary { version: 1, reasons: records.iter().map(reason).collect(), ..Summary::default() };
    let newest: Vec<_> =
        records.chunk_by(|a, b| (a.process, a.pid) == (b.process, b.pid)).filter_map(<[_]>::last).collect();
    for record in &newest {
        let one_of = if newest.len() > 1 { format!("{}, ", process(record)) } else { String::new() };
        for log in &record.devices {
            let device = format!("{one_of}device {}", log.device);
            all.devices.push(log.now(device.clone(), record.missing.contains(&log.device)));
            all.open.extend(log.open(&device));
            let calls = &log.records[log.records.len().saturating_sub(most)..];
            all.calls.extend(calls.iter().map(|entry| Call {
                ago_ms: (log.now_us - entry.begin_us) / 1e3 + before(record),
                device: device.clone(),
                call: entry.text(),
                place: entry.place(),
                took_ms: entry.end_us.map(|end| (end - entry.begin_us) / 1e3),
                ended: entry.ended,
                done: entry.done,
            }));
        }
    }
    all.devices.sort_by_key(|device| !device.missing);
    all.calls.sort_by(|a, b| b.ago_ms.total_cmp(&a.ago_ms));
    all
}

pub fn shown(summary: &Summary) -> String {
    let ms = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
    let mut text = summary.reasons.join("\n") + "\n";
    let mut devices = table(&["", "", "for ms", "at", "now"]);
    for Now { device, missing, state, place, for_ms } in &summary.devices {
        let missing = if *missing { "MISSING" } else { "" };
        devices.add_row([&**device, missing, &*ms(*for_ms), place.as_deref().unwrap_or("-"), state]);
    }
    left(&mut devices, &[1, 3, 4]);
    text += &format!("\n{}\n", devices.trim_fmt());
    if !summary.open.is_empty() {
        let mut open = table(&["not known to be done", "operations", "from"]);
        for stream in &summary.open {
            let from = stream.first.as_deref().unwrap_or("one that was overwritten");
            let name = format!("{}, stream {}", stream.device, stream.stream);
            open.add_row([&*name, &*stream.operations.to_string(), from]);
        }
        left(&mut open, &[2]);
        text += &format!("\n{}\n", open.trim_fmt());
    }
    let mut calls = table(&["last calls", "ms ago", "took ms", "call"]);
    for call in &summary.calls {
        let end = match (call.ended, call.done) {
            (false, _) => ", NOT OVER",
            (true, Some(false)) => ", not known to be done",
            _ => "",
        };
        let text = format!("{} ({}){end}", call.call, call.place);
        calls.add_row([&*call.device, &*ms(Some(call.ago_ms)), &*ms(call.took_ms), &*text]);
    }
    left(&mut calls, &[3]);
    text + &format!("\n{}\n", calls.trim_fmt())
}
