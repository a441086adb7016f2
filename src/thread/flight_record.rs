//! Flight records: the last calls of the devices of a pool, as a text for people and as JSON.
//!
//! A program asks for one ([`GpuPool::flight_record`](crate::GpuPool::flight_record)). A gang that fails by a deadline,
//! a deadlock or a panic writes one, and so does a scope that waits for closures without progress ([`Recorder`]).
//!
//! Invariant: reading waits for no device and makes no driver call, so it works while a device hangs.

use crate::memory::{
    DeviceHandle, StreamState,
    calls::{End, Kind, Record},
};
use crate::sync::{Scale, ticks};
use crate::{driver::host, error::Error, fabric::Processes, gang::Witness, panics, timeline::WallClock};
use std::{
    fmt, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::{Duration, SystemTime},
};

/// The version of the JSON format.
#[cfg(feature = "insight")]
const VERSION: u32 = 1;
/// Records of each device in a brief text.
const BRIEF: usize = 4;
/// So many processes tell their last words about a failure, and are asked for them: the first ones that it names.
const MOST_ASKED: usize = 8;

/// The last operations of a pool's devices, from [`GpuPool::flight_record`](crate::GpuPool::flight_record). Its
/// `Display` is a text for people, brief by `{:#}`. With the feature `insight`, [`to_json`](Self::to_json) has it all.
#[derive(Clone, Debug)]
pub struct FlightRecord {
    reason: String,
    missing: Vec<usize>,
    process: Option<usize>,
    #[cfg_attr(not(feature = "insight"), allow(dead_code, reason = "only the JSON has it"))]
    at: SystemTime,
    devices: Vec<DeviceLog>,
    /// Processes that were asked for their last words.
    asked: Vec<usize>,
}

#[derive(Clone, Debug)]
struct DeviceLog {
    device: usize,
    name: String,
    /// The time when it was read, on the clock of the records.
    now: Duration,
    /// The number of the next record.
    next: u64,
    records: Vec<Record>,
    streams: Vec<StreamState>,
}

impl DeviceLog {
    fn of(handle: &DeviceHandle) -> Self {
        let mut records = Vec::new();
        let next = handle.calls.get().map_or(0, |calls| calls.read(|record| records.push(record)));
        let virtual_end = handle.in_virtual_time().then(|| host::virtual_end(&*handle.driver)).flatten();
        let now = virtual_end.unwrap_or_else(|| Scale::now().time(ticks()));
        let (device, name) = (handle.device, handle.driver.info().name.clone());
        DeviceLog { device, name, now, next, records, streams: handle.stream_states() }
    }

    /// The present call of the device's thread.
    fn open(&self) -> Option<&Record> {
        self.records.iter().rev().find(|record| record.end == End::NotYet)
    }

    /// The other device that it waits for.
    fn awaits(&self) -> Option<usize> {
        self.open().filter(|open| open.kind == Kind::Wait)?.awaited.filter(|&device| device != self.device)
    }

    /// Whether an operation is known to be done on the device. `None`: it is none of a stream that is there.
    fn is_done(&self, record: &Record) -> Option<bool> {
        let stream = self.streams.iter().find(|stream| record.sequence > 0 && stream.id == record.stream)?;
        Some(stream.completed >= record.sequence)
    }

    fn ago(&self, time: Duration) -> Span {
        Span(self.now.saturating_sub(time))
    }

    fn write_state(&self, f: &mut fmt::Formatter<'_>, missing: bool) -> fmt::Result {
        write!(f, "device {} {}", self.device, if missing { "is MISSING: it " } else { "" })?;
        match self.open() {
            None => f.write_str("runs no closure")?,
            Some(closure) if closure.kind == Kind::Scope => {
                let calls = |record: &&Record| record.kind == Kind::Call && record.number > closure.number;
                let last = self.records.iter().rev().find(calls).map_or("none".to_owned(), Record::to_string);
                let (site, since) = (closure.site, self.ago(closure.begin));
                write!(f, "runs the closure of {site} for {since}, outside of this crate; its last call: {last}")?;
            }
            Some(wait) if wait.kind == Kind::Wait => write!(f, "{wait}, for {}", self.ago(wait.begin))?,
            Some(call) => write!(f, "is in {call}, for {}", self.ago(call.begin))?,
        }
        writeln!(f)?;
        for stream in self.streams.iter().filter(|stream| stream.completed < stream.submitted) {
            let is_open = |record: &&Record| record.stream == stream.id && self.is_done(record) == Some(false);
            let open = self.records.iter().find(is_open);
            let StreamState { id, submitted, completed } = stream;
            write!(f, "  stream {id}: {completed} of {submitted} operations are known to be done")?;
            open.map_or(Ok(()), |open| write!(f, "; the next one: {open}"))?;
            writeln!(f)?;
        }
        Ok(())
    }

