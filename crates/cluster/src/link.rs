//! A gang's part in a scope of all processes: whether it has joined one, and how the two fail together.
//!
//! With a name it joins the others when it begins, else at the first call that needs other processes. Invariants: once
//! joined, a failure of the gang is told to the other processes, and one of theirs fails the gang; so does a failure of
//! a transport between devices. A gang that fails before it joins is told of, too: others may wait for it.

use crate::runtime::{
    AcrossProcesses, Alarm, DeviceInternals, Gang, NewScope, Outside, ProcessScope, Processes, WallClock, device_here,
};
use crate::traits::{Entry, Tell, Transport, Window, World, WorldScope};
use gpu_pool::{Device, Error, Result, error::Site};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::{
    any::Any,
    collections::{HashMap, hash_map},
    sync::{
        Arc,
        mpsc::{self, Sender},
    },
    thread::JoinHandle,
    time::Duration,
};

type Progress = Arc<dyn Fn() -> u64 + Send + Sync>;

pub struct WorldLink {
    pub world: Arc<dyn World>,
    deadline: Duration,
    progress: Progress,
    site: Site,
    /// The number of the scope at its place. None: it has a name, or has some devices of the pool only.
    nth: Option<u64>,
    joined: OnceCell<Joined>,
    tell: OnceCell<Arc<Tell>>,
    senders: Mutex<Vec<JoinHandle<()>>>,
    proxies: Mutex<HashMap<usize, Proxy>>,
    messages: Mutex<HashMap<u64, u64>>,
}

type Work = Box<dyn FnOnce() + Send>;

struct Proxy {
    work: Sender<Work>,
    thread: JoinHandle<()>,
}

fn start(name: &str, site: Site, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|e| Error::NoThread { op: "a message", device: device_here(), why: e.to_string(), site })
}

struct Joined {
    scope: Arc<dyn WorldScope>,
    /// It has failed before it has joined.
    failed: bool,
}

impl WorldLink {
    fn new(world: &Arc<dyn World>, scope: NewScope) -> Self {
        let NewScope { deadline, progress, site, counts } = scope;
        WorldLink {
            world: world.clone(),
            deadline,
            progress,
            site,
            nth: counts.then(|| world.count(site)),
            joined: OnceCell::new(),
            tell: OnceCell::new(),
            senders: Mutex::default(),
            proxies: Mutex::default(),
            messages: Mutex::default(),
        }
    }

    pub(crate) fn next_message(&self, queue: u64) -> u64 {
        let mut messages = self.messages.lock();
        let number = messages.entry(queue).or_default();
        *number += 1;
        *number
    }

    fn enter(&self, entry: Entry<'_>) -> Result<(Joined, Window)> {
        let failed = matches!(entry, Entry::Unnamed { failed: Some(_), .. });
        let (scope, window) = self.world.begin(entry, self.deadline, self.progress.clone(), self.site)?;
        Ok((Joined { scope, failed }, window))
    }

    /// The scope of all processes, which the gang joins with the first call.
    pub(crate) fn join(&self, gang: &Arc<Gang>) -> Result<&Arc<dyn WorldScope>> {
        if let Some(joined) = self.joined.get() {
            return Ok(&joined.scope);
        }
        let mut first = false;
        let joined = self.joined.get_or_try_init(|| {
            first = true;
            Ok::<_, Error>(self.enter(Entry::Unnamed { nth: self.nth.unwrap_or(0), failed: None })?.0)
        })?;
        if first {
            self.listen(gang);
        }
        Ok(&joined.scope)
    }

    /// From now on the gang and the scope fail together.
    fn listen(&self, gang: &Arc<Gang>) {
        let Some(joined) = self.joined.get() else { return };
        let (failing, by) = (Arc::downgrade(gang), gang.device(0));
        let poison = move |error| {
            if let Some(gang) = failing.upgrade() {
                gang.poison(by, error);
            }
        };
        joined.scope.when_failed(Box::new(poison.clone()));
        // Streams may go on behind a call that has failed, with memory that was never written.
        if let Transport::Device(transport) = self.world.transport() {
            let tell: Arc<Tell> = Arc::new(poison);
            transport.when_failed(&tell);
            let _ = self.tell.set(tell);
        }
        // It may have failed while it joined.
        if let Some((by, cause)) = gang.cause() {
            self.failed(by, &cause);
        }
    }

