//! A cluster within one process, for tests: several pools are its hosts. The hub is a table under one lock, and bytes
//! go through mailboxes.

pub mod device_mail;
mod faults;
mod mail;

use device_mail::DeviceMail;
use gpu_pool::extend::cluster::{
    BuilderInternals, WallClock,
    collective::LonePad,
    driver::DriverRef,
    processes::{Connect, Place, Processes},
};
use gpu_pool::{Builder, Device, Error, GpuPool, Result, error::Site};
use gpu_pool_cluster::extend::{
    Arrival, Commit, Entry, Hierarchical, Linked, Tag, Transport, Window, World, WorldScope,
};
use mail::Mail;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    os::fd::AsFd,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Whom to tell of a scope's failure.
type Tell = Box<dyn FnOnce(Error) + Send>;

/// How often a wait looks for lost hosts and deadlines.
const TICK: Duration = Duration::from_millis(5);

type Key = (Vec<Place>, u64);

#[derive(Default)]
struct State {
    /// Scopes that a host has begun, by name.
    begun: HashMap<(usize, String), usize>,
    scopes: HashMap<(String, usize), Scope>,
    /// Scopes that all hosts have announced, in the order in which each host begins them, and how many it has begun.
    order: Vec<(String, usize)>,
    entered: HashMap<usize, usize>,
    commits: u64,
    /// Committed collectives of each host whose windows are open, with the number of windows.
    turns: HashMap<usize, VecDeque<(u64, usize)>>,
    mail: HashMap<(usize, usize, Tag), VecDeque<Vec<u8>>>,
    lost: Option<usize>,
}

#[derive(Default)]
struct Scope {
    hosts: Vec<usize>,
    ended: Vec<usize>,
    failed: Option<(usize, Error)>,
    tells: Vec<(usize, Tell)>,
    meetings: HashMap<Key, Meeting>,
}

struct Meeting {
    since: Instant,
    arrived: BTreeMap<usize, Arrived>,
    /// Of proxied meetings: how many members of each host have come, and their notes.
    proxied: HashMap<usize, (usize, Vec<u8>)>,
    committed: Option<u64>,
}

#[derive(Clone)]
struct Arrived {
    place: Place,
    call: String,
    site: String,
    note: Vec<u8>,
}

/// What the hosts of a cluster have in common.
#[derive(Default)]
pub struct Hub {
    devices: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
    /// Called before each exchange of messages, with the host.
    pub tap: OnceLock<Box<dyn Fn(usize) + Send + Sync>>,
}

impl Hub {
    fn new(devices: &[usize]) -> Arc<Hub> {
        Arc::new(Hub { devices: devices.into(), ..Hub::default() })
    }

    fn fail(&self, key: &(String, usize), by: usize, error: Error) {
        let mut state = self.state.lock();
        let scope = state.scopes.get_mut(key).expect("it has begun");
        if scope.failed.is_some() {
            return;
        }
        scope.failed = Some((by, error.clone()));
        let (tells, kept) = std::mem::take(&mut scope.tells).into_iter().partition(|(host, _)| *host != by);
        scope.tells = kept;
        drop(state);
        let tells: Vec<(usize, Tell)> = tells;
        tells.into_iter().for_each(|(_, tell)| tell(error.clone()));
        self.changed.notify_all();
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>) {
        self.changed.wait_for(state, TICK);
    }
}

fn lost(host: usize) -> Error {
    Error::HostLost { host, op: "test", why: "killed".to_owned() }
}

fn mismatch(what: &'static str, a: &Arrived, b: &Arrived) -> Error {
    let call = |of: &Arrived| of.place.call(of.call.clone(), of.site.clone());
    Error::WorldMismatch { what, a: call(a), b: call(b) }
}

struct Host {
    hub: Arc<Hub>,
    host: usize,
    transport: Transport,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loopback {}", self.host)
    }
}

impl World for Host {
    fn host(&self) -> usize {
        self.host
    }

    fn devices(&self) -> &[usize] {
        &self.hub.devices
    }

    fn transport(&self) -> &Transport {
        &self.transport
    }

    fn check(&self) -> Result<()> {
        self.hub.state.lock().lost.map_or(Ok(()), |host| Err(lost(host)))
    }

