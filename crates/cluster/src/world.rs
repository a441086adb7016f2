//! The cluster for the threads of this process: `traits.rs`'s traits over [`Process`], under one lock.
//!
//! Where all processes share a machine, [`Near`] takes the hub's place for scopes, and threads that wait look there.
//! Every wait here ends when the hub says so, when the cluster ends, or when the link knows that the hub is silent:
//! deadlines are the hub's. `loom_tests/world.rs` has models of these threads.

mod scope;

use super::hub::{MOST_WORDS, WORDS};
use super::process::{Class, Process};
use super::wire::{self, Arrive, Failure, Record, ToHost, ToHub, cut, hash, shortened, text};
use crate::runtime::{
    ErrorInternals, WallClock,
    sync::{
        shim::{Condvar, Mutex, is_crowded, spin_loop, thread, yield_rounds},
        site::flag,
    },
};
use crate::traits::{Entry, Transport, Window, World, WorldScope};
use gpu_pool::{Error, Result, error::Site};
use scope::Scope;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Sends a frame to the hub. It must not wait for the hub's answer, and may call [`Local::take`].
pub(crate) type Link = Box<dyn Fn(ToHub) -> Result<(), Failure> + Send + Sync>;

/// How long a wait for the hub looks, with a yield after each look, before it sleeps: a bit more than a meeting of two
/// processes takes. A core that has nothing to run falls asleep, and to wake it takes as long as half a meeting. Not a
/// number of looks: where all cores are busy, the first yield may take longer than this.
const LOOKS: Duration = Duration::from_micros(100);

/// How often it looks before the first yield, unless the process has as many devices as the machine has cores: some
/// microseconds. Processes at one pace are here within that, and a yield takes as long as a part of the meeting.
const SPINS: u32 = 64;

type Tell = Box<dyn FnOnce(Error) + Send>;
type Progress = Arc<dyn Fn() -> u64 + Send + Sync>;
type Hear = Box<dyn FnOnce(&str) + Send>;

/// The order of all that processes of one machine tell, in which each of them reads it (`near.rs`).
pub(crate) trait Near: Send + Sync {
    /// Tells all. `Err`: no room until all have read some. A frame wakes none of this process: the caller then reads.
    fn append(&self, record: Record) -> Result<(), Record>;

    /// Reads what was told, and takes what follows for this process. Unless it `must`, not while another thread does.
    fn read(&self, must: bool, take: &mut dyn FnMut(ToHost));

    /// So many threads more (or fewer) call [`read`](Self::read) again and again, and sleep until another one has. The
    /// caller calls it once more after that.
    fn change(&self, looking: isize, waiting: isize);
}

/// Connections by which processes tell each other that they have arrived (`mesh.rs`). The hub is told, too, so nothing
/// depends on them.
pub(crate) trait Mesh: Send + Sync {
    /// Tells the other members' processes, where that needs no wait.
    fn tell(&self, arrive: &ToHub);

    /// Reads the arrivals of other processes, unless another thread does.
    fn read(&self, take: &mut dyn FnMut(usize, Arrive));
}

pub(crate) struct Local {
    inner: Mutex<Inner>,
    changed: Condvar,
    link: Link,
}

#[derive(Default)]
struct Inner {
    process: Process,
    outgoing: VecDeque<ToHub>,
    sending: bool,
    tells: BTreeMap<u64, Vec<Tell>>,
    progress: BTreeMap<u64, Progress>,
    near: Option<Arc<dyn Near>>,
    mesh: Option<Arc<dyn Mesh>>,
    /// Whom to tell of a value of the table.
    hears: VecDeque<(String, Hear)>,
    /// Scopes without names that have begun at a place of the program.
    places: BTreeMap<Site, u64>,
}

impl Local {
    pub(crate) fn new(host: usize, link: Link) -> Arc<Local> {
        let inner = Inner { process: Process::new(host), ..Inner::default() };
        Arc::new(Local { inner: Mutex::new(inner), changed: Condvar::new(), link })
    }