    /// Runs `work` on a thread of its own. The end of the scope waits for it.
    pub(crate) fn run_apart(&self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = start("gpu-pool:send", self.site, work)?;
        let mut senders = self.senders.lock();
        senders.retain(|thread| !thread.is_finished());
        senders.push(thread);
        Ok(())
    }

    /// Runs `work` on a device's own thread, behind what it was given before. The end of the scope waits for it.
    pub(crate) fn run_in_order(&self, device: usize, work: Work) -> Result<()> {
        let mut proxies = self.proxies.lock();
        let proxy = match proxies.entry(device) {
            hash_map::Entry::Occupied(known) => known.into_mut(),
            hash_map::Entry::Vacant(place) => {
                let (give, given) = mpsc::channel::<Work>();
                let thread = start("gpu-pool:carry", self.site, move || given.into_iter().for_each(|work| work()))?;
                place.insert(Proxy { work: give, thread })
            }
        };
        proxy.work.send(work).map_err(|_| Error::custom("the thread that carries sums has ended"))
    }
}

impl Outside for WorldLink {
    fn failed(&self, by: usize, cause: &Error) {
        // What all processes hear, or find out by themselves.
        let known = matches!(cause, Error::AbortedByHost { .. } | Error::HostLost { .. } | Error::WorldMismatch { .. });
        match (self.joined.get(), self.nth) {
            (Some(joined), _) if !known => joined.scope.fail(Some(by), cause),
            (None, Some(nth)) => {
                let failed = || Ok::<_, Error>(self.enter(Entry::Unnamed { nth, failed: Some((by, cause)) })?.0);
                // An error: the cluster is over, as all know.
                drop(self.joined.get_or_try_init(failed));
            }
            _ => {}
        }
    }
}

impl ProcessScope for WorldLink {
    fn begin(&self, name: &str, gang: &Arc<Gang>) -> Result<Box<dyn Any>> {
        let mut window = None;
        self.joined.get_or_try_init(|| {
            let (joined, turn) = self.enter(Entry::Named(name))?;
            window = Some(turn);
            Ok::<_, Error>(joined)
        })?;
        self.listen(gang);
        Ok(Box::new(window.expect("a gang begins once")))
    }

    fn join(&self, gang: &Arc<Gang>) -> Result<()> {
        WorldLink::join(self, gang).map(drop)
    }

    fn end(&self) -> Result<()> {
        let senders = std::mem::take(&mut *self.senders.lock());
        senders.into_iter().for_each(|thread| drop(thread.join()));
        let proxies = std::mem::take(&mut *self.proxies.lock());
        for Proxy { work, thread } in proxies.into_values() {
            drop(work);
            drop(thread.join());
        }
        // What failed before it joined may be of this process alone: it waits for nobody.
        self.joined.get().filter(|joined| !joined.failed).map_or(Ok(()), |joined| joined.scope.end())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub struct Linked {
    world: Arc<dyn World>,
    groups: Box<dyn AcrossProcesses>,
}

debug_as!(Linked, |self| world = self.world, ..);

impl Linked {
    /// `world`: as a member sees the processes. `groups`: the collectives of groups that span them.
    pub fn new(world: Arc<dyn World>, groups: impl AcrossProcesses + 'static) -> Arc<Linked> {
        Arc::new(Linked { world, groups: Box::new(groups) })
    }
}

impl Processes for Linked {
    fn host(&self) -> usize {
        self.world.host()
    }

    fn devices(&self) -> &[usize] {
        self.world.devices()
    }

    fn scope(&self, scope: NewScope) -> Arc<dyn ProcessScope> {
        Arc::new(WorldLink::new(&self.world, scope))
    }

    fn alarm(&self) -> Option<Arc<dyn Alarm>> {
        match self.world.transport() {
            Transport::Device(transport) => transport.alarm(),
            _ => None,
        }
    }

    fn clock(&self) -> Option<WallClock> {
        self.world.clock()
    }

    fn tell(&self, failure: &str, words: &str) {
        self.world.tell(failure, words);
    }

    fn when_told(&self, host: usize, failure: &str, hear: Box<dyn FnOnce(&str) + Send>) {
        self.world.when_told(host, failure, hear);
    }

    fn groups(&self) -> &(dyn Any + Send + Sync) {
        &self.groups
    }
}

pub fn link_of(dev: &Device) -> &WorldLink {
    let scope = dev.process_scope().expect("the group was made through it");
    scope.as_any().downcast_ref().expect("this crate has connected the pool")
}
