//! The timeline of a pool: the work of its host threads and of its devices' streams, with times. As a Chrome trace.
//!
//! ```text
//! host thread   begins and ends a slice (scope, job, operation, wait)       -> the lane of its device
//! Timed         a layer around each driver: timing events around the work   -> the lane of its device
//! writer        a thread: empties the lanes, asks the events, writes the file
//! ```
//!
//! Scopes, jobs, tasks, operations and waits note slices in their device's [`Lane`]. The pool starts and stops sessions
//! ([`Timeline`]). This room may use the driver.
//!
//! Invariant: without a session a lane costs one load. With one, no thread of the program waits for the writer: a full
//! lane drops the record and counts it.

mod clock;
mod format;
#[cfg(feature = "insight")]
pub(crate) mod merge;
pub(crate) mod nvtx;
pub(crate) mod timed;
pub(crate) mod writer;

use crate::{
    driver::{DriverRef, RawEvent, RawStream, host},
    error::op_site::OpSite,
    here,
    sync::{Sequence, unique_id},
};
use crossbeam::queue::ArrayQueue;
use once_cell::sync::{Lazy, OnceCell};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{collections::HashMap, sync::Arc, thread};

/// Records that a lane holds until the writer has them. At a million records a second they last for 16 ms.
const RECORDS: usize = 1 << 14;

/// The process's time 0, by the clock of `Instant` and by the wall's clock: the latter is how the files of several
/// processes come to one time.
static ZERO: Lazy<(Instant, SystemTime)> = Lazy::new(|| (Instant::now(), SystemTime::now()));

/// The wall clock of a cluster's rank 0.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    /// A moment of this process.
    pub at: Instant,
    /// What the clock shows then.
    pub wall: SystemTime,
    /// How much the two may be apart.
    pub error: Duration,
}

/// A wall clock at time 0 of this process, in nanoseconds since 1970: rank 0's, if it is known.
fn wall_offset(clock: Option<WallClock>) -> i128 {
    let (zero, own) = *ZERO;
    let (at, wall) = clock.map_or((zero, own), |clock| (clock.at, clock.wall));
    let nanos = |time: Duration| time.as_nanos() as i128;
    let since = nanos(at.saturating_duration_since(zero)) - nanos(zero.saturating_duration_since(at));
    wall.duration_since(UNIX_EPOCH).map_or(0, nanos) - since
}

/// The kind of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Category {
    Scope,
    Closure,
    Job,
    #[cfg_attr(not(feature = "tasks"), allow(dead_code, reason = "only tasks are tasks"))]
    Task,
    Op,
    Collective,
    Kernel,
    Copy,
    Wait,
}

impl Category {
    fn name(self) -> &'static str {
        match self {
            Category::Scope => "scope",
            Category::Closure => "closure",
            Category::Job => "job",
            Category::Task => "task",
            Category::Op => "op",
            Category::Collective => "collective",
            Category::Kernel => "kernel",
            Category::Copy => "copy",
            Category::Wait => "wait",
        }
    }
}

/// The reason of a wait of a host thread.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cause {
    /// Another device's thread, with the last call that it has made.
    Device(usize, Option<OpSite>),
    /// The work of a stream of the lane's device.
    Stream(RawStream),
}

/// The thread that a slice belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    /// A device's thread.
    Device(usize),
    /// Another thread, by its number in [`THREADS`].
    Other(u64),
}

/// How a collective is carried out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub algorithm: &'static str,
    pub waits_by: &'static str,
    /// The devices, as bits.
    pub members: u64,
}

/// Something that a host thread did. Times are in nanoseconds since [`ZERO`], or in virtual time.
#[derive(Debug)]
pub(crate) struct Slice {
    pub kind: Category,
    pub name: &'static str,
    /// A name that the program has given it.
    pub label: Option<Box<str>>,
    pub here: Option<OpSite>,
    pub bytes: usize,
    pub route: Option<Route>,
    pub cause: Option<Cause>,
    pub start: u64,
    end: u64,
    row: Row,
}

impl Slice {
    pub fn new(kind: Category, name: &'static str, here: Option<OpSite>, start: u64) -> Self {
        let row =
            here::device().map_or_else(|| Row::Other(THREAD.try_with(|thread| thread.0).unwrap_or(0)), Row::Device);
        Slice { kind, name, label: None, here, bytes: 0, route: None, cause: None, start, end: start, row }
    }
}

/// A stream that another one has waited for: the lane's id, the stream's number, and the number of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    lane: u64,
    stream: usize,
    work: u64,
}

