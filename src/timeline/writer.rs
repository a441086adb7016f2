//! The thread that writes a session's file: it empties the lanes, reads the timing events, and turns both into lines.
//!
//! [`Timeline`] starts and stops it. Invariant: its memory is bounded: by the lanes' queues, the devices' events, and
//! some work of each stream that waits may name.

mod draw;

use super::format::{Arg, At, Lines, VERSION};
use super::{Category, Lane, RECORDS, Record, Timeline, WallClock, Work, clock::Clock, timed::Timed, wall_offset};
use crate::{driver::DriverRef, error::op_site::OpSite};
use crossbeam::queue::ArrayQueue;
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, Write as _};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{fs::File, mem, path::Path, thread};

/// How often the writer looks.
const ROUND: Duration = Duration::from_millis(4);
/// How long a session's end waits for work that has not completed.
const LATE: Duration = Duration::from_secs(2);
/// Bytes after which lines are written.
const FULL: usize = 1 << 18;
/// Completed work of a stream that a wait may still name.
const KEPT: usize = 64;
/// A wait of a stream below this many nanoseconds is not shown: events are about as exact.
const SHORT: u64 = 1000;

/// Bytes in buffers and bytes reserved, of a device.
pub(crate) type Memory = Box<dyn Fn(usize) -> (u64, u64) + Send>;

/// The file of a session, and the thread that writes it.
pub(crate) struct Session {
    lanes: Vec<(Arc<Lane>, DriverRef)>,
    orders: mpsc::Sender<mpsc::Sender<()>>,
    thread: thread::JoinHandle<io::Result<()>>,
}

impl Timeline {
    /// Starts to write `path`, for these devices: each with its lane, its driver, and whether it shares its GPU. `host`
    /// is the number of this process among those of a cluster, and `clock` that cluster's.
    pub(crate) fn start(
        &self,
        path: &Path,
        (host, clock): (usize, Option<WallClock>),
        devices: Vec<(Arc<Lane>, DriverRef, bool)>,
        memory: Memory,
    ) -> io::Result<()> {
        let mut session = self.session.lock();
        if session.is_some() || devices.iter().any(|(lane, ..)| lane.is_on()) {
            return Err(io::Error::other("a trace of these devices is being written already"));
        }
        let mut writer = Writer {
            file: File::create(path)?,
            lines: Lines { text: b"[\n".to_vec(), process: host as u64 + 1 },
            devices: Vec::new(),
            rows: HashSet::new(),
            others: HashMap::new(),
            flows: 0,
            dropped: 0,
            memory,
            steps: 0,
        };
        writer.head(host, clock);
        for (device, (lane, driver, shared)) in devices.iter().enumerate() {
            writer.add(device, lane, driver, *shared);
        }
        writer.put()?;
        let (orders, received) = mpsc::channel();
        let thread = thread::Builder::new().name("gpu-pool:trace".to_owned()).spawn(move || writer.run(&received))?;
        let lanes: Vec<_> = devices.into_iter().map(|(lane, driver, _)| (lane, driver)).collect();
        for (lane, _) in &lanes {
            lane.sessions.fetch_advance();
        }
        *session = Some(Session { lanes, orders, thread });
        Ok(())
    }

    /// Returns when all that has ended is in the file.
    pub(crate) fn flush(&self) {
        let session = self.session.lock();
        let (done, is_done) = mpsc::channel();
        if session.as_ref().is_some_and(|session| session.orders.send(done).is_ok()) {
            let _ = is_done.recv_timeout(2 * LATE);
        }
    }

    /// Ends the session, if there is one. The work that completes within two seconds is in the file.
    pub(crate) fn stop(&self) -> io::Result<()> {
        let Some(Session { lanes, orders, thread }) = self.session.lock().take() else { return Ok(()) };
        for (lane, driver) in &lanes {
            lane.sessions.fetch_advance();
            if let Some(timed) = Timed::around_it(driver) {
                timed.finish();
            }
        }
        drop(orders);
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the writer of the trace has panicked")))
    }
}

/// A stream of a device.
#[derive(Default)]
struct Stream {
    pending: VecDeque<(Box<Work>, SmallVec<[At; 1]>)>,
    done: VecDeque<Done>,
}

/// Completed work.
#[derive(Clone, Copy)]
struct Done {
    number: u64,
    kind: Category,
    name: &'static str,
    here: Option<OpSite>,
    end: u64,
}