    /// From now on scopes are agreed on there.
    pub(crate) fn meet_near(&self, near: Arc<dyn Near>) {
        self.inner.lock().near = Some(near);
    }

    /// From now on processes tell each other of arrivals.
    pub(crate) fn meet_by(&self, mesh: Arc<dyn Mesh>) {
        let mut inner = self.inner.lock();
        inner.process.mesh();
        inner.mesh = Some(mesh);
    }

    /// Not once the cluster is over: a process may not know yet of rank 0's loss, and take a consequence for the cause.
    fn near(&self) -> Option<Arc<dyn Near>> {
        let inner = self.inner.lock();
        inner.near.clone().filter(|_| inner.process.over().is_none())
    }

    pub(crate) fn look(&self, near: &dyn Near, must: bool) {
        let mut due = Vec::new();
        near.read(must, &mut |frame| due.extend(self.apply(frame)));
        // A thread that hears of a failure may append a record, which needs room.
        due.into_iter().for_each(|tell| tell());
    }

    /// Tells the processes of this machine, if there is room. It does not wait.
    pub(super) fn tell(&self, record: Record) {
        drop(self.near().map(|near| near.append(record)));
    }

    /// Takes a frame that does not come by [`Near`]: records before the end go first.
    pub(crate) fn take(&self, frame: ToHost) {
        if let ToHost::Value { key, value } = &frame {
            let mut inner = self.inner.lock();
            let place = inner.hears.iter().position(|(wanted, _)| wanted == key);
            let hear = place.and_then(|place| inner.hears.remove(place));
            drop(inner);
            match hear {
                Some((_, hear)) => return hear(&String::from_utf8_lossy(value)),
                None if key.starts_with(WORDS) => return,
                None => {}
            }
        }
        let mut due = Vec::new();
        if let Some(near) = self.near().filter(|_| matches!(frame, ToHost::Over { .. })) {
            near.read(true, &mut |frame| due.extend(self.apply(frame)));
        }
        due.extend(self.apply(frame));
        due.into_iter().for_each(|tell| tell());
    }

    fn apply(&self, frame: ToHost) -> Vec<impl FnOnce() + use<>> {
        let due = self.post(|Inner { process, tells, .. }| {
            let answer = process.take(frame).unwrap_or_else(|_| {
                process.end_cluster(Failure::lost(0, "it has sent nonsense"));
                None
            });
            if !flag("world.take.silent") {
                self.changed.notify_all();
            }
            let failed: Vec<_> = tells.keys().filter_map(|id| Some((*id, process.failure_elsewhere(*id)?))).collect();
            let due: Vec<_> = failed.into_iter().map(|(id, failure)| (tells.remove(&id), failure)).collect();
            (due, answer)
        });
        let tell = |(tells, failure): (Option<Vec<Tell>>, Failure)| {
            move || tells.into_iter().flatten().for_each(|tell| tell(failure.error("a scope")))
        };
        due.into_iter().map(tell).collect()
    }

    /// The hub is lost, or this process has left.
    pub(crate) fn end_cluster(&self, failure: Failure) {
        self.take(ToHost::Over { failure });
    }