/// Work of a stream between two timing events, or behind the work before it.
#[derive(Debug)]
struct Work {
    kind: Category,
    name: &'static str,
    here: Option<OpSite>,
    bytes: usize,
    /// Driver calls that it stands for: several if they came too fast to be timed one by one.
    calls: u32,
    stream: usize,
    /// Its number in the stream.
    number: u64,
    /// When the host submitted it.
    submitted: u64,
    /// The work that the stream waited for before it, and the begin of that wait.
    waited: SmallVec<[Mark; 2]>,
    waits_since: u64,
    begin: Option<RawEvent>,
    end: RawEvent,
}

enum Record {
    Slice(Slice),
    Work(Box<Work>),
}

/// Where one device's records go, and those of host threads about it. It belongs to the driver, and outlives the pool.
pub(crate) struct Lane {
    id: u64,
    /// Odd while a session writes.
    sessions: Sequence,
    queue: OnceCell<ArrayQueue<Record>>,
    dropped: Sequence,
    /// The device, if its time is virtual.
    in_virtual_time: Option<DriverRef>,
    timing: Mutex<timed::Timing>,
    marks: Arc<Mutex<HashMap<RawEvent, Mark>>>,
}

impl Lane {
    fn new(in_virtual_time: Option<DriverRef>, marks: &Arc<Mutex<HashMap<RawEvent, Mark>>>) -> Arc<Self> {
        let [sessions, dropped] = [Sequence::new(), Sequence::new()];
        let (queue, timing, marks) = (OnceCell::new(), Mutex::default(), marks.clone());
        Arc::new(Lane { id: unique_id(), sessions, queue, dropped, in_virtual_time, timing, marks })
    }

    /// A device's lane: that of the layer around its driver. Where time is computed, its own: events would change it.
    pub(crate) fn of(driver: &DriverRef) -> Arc<Lane> {
        let timed = timed::Timed::around_it(driver).map(|timed| timed.lane.clone());
        timed.unwrap_or_else(|| Lane::new(host::virtual_now(&**driver).map(|_| driver.clone()), &Arc::default()))
    }

    /// Whether a session writes.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.sessions.get() & 1 == 1
    }

    /// The time of the calling thread.
    fn now(&self) -> u64 {
        let time = self.in_virtual_time.as_ref().and_then(|driver| host::virtual_now(&**driver));
        time.unwrap_or_else(|| ZERO.0.elapsed()).as_nanos() as u64
    }

    /// The time, if a session writes.
    #[inline]
    pub(crate) fn start(&self) -> Option<u64> {
        self.is_on().then(|| self.now())
    }

    /// Begins a slice of the calling thread, which ends when the result is dropped.
    #[inline]
    pub(crate) fn slice(&self, kind: Category, name: &'static str, here: Option<OpSite>) -> Running<'_> {
        let slice = self.start().map(|start| Slice::new(kind, name, here, start));
        Running { lane: self, slice, _range: nvtx::range(name) }
    }

    /// Begins a slice of a wait in the thread's current operation.
    #[inline]
    pub(crate) fn wait(&self, op: &'static str, cause: impl FnOnce() -> Option<Cause>) -> Running<'_> {
        self.slice(Category::Wait, op, None).note(|slice| (slice.here, slice.cause) = (OpSite::current(), cause()))
    }

    /// A slice that ends now.
    pub(crate) fn end(&self, mut slice: Slice) {
        slice.end = self.now().max(slice.start);
        self.push(Record::Slice(slice));
    }

    fn push(&self, record: Record) {
        let pushed = self.queue.get().is_some_and(|queue| queue.push(record).is_ok());
        if !pushed {
            self.dropped.fetch_advance();
        }
    }
}

/// A slice that has not ended.
#[must_use = "it ends when it is dropped"]
pub(crate) struct Running<'l> {
    lane: &'l Lane,
    slice: Option<Slice>,
    _range: nvtx::Range,
}

impl Running<'_> {
    /// Changes the slice, if a session writes.
    pub(crate) fn note(mut self, change: impl FnOnce(&mut Slice)) -> Self {
        self.slice.as_mut().map(change);
        self
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            self.lane.end(slice);
        }
    }
}

/// The names of threads that are no device threads, while they live.
static THREADS: Lazy<Mutex<HashMap<u64, String>>> = Lazy::new(Mutex::default);

struct Named(u64);

impl Named {
    fn new() -> Self {
        let number = unique_id();
        let name = thread::current().name().map_or_else(|| format!("thread {number}"), str::to_owned);
        THREADS.lock().insert(number, name);
        Named(number)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        THREADS.lock().remove(&self.0);
    }
}

thread_local! {
    static THREAD: Named = Named::new();
}

/// The sessions of a pool: at most one at a time.
#[derive(Default)]
pub(crate) struct Timeline {
    session: Mutex<Option<writer::Session>>,
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/timeline_tests.rs"]
mod tests;