    fn write_records(&self, f: &mut fmt::Formatter<'_>, most: usize) -> fmt::Result {
        let shown = &self.records[self.records.len().saturating_sub(most)..];
        let Some(first) = self.records.first() else { return Ok(()) };
        let (device, next) = (self.device, self.next);
        let (since, lost) = (self.ago(first.begin), first.number);
        let name = &self.name;
        writeln!(f, "device {device} ({name}): {next} records, the first {lost} overwritten; from {since} ago:")?;
        for record in shown {
            let done = match (self.is_done(record), record.end) {
                (_, End::NotYet) => ", NOT OVER",
                (Some(false), _) => ", not known to be done on the device",
                _ => "",
            };
            let took = match record.end {
                End::At(end) => format!(", took {}", Span(end.saturating_sub(record.begin))),
                _ => String::new(),
            };
            writeln!(f, "  {:>6} {:>9} ago: {record}{took}{done}", record.number, self.ago(record.begin).to_string())?;
        }
        Ok(())
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.kind, self.awaited) {
            (Kind::Wait, Some(device)) => write!(f, "waits for device {device} in {}", self.call)?,
            _ if self.op == self.call => f.write_str(self.op)?,
            _ => write!(f, "{} of {}", self.op, self.call)?,
        }
        if self.bytes > 0 && self.kind == Kind::Call {
            write!(f, ", {} bytes", self.bytes)?;
        }
        if self.members > 0 {
            write!(f, ", devices {:?}", members(self.members))?;
        }
        if let Some(algorithm) = self.algorithm {
            write!(f, ", by {algorithm}")?;
        }
        write!(f, " at {}", self.site)
    }
}

/// A time for people.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs_f64() {
            s if s >= 1.0 => write!(f, "{s:.2} s"),
            s if s >= 1e-3 => write!(f, "{:.1} ms", s * 1e3),
            s => write!(f, "{:.1} us", s * 1e6),
        }
    }
}

fn members(mask: u64) -> Vec<usize> {
    (0..64).filter(|member| mask >> member & 1 == 1).collect()
}

impl FlightRecord {
    /// Why it was made: an error's text, or the name of a call.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The devices that others wait for and that do not wait themselves; those that the error names, if it is by one.
    pub fn missing(&self) -> &[usize] {
        &self.missing
    }

    /// All of it, in a format that has a version. [The guide](https://docs.rs/gpu-pool) describes it on the page "My
    /// program hangs".
    #[cfg(feature = "insight")]
    pub fn to_json(&self) -> String {
        use serde_json::json;
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let record = |log: &DeviceLog, record: &Record| {
            let (kind, end) = (format!("{:?}", record.kind).to_lowercase(), record.end);
            let end_us = if let End::At(end) = end { Some(micros(end)) } else { None };
            json!({
                "number": record.number, "kind": kind, "op": record.op, "call": record.call,
                "file": record.site.file(), "line": record.site.line(), "column": record.site.column(),
                "bytes": record.bytes, "members": members(record.members), "awaited": record.awaited,
                "algorithm": record.algorithm, "stream": record.stream, "sequence": record.sequence,
                "begin_us": micros(record.begin), "ended": end != End::NotYet, "end_us": end_us,
                "done": log.is_done(record),
            })
        };
        let stream = |stream: &StreamState| {
            let StreamState { id, submitted, completed } = *stream;
            json!({ "stream": id, "submitted": submitted, "completed": completed })
        };
        let device = |log: &DeviceLog| {
            json!({
                "device": log.device, "name": log.name, "now_us": micros(log.now), "next": log.next,
                "first": log.records.first().map(|record| record.number),
                "streams": log.streams.iter().map(stream).collect::<Vec<_>>(),
                "records": log.records.iter().map(|one| record(log, one)).collect::<Vec<_>>(),
            })
        };
        let unix = self.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let all = json!({
            "gpu_pool_flight_record": VERSION, "reason": self.reason, "missing": self.missing,
            "pid": std::process::id(), "process": self.process, "unix_seconds": unix.as_secs_f64(),
            "devices": self.devices.iter().map(device).collect::<Vec<_>>(),
        });
        all.to_string()
    }
}

impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let process = self.process.map_or_else(String::new, |process| format!(" (process {process} of the cluster)"));
        writeln!(f, "flight record of pid {}{process}: {}", std::process::id(), self.reason)?;
        for log in &self.devices {
            log.write_state(f, self.missing.contains(&log.device))?;
        }
        let most = if f.alternate() { BRIEF } else { usize::MAX };
        self.devices.iter().try_for_each(|log| log.write_records(f, most))?;
        let last =
            |process: &usize| writeln!(f, "process {process} was asked for its last words: they follow, if it answers");
        self.asked.iter().try_for_each(last)
    }
}

/// Makes the records of a pool, and writes them.
pub(crate) struct Recorder {
    handles: Vec<Arc<DeviceHandle>>,
    /// The number of this process in its cluster.
    process: Option<usize>,
    /// What rank 0's wall clock and this process's own showed when the pool was built.
    clocks: Option<(SystemTime, SystemTime)>,
    world: Option<Weak<dyn Processes>>,
    /// Where files go.
    to: Option<PathBuf>,
}

impl Recorder {
    pub(crate) fn new(handles: &[Arc<DeviceHandle>], world: Option<&Arc<dyn Processes>>, to: Option<PathBuf>) -> Self {
        let own = |WallClock { at, wall, .. }| Some((wall, SystemTime::now().checked_sub(at.elapsed())?));
        let clocks = world.and_then(|world| own(world.clock()?));
        let process = world.map(|world| world.host());
        Recorder { handles: handles.to_vec(), process, clocks, world: world.map(Arc::downgrade), to }
    }

    pub(crate) fn look(&self, reason: &str, missing: Option<&[usize]>) -> FlightRecord {
        let devices: Vec<_> = self.handles.iter().map(|handle| DeviceLog::of(handle)).collect();
        let missing = missing.map_or_else(|| awaited(&devices), <[usize]>::to_vec);
        let now = SystemTime::now();
        // By the wall's clock, which also runs while the machine sleeps.
        let at = self.clocks.and_then(|(theirs, own)| match now.duration_since(own) {
            Ok(since) => theirs.checked_add(since),
            Err(before) => theirs.checked_sub(before.duration()),
        });
        let at = at.unwrap_or(now);
        FlightRecord { reason: reason.to_owned(), missing, process: self.process, at, devices, asked: Vec::new() }
    }

    /// Writes a record: to files if the pool has a place for them, else to the log. Returns the file.
    pub(crate) fn write(&self, record: &FlightRecord) -> Option<PathBuf> {
        match &self.to {
            Some(to) => match self.write_files(to, record) {
                Ok(path) => {
                    let (file, reason) = (path.display(), &record.reason);
                    event!(error, "flight_record", %file, %reason, "a flight record was written");
                    return Some(path);
                }
                Err(error) => {
                    event!(
                        error, "flight_record_not_written", %error,
                        "a flight record could not be written: {record:#}"
                    )
                }
            },
            None => event!(error, "flight_record", "{record:#}"),
        }
        None
    }

    /// The processes that a failure is about, and its text in all of them. Only a time makes a text unique.
    fn about(&self, cause: &Error) -> (Vec<usize>, String) {
        match cause {
            Error::Timeout { .. } => (self.process.into_iter().collect(), cause.to_string()),
            Error::HostTimeout { missing, .. } => (missing.clone(), cause.to_string()),
            Error::AbortedByHost { host, cause, .. } if cause.contains("no progress") => (vec![*host], cause.clone()),
            _ => (Vec::new(), String::new()),
        }
    }

    /// If a failure is about this process, it tells its last words.
    fn tell(&self, record: &FlightRecord, (about, failure): &(Vec<usize>, String)) {
        let Some(world) = self.world.as_ref().and_then(Weak::upgrade) else { return };
        if about.iter().take(MOST_ASKED).any(|&process| process == world.host()) {
            world.tell(failure, &format!("{record:#}"));
        }
    }

    /// The last words of other processes go behind the record.
    fn ask(&self, record: &FlightRecord, failure: &str, file: Option<&Path>) {
        let Some(world) = self.world.as_ref().and_then(Weak::upgrade) else { return };
        for &process in &record.asked {
            let file = file.map(Path::to_owned);
            let hear = move |words: &str| {
                let words = format!("\nlast words of process {process}:\n{words}");
                let open = |file| fs::OpenOptions::new().append(true).open(file);
                match file.map(|file| open(file)?.write_all(words.as_bytes())) {
                    Some(Ok(())) => {}
                    _ => event!(error, "flight_record", "{words}"),
                }
            };
            world.when_told(process, failure, Box::new(hear));
        }
    }