    pub(super) fn beat(&self) -> ToHub {
        let progress: Vec<_> = self.inner.lock().progress.iter().map(|(id, of)| (*id, of.clone())).collect();
        // Asked without the lock: it is the caller's code.
        let progress: Vec<_> = progress.into_iter().map(|(id, of)| (id, of())).collect();
        let idle = progress.is_empty();
        let beat = ToHub::Beat { progress };
        if !idle {
            self.tell(Record::Frame(beat.clone()));
        }
        beat
    }

    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        self.inner.lock().process.over().map_or(Ok(()), |failure| Err(failure.error(op)))
    }

    /// Changes the state, and sends the hub what follows from that: the hub gets all in the order of the changes. It
    /// may be another thread that sends it. A link that is broken ends the cluster, which ends all waits.
    fn post<R>(&self, change: impl FnOnce(&mut Inner) -> (R, Option<ToHub>)) -> R {
        let mut inner = self.inner.lock();
        let (result, frame) = change(&mut inner);
        inner.outgoing.extend(frame);
        if inner.sending && !flag("world.post.unordered") {
            return result;
        }
        inner.sending = true;
        while let Some(frame) = inner.outgoing.pop_front() {
            let near = inner.near.clone().filter(|_| !matches!(frame, ToHub::Set { .. } | ToHub::Get { .. }));
            let told = matches!(&frame, ToHub::Arrive(arrive) if arrive.known.is_some());
            let mesh = inner.mesh.clone().filter(|_| told);
            drop(inner);
            mesh.iter().for_each(|mesh| mesh.tell(&frame));
            if let Some(near) = near {
                self.append(&*near, frame);
            } else if let Err(failure) = (self.link)(frame)
                && !flag("world.send.ignores_the_end")
            {
                self.end_cluster(failure);
            }
            inner = self.inner.lock();
        }
        inner.sending = false;
        result
    }

    fn append(&self, near: &dyn Near, frame: ToHub) {
        let mut left = Err(Record::Frame(frame));
        while let Err(record) = left
            && self.near().is_some()
        {
            left = near.append(record);
            self.look(near, true);
            if left.is_err() {
                thread::yield_now();
            }
        }
    }

    fn wait<T>(
        &self,
        op: &'static str,
        mut answer: impl FnMut(&mut Process) -> Option<Result<T, Failure>>,
    ) -> Result<T> {
        let (near, mesh) = (self.near(), self.inner.lock().mesh.clone());
        let alone = near.is_none() && mesh.is_none();
        let look = |must| {
            near.iter().for_each(|near| self.look(&**near, must));
            mesh.iter().for_each(|mesh| {
                mesh.read(&mut |host, arrive| {
                    self.inner.lock().process.hear(host, arrive);
                    self.changed.notify_all();
                });
            });
        };
        // At first the others are not told that this process waits: they could wake its thread in vain.
        for _ in 0..if alone || is_crowded() { 0 } else { SPINS } {
            if let Some(answer) = answer(&mut self.inner.lock().process) {
                return answer.map_err(|failure| failure.error(op));
            }
            look(false);
            spin_loop();
        }
        let change = |looking, waiting| near.iter().for_each(|near| near.change(looking, waiting));
        change(1, 0);
        let (mut sleeps, mut start) = (false, None);
        let mut inner = self.inner.lock();
        let answer = loop {
            if let Some(answer) = answer(&mut inner.process) {
                break answer;
            }
            let late = start.get_or_insert_with(Instant::now).elapsed() >= LOOKS;
            let tired = alone || yield_rounds() == 0 || late;
            if tired && (sleeps || near.is_none()) {
                self.changed.wait(&mut inner);
                continue;
            }
            drop(inner);
            if tired {
                sleeps = true;
                change(-1, 1);
            }
            look(sleeps);
            if !tired {
                thread::yield_now();
            }
            inner = self.inner.lock();
        };
        drop(inner);
        change(-isize::from(!sleeps), -isize::from(sleeps));
        near.iter().for_each(|near| self.look(&**near, true));
        answer.map_err(|failure| failure.error(op))
    }

    /// Makes a value of at most 32 KiB known to all processes. A name is used once in the life of the cluster.
    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (len, most) = (value.len(), wire::MOST_VALUE);
        let fits = len <= most && key.len() <= wire::MOST_TEXT;
        fail_if!(!fits, cluster_error!("connect", "a value of {len} bytes: at most {most} can be told"));
        self.post(|_| ((), Some(ToHub::Set { key: key.to_owned(), value: value.to_vec() })));
        self.check("connect")
    }

    /// Asks for a value that a process may make known, without waiting for it.
    pub(super) fn ask(&self, key: &str) {
        self.ask_and(key, false);
    }

    fn ask_and(&self, key: &str, waits: bool) {
        self.post(|_| ((), Some(ToHub::Get { key: key.to_owned(), waits })));
    }

    pub(super) fn known(&self, key: &str) -> Option<Vec<u8>> {
        self.inner.lock().process.value(key).and_then(Result::ok)
    }

    /// The value that a process has made known, or will. `Err` if a process is lost, or leaves, meanwhile.
    pub(super) fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.ask_and(key, true);
        self.wait("connect", |process| process.value(key))
    }

    fn close(&self, class: Class, window: u64) {
        self.inner.lock().process.close(class, window);
        if !flag("world.close.silent") {
            self.changed.notify_all();
        }
    }

    fn window(self: &Arc<Self>, class: Class, window: u64) -> Window {
        let local = self.clone();
        Window::new(move || local.close(class, window))
    }
}