    fn count(&self, _: Site) -> u64 {
        0
    }

    /// The wall clock of host `n` is `n` hours behind that of host 0.
    fn clock(&self) -> Option<WallClock> {
        let wall = SystemTime::now() + Duration::from_secs(3600 * self.host as u64);
        Some(WallClock { at: Instant::now(), wall, error: Duration::ZERO })
    }

    /// All hosts run the same scopes here, so one that fails early counts as any other.
    fn begin(
        &self,
        entry: Entry<'_>,
        deadline: Duration,
        _: Arc<dyn Fn() -> u64 + Send + Sync>,
        _: Site,
    ) -> Result<(Arc<dyn WorldScope>, Window)> {
        self.check()?;
        let (name, ordered, failed) = match entry {
            Entry::Named(name) => (name, true, None),
            Entry::Unnamed { failed, .. } => ("", false, failed),
        };
        let mut state = self.hub.state.lock();
        let nth = state.begun.entry((self.host, name.to_owned())).or_default();
        *nth += 1;
        let key = (name.to_owned(), *nth);
        let scope = state.scopes.entry(key.clone()).or_default();
        scope.hosts.push(self.host);
        if ordered && scope.hosts.len() == self.hub.devices.len() {
            state.order.push(key.clone());
        }
        self.hub.changed.notify_all();
        let since = Instant::now();
        let is_next = |state: &State| {
            let entered = state.entered.get(&self.host).copied().unwrap_or(0);
            state.order.get(entered) == Some(&key)
        };
        while ordered && !is_next(&state) {
            if let Some(host) = state.lost {
                return Err(lost(host));
            }
            if since.elapsed() > deadline {
                let here = &state.scopes[&key].hosts;
                let missing = (0..self.hub.devices.len()).filter(|host| !here.contains(host)).collect();
                return Err(Error::HostTimeout { op: format!("scope {name}"), waited: deadline, missing });
            }
            self.hub.wait(&mut state);
        }
        let (hub, host) = (self.hub.clone(), self.host);
        let entered = move || {
            *hub.state.lock().entered.entry(host).or_default() += 1;
            hub.changed.notify_all();
        };
        let window = if ordered { Window::new(entered) } else { Window::none() };
        drop(state);
        let part = Part { hub: self.hub.clone(), host: self.host, key, deadline };
        if let Some((device, cause)) = failed {
            part.fail(Some(device), cause);
        }
        Ok((Arc::new(part), window))
    }
}

struct Part {
    hub: Arc<Hub>,
    host: usize,
    key: (String, usize),
    deadline: Duration,
}

impl Part {
    fn failure(&self, state: &State) -> Option<Error> {
        let failed = state.scopes[&self.key].failed.as_ref().map(|(_, error)| error.clone());
        state.lost.map(lost).or(failed)
    }
}