struct OneDevice {
    lane: Arc<Lane>,
    driver: DriverRef,
    streams: Vec<Stream>,
    clock: Option<Clock>,
    memory: (u64, u64),
    dropped_before: u64,
}

impl Drop for OneDevice {
    fn drop(&mut self) {
        let Some(timed) = Timed::around_it(&self.driver) else { return };
        let left = self.streams.iter_mut().flat_map(|stream| stream.pending.drain(..));
        left.for_each(|(work, _)| give_back(timed, Record::Work(work)));
        if let Some(clock) = self.clock.take() {
            clock.end(timed);
        }
    }
}

struct Writer {
    file: File,
    lines: Lines,
    devices: Vec<OneDevice>,
    /// Those with names.
    rows: HashSet<u64>,
    /// Threads that are no device threads, in the order in which they came.
    others: HashMap<u64, u64>,
    flows: u64,
    dropped: u64,
    memory: Memory,
    /// Steps of a machine in virtual time that are in the file.
    steps: usize,
}

fn thread_row(device: usize) -> u64 {
    1000 * (device as u64 + 1)
}

fn stream_row(device: usize, stream: usize) -> u64 {
    thread_row(device) + 1 + stream as u64
}

impl Writer {
    fn head(&mut self, host: usize, clock: Option<WallClock>) {
        let offset = ("clock_offset_us", Arg::Micros(wall_offset(clock)));
        let mut args = SmallVec::<[_; 3]>::from_iter([("version", Arg::Number(VERSION)), offset]);
        args.extend(clock.map(|clock| ("clock_error_us", Arg::Micros(clock.error.as_nanos() as i128))));
        self.lines.meta("gpu_pool_trace", None, &args);
        let name = format!("host {host}");
        self.lines.meta("process_name", None, &[("name", Arg::Text(&name))]);
    }

    fn add(&mut self, device: usize, lane: &Arc<Lane>, driver: &DriverRef, shared: bool) {
        self.name(thread_row(device), &format!("GPU {device} thread"));
        let queue = lane.queue.get_or_init(|| ArrayQueue::new(RECORDS));
        let mut clock = None;
        if let Some(timed) = Timed::around_it(driver) {
            // What came too late for an earlier session.
            while let Some(record) = queue.pop() {
                give_back(timed, record);
            }
            let begun = timed.begin(shared).and_then(|()| Clock::new(timed));
            clock = begun
                .inspect_err(|fault| event!(warn, "work_not_timed", device, %fault, "a device's work is not timed"))
                .ok();
        }
        let (lane, driver, dropped_before) = (lane.clone(), driver.clone(), lane.dropped.get());
        self.devices.push(OneDevice { lane, driver, streams: Vec::new(), clock, memory: (0, 0), dropped_before });
    }

    fn name(&mut self, row: u64, name: &str) {
        if self.rows.insert(row) {
            self.lines.meta("thread_name", Some(row), &[("name", Arg::Text(name))]);
            self.lines.meta("thread_sort_index", Some(row), &[("sort_index", Arg::Number(row))]);
        }
    }

    fn run(mut self, orders: &mpsc::Receiver<mpsc::Sender<()>>) -> io::Result<()> {
        loop {
            let order = orders.recv_timeout(ROUND);
            let written = match &order {
                Err(mpsc::RecvTimeoutError::Timeout) => self.round().map(drop),
                _ => self.settle(),
            };
            if let Ok(done) = &order {
                let _ = done.send(());
            }
            if matches!(order, Err(mpsc::RecvTimeoutError::Disconnected)) || written.is_err() {
                return written.and_then(|()| self.finish());
            }
        }
    }