/// The name of a process's words about a failure. Its text may be [cut] on its way.
fn words_about(host: usize, failure: &str) -> String {
    format!("{WORDS}{host}/{:016x}", hash(&cut(failure.to_owned())))
}

pub(crate) struct Members {
    pub(crate) local: Arc<Local>,
    pub(crate) host: usize,
    pub(crate) devices: Vec<usize>,
    pub(crate) transport: Transport,
    /// Asks rank 0.
    pub(crate) clock: Box<dyn Fn() -> Option<WallClock> + Send + Sync>,
    pub(crate) _ends: Box<dyn Send + Sync>,
}

debug_as! {
    Members, |self|
    host = self.host, devices = self.devices, transport = self.transport,
    over = self.local.inner.lock().process.over().cloned(), ..
}

impl World for Members {
    fn host(&self) -> usize {
        self.host
    }

    fn devices(&self) -> &[usize] {
        &self.devices
    }

    fn transport(&self) -> &Transport {
        &self.transport
    }

    fn check(&self) -> Result<()> {
        self.local.check("check")
    }

    fn clock(&self) -> Option<WallClock> {
        if self.host > 0 && self.local.near().is_none() {
            return (self.clock)();
        }
        // Processes of one machine read one clock.
        Some(WallClock { at: Instant::now(), wall: SystemTime::now(), error: Duration::ZERO })
    }

    fn tell(&self, failure: &str, words: &str) {
        // Without a cluster nobody hears it.
        let _ = self.local.set(&words_about(self.host, failure), shortened(words, wire::MOST_VALUE - 64).as_bytes());
    }

    fn when_told(&self, host: usize, failure: &str, hear: Hear) {
        let key = words_about(host, failure);
        self.local.post(|inner| {
            // As in the hub: those of old failures never come.
            if inner.hears.len() == MOST_WORDS {
                inner.hears.pop_front();
            }
            inner.hears.push_back((key.clone(), hear));
            ((), Some(ToHub::Get { key, waits: false }))
        });
    }

    fn count(&self, site: Site) -> u64 {
        let mut inner = self.local.inner.lock();
        let count = inner.places.entry(site).or_default();
        *count += 1;
        *count
    }

    fn begin(
        &self,
        entry: Entry<'_>,
        deadline: Duration,
        progress: Arc<dyn Fn() -> u64 + Send + Sync>,
        site: Site,
    ) -> Result<(Arc<dyn WorldScope>, Window)> {
        let ordered = matches!(entry, Entry::Named(_));
        let entry = match entry {
            Entry::Named(name) if name.len() > wire::MOST_TEXT => {
                let why = format_args!("a name of {} bytes; at most {} are allowed", name.len(), wire::MOST_TEXT);
                return Err(Error::invalid_at(site, "begin", why));
            }
            Entry::Named(name) => wire::Entry::Named(name.to_owned()),
            Entry::Unnamed { nth, failed } => {
                let failed = failed.map(|(device, cause)| (device as u32, text(cause)));
                wire::Entry::Unnamed { nth, failed }
            }
        };
        self.local.check("the beginning of a scope")?;
        let local = &self.local;
        let id = local.post(|inner| {
            let (id, frame) = inner.process.begin(entry, deadline, text(&site));
            inner.progress.insert(id, progress);
            (id, Some(frame))
        });
        let scope = Arc::new(Scope { local: local.clone(), id });
        let window = match ordered {
            true => {
                let place = local.wait("the beginning of a scope", |process| process.begun(id))?;
                local.window(Class::Scope, place)
            }
            false => Window::none(),
        };
        Ok((scope, window))
    }
}