impl WorldScope for Part {
    fn meet(&self, arrival: Arrival<'_>) -> Result<Commit> {
        let Arrival { members, number, place, call, site, leads, proxied, mut note } = arrival;
        let key = (members.to_vec(), number);
        let mut hosts: Vec<usize> = members.iter().map(|place| place.host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let own = members.iter().filter(|member| member.host == self.host).count();
        let mut state = self.hub.state.lock();
        let empty =
            || Meeting { since: Instant::now(), arrived: BTreeMap::new(), proxied: HashMap::new(), committed: None };
        // A committed one is carried out whatever has failed since: other members here have been told so.
        let committed = state.scopes[&self.key].meetings.get(&key).is_some_and(|meeting| meeting.committed.is_some());
        if let Some(failure) = self.failure(&state).filter(|_| !committed) {
            return Err(failure);
        }
        let scope = state.scopes.get_mut(&self.key).expect("begun");
        let meeting = scope.meetings.entry(key.clone()).or_insert_with(empty);
        let (come, notes) = meeting.proxied.entry(self.host).or_default();
        *come += usize::from(proxied);
        notes.append(&mut note);
        let note = notes.clone();
        if leads && (!proxied || *come == own) {
            let arrived = Arrived { place, call: call.to_owned(), site: site.to_string(), note };
            let differs = meeting.arrived.values().find(|other| other.call != call).cloned();
            meeting.arrived.insert(self.host, arrived.clone());
            if let Some(other) = differs {
                drop(state);
                let error = mismatch("call", &other, &arrived);
                self.hub.fail(&self.key, usize::MAX, error.clone());
                return Err(error);
            }
            if meeting.arrived.len() == hosts.len() {
                state.commits += 1;
                let number = state.commits;
                let meeting = state.scopes.get_mut(&self.key).and_then(|scope| scope.meetings.get_mut(&key));
                meeting.expect("just now").committed = Some(number);
                for &host in &hosts {
                    let windows = members.iter().filter(|member| member.host == host).count();
                    state.turns.entry(host).or_default().push_back((number, windows));
                }
            }
            self.hub.changed.notify_all();
        }
        debug_assert!(own > 0);
        loop {
            let meeting = &state.scopes[&self.key].meetings[&key];
            if let Some(number) = meeting.committed {
                if state.turns[&self.host].front().is_some_and(|turn| turn.0 == number) {
                    let notes = meeting.arrived.values().map(|arrived| arrived.note.clone()).collect();
                    let (hub, host) = (self.hub.clone(), self.host);
                    let close = move || {
                        let mut state = hub.state.lock();
                        let turns = state.turns.get_mut(&host).expect("it has turns");
                        let turn = turns.front_mut().expect("it is this one's turn");
                        turn.1 -= 1;
                        if turn.1 == 0 {
                            turns.pop_front();
                        }
                        hub.changed.notify_all();
                    };
                    let numbers = vec![number; hosts.len()];
                    return Ok(Commit { numbers, notes, window: Window::new(close) });
                }
            } else if let Some(failure) = self.failure(&state) {
                return Err(failure);
            } else if meeting.since.elapsed() > self.deadline {
                let missing = hosts.into_iter().filter(|host| !meeting.arrived.contains_key(host)).collect();
                drop(state);
                let error = Error::HostTimeout { op: call.to_owned(), waited: self.deadline, missing };
                self.hub.fail(&self.key, usize::MAX, error.clone());
                return Err(error);
            } else if let Some((mine, gone)) = meeting.arrived.get(&self.host).zip(
                hosts
                    .iter()
                    .find(|host| !meeting.arrived.contains_key(host) && state.scopes[&self.key].ended.contains(host)),
            ) {
                let gone = Arrived { place: Place { host: *gone, device: 0 }, call: "the end".into(), ..mine.clone() };
                let error = mismatch("participation", mine, &gone);
                drop(state);
                self.hub.fail(&self.key, usize::MAX, error.clone());
                return Err(error);
            }
            self.hub.wait(&mut state);
        }
    }

    fn fail(&self, device: Option<usize>, cause: &Error) {
        let error = Error::AbortedByHost { host: self.host, device, cause: cause.to_string() };
        self.hub.fail(&self.key, self.host, error);
    }

    fn when_failed(&self, tell: Box<dyn FnOnce(Error) + Send>) {
        let mut state = self.hub.state.lock();
        match self.failure(&state) {
            Some(failure) => {
                drop(state);
                tell(failure);
            }
            None => state.scopes.get_mut(&self.key).expect("begun").tells.push((self.host, tell)),
        }
    }

    fn end(&self) -> Result<()> {
        let mut state = self.hub.state.lock();
        state.scopes.get_mut(&self.key).expect("begun").ended.push(self.host);
        self.hub.changed.notify_all();
        let since = Instant::now();
        loop {
            if let Some(failure) = self.failure(&state) {
                return Err(failure);
            }
            if state.scopes[&self.key].ended.len() == self.hub.devices.len() {
                return Ok(());
            }
            if since.elapsed() > self.deadline {
                let ended = &state.scopes[&self.key].ended;
                let missing = (0..self.hub.devices.len()).filter(|host| !ended.contains(host)).collect();
                return Err(Error::HostTimeout { op: "end of scope".into(), waited: self.deadline, missing });
            }
            self.hub.wait(&mut state);
        }
    }
}

/// Connects a pool to the others.
struct Loopback {
    world: Arc<Host>,
    mail: Option<Arc<DeviceMail>>,
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.world.fmt(f)
    }
}

impl Connect for Loopback {
    fn connect(&self, drivers: &[DriverRef]) -> Result<Arc<dyn Processes>> {
        if let Some(mail) = &self.mail {
            *mail.drivers.lock() = drivers.to_vec();
        }
        Ok(Linked::new(self.world.clone(), Hierarchical))
    }
}