    /// Rounds until nothing is left, or nothing has happened for a while.
    fn settle(&mut self) -> io::Result<()> {
        let mut last = Instant::now();
        while last.elapsed() < LATE {
            if self.round()? {
                last = Instant::now();
            }
            let left = |device: &OneDevice| device.streams.iter().any(|stream| !stream.pending.is_empty());
            let is_full = |device: &OneDevice| device.lane.queue.get().is_some_and(|queue| !queue.is_empty());
            if !self.devices.iter().any(|device| left(device) || is_full(device)) {
                break;
            }
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        // The last event has no comma behind it.
        self.lines.meta("gpu_pool_trace_end", None, &[]);
        self.lines.text.truncate(self.lines.text.len() - 2);
        self.lines.text.extend_from_slice(b"\n]\n");
        self.put()
    }

    fn put(&mut self) -> io::Result<()> {
        let text = mem::take(&mut self.lines.text);
        self.file.write_all(&text)?;
        self.lines.text = text;
        self.lines.text.clear();
        Ok(())
    }

    /// Writes what there is. Returns whether there was anything.
    fn round(&mut self) -> io::Result<bool> {
        let mut any = false;
        for device in 0..self.devices.len() {
            let lane = self.devices[device].lane.clone();
            // No more than were there, so that the other lanes have their turn.
            for _ in 0..lane.queue.get().map_or(0, ArrayQueue::len) {
                let Some(record) = lane.queue.get().and_then(ArrayQueue::pop) else { break };
                any = true;
                match record {
                    Record::Slice(slice) => self.slice(device, &slice),
                    Record::Work(work) => self.submitted(device, work),
                }
                if self.lines.text.len() >= FULL {
                    self.put()?;
                }
            }
            any |= self.completed(device)?;
            self.measure(device);
        }
        any |= self.virtual_steps();
        let dropped = self.devices.iter().map(|device| device.lane.dropped.get() - device.dropped_before).sum();
        if dropped != self.dropped {
            self.dropped = dropped;
            let now = self.devices[0].lane.now();
            self.lines.counter("dropped", now, &[("records", Arg::Number(dropped))]);
        }
        self.put()?;
        Ok(any)
    }

    /// The counters of a device, and its clock.
    fn measure(&mut self, device: usize) {
        let now = self.devices[device].lane.now();
        let memory = (self.memory)(device);
        if mem::replace(&mut self.devices[device].memory, memory) != memory {
            let args = [("used", Arg::Number(memory.0)), ("reserved", Arg::Number(memory.1))];
            self.lines.counter(&format!("GPU {device} memory"), now, &args);
        }
        let OneDevice { driver, clock, streams, .. } = &mut self.devices[device];
        if let (Some(clock), Some(timed)) = (clock, Timed::around_it(driver)) {
            let oldest = streams.iter().flat_map(|stream| stream.pending.front()).map(|(work, _)| work.submitted).min();
            if let Some(drift) = clock.renew(timed, oldest.unwrap_or(now)) {
                self.lines.counter(&format!("GPU {device} clock"), now, &[("drift_us", Arg::Micros(drift))]);
            }
        }
    }

    /// Work whose events are not known to be complete.
    fn submitted(&mut self, device: usize, work: Box<Work>) {
        let number = work.stream;
        if self.devices[device].clock.is_none() {
            if let Some(timed) = Timed::around_it(&self.devices[device].driver) {
                give_back(timed, Record::Work(work));
            }
            return;
        }
        self.stream(device, number).pending.push_back((work, SmallVec::new()));
    }

    /// Writes the work of a device that is complete.
    fn completed(&mut self, device: usize) -> io::Result<bool> {
        let (mut any, mut events) = (false, Vec::new());
        let driver = self.devices[device].driver.clone();
        let Some(timed) = Timed::around_it(&driver) else { return Ok(false) };
        for number in 0..self.devices[device].streams.len() {
            let pending = &self.devices[device].streams[number].pending;
            // Events of a stream complete in order, and each question is a call of the driver.
            let is_over = |(work, _): &(Box<Work>, _)| timed.driver().event_query(work.end).unwrap_or(true);
            let over = match pending.back() {
                Some(last) if is_over(last) => pending.len(),
                _ => pending.partition_point(is_over),
            };
            for _ in 0..over {
                let Some((work, _)) = self.devices[device].streams[number].pending.front() else { break };
                if work.waited.iter().any(|mark| self.is_pending(*mark)) {
                    break;
                }
                let Some((work, waiters)) = self.devices[device].streams[number].pending.pop_front() else { break };
                any = true;
                events.extend(work.begin.into_iter().chain([work.end]));
                self.work(device, &work, &waiters, timed);
                if self.lines.text.len() >= FULL {
                    self.put()?;
                }
            }
        }
        timed.give_events(events);
        Ok(any)
    }
}

fn give_back(timed: &Timed, record: Record) {
    if let Record::Work(work) = record {
        timed.give_events(work.begin.into_iter().chain([work.end]));
    }
}