    /// Never overwrites a file: the first free number is taken.
    fn write_files(&self, to: &Path, record: &FlightRecord) -> io::Result<PathBuf> {
        let process = self.process.map_or_else(String::new, |process| format!("process{process}-"));
        let name = |number: usize| format!("{process}{}-{number}", std::process::id());
        let (folder, start) = match to.is_dir() {
            true => (to, "gpu-pool-".to_owned()),
            false => {
                let start = to.file_name().unwrap_or_default().to_string_lossy();
                (to.parent().unwrap_or(Path::new("")), format!("{start}-"))
            }
        };
        let free = |number| {
            let file = folder.join(format!("{start}{}.txt", name(number)));
            match fs::File::create_new(&file) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                made => Some(made.map(|made| (made, file))),
            }
        };
        let (mut text, file) = (0..).find_map(free).expect("a free number")?;
        text.write_all(record.to_string().as_bytes())?;
        #[cfg(feature = "insight")]
        if let Err(error) = fs::write(file.with_extension("json"), record.to_json()) {
            event!(error, "flight_record_not_written", %error, "a flight record has its text alone, and no JSON");
        }
        Ok(file)
    }
}

/// The devices that others wait for, and that do not wait themselves.
fn awaited(devices: &[DeviceLog]) -> Vec<usize> {
    let awaited: Vec<_> = devices.iter().filter_map(DeviceLog::awaits).collect();
    let missing = |log: &&DeviceLog| awaited.contains(&log.device) && log.awaits().is_none();
    devices.iter().filter(missing).map(|log| log.device).collect()
}

impl Witness for Recorder {
    fn look(&self, cause: &Error) -> Option<Box<dyn FnOnce() + '_>> {
        let missing = match cause {
            Error::Timeout { missing, .. } => Some(&**missing),
            Error::Deadlock { .. } | Error::Panicked { .. } => None,
            Error::HostTimeout { .. } | Error::HostLost { .. } => None,
            // Another process has told its text.
            Error::AbortedByHost { cause, .. }
                if ["no progress", "deadlock", "panicked"].iter().any(|hang| cause.contains(hang)) =>
            {
                None
            }
            _ => return None,
        };
        // Machines that look for failures find many.
        let searches = panics::is_silenced() || self.handles[0].stepped || self.handles[0].in_virtual_time();
        if self.to.is_none() && searches {
            return None;
        }
        let (mut record, about) = (Recorder::look(self, &cause.to_string(), missing), self.about(cause));
        Some(Box::new(move || {
            self.tell(&record, &about);
            let (about, failure) = about;
            let asked = about.into_iter().take(MOST_ASKED);
            record.asked = asked.filter(|&process| Some(process) != self.process).collect();
            let file = self.write(&record);
            self.ask(&record, &failure, file.as_deref());
        }))
    }
}

/// From now on `SIGUSR1` makes this recorder write, as long as it lives.
#[cfg(all(unix, feature = "signals"))]
pub(crate) fn on_signal(recorder: &Arc<Recorder>) -> Result<(), String> {
    use once_cell::sync::OnceCell;
    use parking_lot::Mutex;
    use signal_hook::{consts::SIGUSR1, iterator::Signals};
    static ALL: Mutex<Vec<Weak<Recorder>>> = Mutex::new(Vec::new());
    static LISTENS: OnceCell<()> = OnceCell::new();
    let mut all = ALL.lock();
    all.retain(|recorder| recorder.strong_count() > 0);
    all.push(Arc::downgrade(recorder));
    drop(all);
    let listen = || {
        let mut signals = Signals::new([SIGUSR1])?;
        let each = || ALL.lock().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        let write = |recorder: Arc<Recorder>| drop(recorder.write(&recorder.look("SIGUSR1", None)));
        let work = move || signals.forever().for_each(|_| each().into_iter().for_each(write));
        std::thread::Builder::new().name("gpu-pool:signal".to_owned()).spawn(work).map(drop)
    };
    LISTENS.get_or_try_init(listen).map(drop).map_err(|error: io::Error| error.to_string())
}

#[cfg(not(all(unix, feature = "signals")))]
pub(crate) fn on_signal(_: &Arc<Recorder>) -> Result<(), String> {
    Err("this build of gpu-pool lacks the feature `signals`, or the system has no signals".to_owned())
}