/// Pools that are hosts of one cluster.
pub struct Hosts {
    /// Common to all.
    pub hub: Arc<Hub>,
    /// By host.
    pub pools: Vec<GpuPool>,
    /// By host, if they have a transport between devices.
    pub mails: Vec<Arc<DeviceMail>>,
}

impl Hosts {
    /// A process with each of these numbers of software GPUs.
    pub fn new(devices: &[usize]) -> Hosts {
        Self::with(devices, |builder| builder)
    }

    /// [`new`](Self::new), with settings.
    pub fn with(devices: &[usize], set: impl Fn(Builder) -> Builder) -> Hosts {
        Self::over(devices, set, |hub, host| (Transport::Host(Arc::new(Mail { hub: hub.clone(), host })), None))
    }

    /// With a transport between devices.
    pub fn on_devices(devices: &[usize]) -> Hosts {
        Self::on_devices_with(devices, |builder| builder)
    }

    /// [`on_devices`](Self::on_devices), with settings.
    pub fn on_devices_with(devices: &[usize], set: impl Fn(Builder) -> Builder) -> Hosts {
        let both = |hub: &Arc<Hub>, host| {
            let mail = DeviceMail::new(hub, host);
            (Transport::Device(mail.clone()), Some(mail))
        };
        Self::over(devices, set, both)
    }

    /// [`on_devices_with`](Self::on_devices_with) one device each, and with pads for own kernels.
    pub fn with_pads(count: usize, set: impl Fn(Builder) -> Builder) -> Hosts {
        let hosts = Self::on_devices_with(&vec![1; count], set);
        let driver = |host: usize| hosts.mails[host].drivers.lock()[0].clone();
        let made = (0..count).map(|host| LonePad::new(&driver(host), host, count).unwrap());
        let (mut pads, memory): (Vec<_>, Vec<_>) = made.unzip();
        for (host, pad) in pads.iter_mut().enumerate() {
            let others = (0..count).filter(|other| *other != host);
            others.for_each(|other| pad.import(other, memory[other].as_fd()).unwrap());
            pad.lay_out(8).unwrap();
        }
        for (mail, pad) in hosts.mails.iter().zip(pads) {
            assert!(mail.pad.set(Ok(pad)).is_ok());
        }
        hosts
    }

    /// Over any transport.
    pub fn over(
        devices: &[usize],
        set: impl Fn(Builder) -> Builder,
        transport: impl Fn(&Arc<Hub>, usize) -> (Transport, Option<Arc<DeviceMail>>),
    ) -> Hosts {
        let hub = Hub::new(devices);
        let mut mails = Vec::new();
        let pool = |(host, &count): (usize, &usize)| {
            let (transport, mail) = transport(&hub, host);
            let world = Arc::new(Host { hub: hub.clone(), host, transport });
            mails.extend(mail.clone());
            set(GpuPool::builder().host(count)).connect(Arc::new(Loopback { world, mail })).build().unwrap()
        };
        Hosts { pools: devices.iter().enumerate().map(pool).collect(), mails, hub }
    }

    /// Runs `f` on all devices of all hosts. The results by host.
    pub fn run<R: Send>(&self, f: impl Fn(&Device) -> Result<R> + Sync) -> Vec<Result<Vec<R>>> {
        self.each(|_, pool| pool.run(|dev, _| f(dev)))
    }

    /// Runs `f` once for each host, at the same time.
    #[allow(clippy::disallowed_methods, reason = "threads of a test")]
    pub fn each<R: Send>(&self, f: impl Fn(usize, &GpuPool) -> R + Sync) -> Vec<R> {
        let f = &f;
        thread::scope(|scope| {
            let each = |(host, pool)| scope.spawn(move || f(host, pool));
            let threads: Vec<_> = self.pools.iter().enumerate().map(each).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// [`run`](Self::run), which must succeed. The results by rank.
    #[track_caller]
    pub fn all<R: Send>(&self, f: impl Fn(&Device) -> Result<R> + Sync) -> Vec<R> {
        self.run(f).into_iter().flat_map(Result::unwrap).collect()
    }
}
