//! The hub: the decisions of all processes together, as one state machine without input and output.
//!
//! The first process's server (`server.rs`) and the explicit-state search (`hub_search.rs`) drive it. It is told what
//! happens and when, and answers with what to send to whom. Each process must get its frames in this order.
//!
//! Invariants (the rules of `docs/src/design/cluster.md`):
//!
//! * Only the hub commits, and never in a scope that has failed (C2; but see below). A commit goes to all hosts of the
//!   group at once.
//! * All processes get commits, and beginnings of ordered scopes, in one order (C3, C5).
//! * A scope begins (if it is ordered) and ends for all processes or for none (C5).
//! * Once the cluster is over nothing is committed any more, and everybody has been told (C6).
//! * A failed scope changes nothing for other scopes (C7).
//!
//! With a mesh (`mesh.rs`) processes may take a collective as committed before the hub's word: when all have arrived.
//! Then the hub commits each collective at which all arrive before they hear of a failure, in an order that agrees with
//! that of each process.

#[cfg(test)]
#[path = "../tests/unit/hub/clock_tests.rs"]
mod clock_tests;
mod deadline;
mod meeting;
mod meshed;
#[cfg(test)]
#[path = "../tests/unit/hub/meshed_tests.rs"]
mod meshed_tests;
#[cfg(test)]
#[path = "../tests/unit/hub/proxied_tests.rs"]
mod proxied_tests;
#[cfg(test)]
#[path = "../tests/unit/hub/shipment_tests.rs"]
mod shipment_tests;
mod unnamed;
mod values;

use super::mutant::{self, Rule};
use super::wire::{Arrive, Call, Entry, Failure, Kind, Member, Record, ToHost, ToHub, cut};
use meeting::Meeting;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};
use unnamed::{Progress, Unnamed};

/// The most of the time between two ticks that counts. The server ticks every 100 ms at least.
const STEP: Duration = Duration::from_millis(500);

/// A process is late only after so many ticks, however short the deadline is.
const TICKS: usize = 4;

/// Behind this each process's number: the name of the value that tells that it has opened the transport, or why not.
pub(crate) const OPENED: &str = "opened/";

/// Behind this: the name of a process's last words about a failure. They may never come, and nobody waits for them.
pub(crate) const WORDS: &str = "words/";

/// The most of these names that are known: those of the last failures.
pub(crate) const MOST_WORDS: usize = 64;

pub(crate) type Out = Vec<(usize, ToHost)>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Limits {
    pub size: usize,
    pub heartbeat_timeout: Duration,
    /// All processes must have joined, and opened the transport, after this time.
    pub connect_timeout: Duration,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Hub {
    limits: Limits,
    /// Time that counts: see [`tick`](Hub::tick).
    now: Duration,
    looked: Duration,
    /// The largest part of the time between two ticks that counts. No deadline changes it.
    step: Duration,
    /// When this process was last stopped, seemingly: the end by the clock, and how long.
    stopped: Option<(Duration, Duration)>,
    /// The times before the last ticks, the oldest first.
    earlier: [Option<Duration>; TICKS],
    hosts: BTreeMap<usize, Host>,
    left: BTreeSet<usize>,
    values: BTreeMap<String, Vec<u8>>,
    /// Hosts that have asked for a value, and do nothing else.
    asked: BTreeMap<String, Vec<(usize, bool)>>,
    /// Names of last words among these values and questions, the oldest first.
    words: VecDeque<String>,
    opened: BTreeSet<usize>,
    /// How many may not join.
    refused: usize,
    /// Of a replica: the process for which it decides.
    only: Option<usize>,
    /// Processes tell each other of their arrivals.
    meshed: bool,
    scopes: BTreeMap<u64, Scope>,
    /// Scopes that not all processes have left, by name and number of the call.
    names: BTreeMap<(String, u64), u64>,
    unnamed: Unnamed,
    last_scope: u64,
    over: Option<Failure>,
    out: Out,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Host {
    heard: Duration,
    moved: Duration,
    scopes: BTreeMap<u64, u64>,
    last_scope: u64,
    last_arrival: Option<Arrive>,
    /// Its frames from an arrival on that has to wait for another commit.
    held: VecDeque<ToHub>,
    /// How many scopes of a name it has announced.
    calls: BTreeMap<String, u64>,
    unnamed: Progress,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Scope {
    key: Key,
    size: usize,
    /// Of those that have announced it.
    parts: BTreeMap<usize, Part>,
    /// It is over when these have ended it: others may not announce it any more.
    closed: bool,
    begun: bool,
    failed: Option<Failure>,
    /// In boxes, so that the map's nodes are small: each meeting makes one, and a large one takes longer.
    meetings: BTreeMap<(Arc<[Member]>, u64), Box<Meeting>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// The name, and the number of the call.
    Named(String, u64),
    /// The number among scopes without names.
    Slot(u64),
    /// A scope without a name that failed before it needed others: its place, and its number there.
    Early((String, u64)),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Part {
    announced: Announced,
    /// It knows that the scope has failed, so it will not arrive there again.
    heard: bool,
    ended: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Announced {
    id: u64,
    deadline: Duration,
    site: String,
    at: Duration,
    progress: u64,
    moved: Duration,
}

impl Hub {
    pub(crate) fn new(limits: Limits) -> Hub {
        let step = (limits.heartbeat_timeout.min(limits.connect_timeout) / 4).min(STEP);
        Hub { limits, step, ..Hub::default() }
    }

    /// One of several hubs that are told the same in one order (`near.rs`), losses too. All processes have joined.
    pub(crate) fn replica(limits: Limits, host: usize) -> Hub {
        let mut hub = Hub::new(limits);
        let never = Duration::MAX;
        hub.limits = Limits { heartbeat_timeout: never, connect_timeout: never, ..limits };
        hub.only = Some(host);
        (0..limits.size).for_each(|host| drop(hub.joined(host)));
        hub
    }

    /// The message of a process to all hubs, or the reason why it makes no sense.
    pub(crate) fn record(&mut self, host: usize, record: Result<Record, String>) -> Out {
        match record {
            Ok(Record::Frame(frame)) => {
                if let (ToHub::Arrive(arrive), Some(known)) = (&frame, self.hosts.get_mut(&host)) {
                    known.last_arrival = Some(arrive.without_note());
                }
                return self.frame(host, frame);
            }
            Ok(Record::Next { note }) => {
                let last = self.hosts.get_mut(&host).and_then(|known| known.last_arrival.as_mut());
                match last.map(|last| last.advance(note)) {
                    Some(arrive) => return self.frame(host, ToHub::Arrive(arrive)),
                    None => self.end(Failure::lost(host, "it has sent nonsense: an arrival after none")),
                }
            }
            Ok(Record::Tick(clock)) if host == 0 => return self.tick(clock),
            Ok(Record::Over(failure)) if host == 0 => self.end(failure),
            Ok(_) => self.end(Failure::lost(host, "it has sent nonsense: rank 0's word")),
            Err(why) => self.end(Failure::lost(host, format!("it has sent nonsense: {why}"))),
        }
        std::mem::take(&mut self.out)
    }

    pub(crate) fn refuses(&self, host: usize, size: usize) -> Option<String> {
        let here = self.limits.size;
        if size != here {
            return Some(format!("rank {host} was started as one of {size} processes, rank 0 as one of {here}"));
        }
        if host >= here {
            return Some(format!("there is no rank {host} of {here} processes"));
        }
        self.hosts.contains_key(&host).then(|| format!("another process has rank {host} already"))
    }

    /// A process has joined that is not [refused](Self::refuses).
    pub(crate) fn joined(&mut self, host: usize) -> Out {
        let now = self.now;
        self.hosts.insert(host, Host { heard: now, moved: now, ..Host::default() });
        if let Some(failure) = self.over.clone() {
            self.out.push((host, ToHost::Over { failure }));
        }
        std::mem::take(&mut self.out)
    }

    pub(crate) fn frame(&mut self, host: usize, frame: ToHub) -> Out {
        let now = self.now;
        let known = self.hosts.entry(host).or_default();
        known.heard = now;
        if !matches!(frame, ToHub::Beat { .. }) {
            known.moved = now;
        }
        if self.over.is_none() && !self.has_left(host) {
            self.handle_in_order(host, frame);
            self.miss_who_left();
        }
        std::mem::take(&mut self.out)
    }

    /// A process that belongs here, it seems, may not join: unless all are here already, they never will be.
    pub(crate) fn refused(&mut self, why: &str) -> Out {
        if self.hosts.len() < self.limits.size {
            self.refused += 1;
            self.end(Failure::Refused { why: cut(why.to_owned()) });
        }
        std::mem::take(&mut self.out)
    }

    /// Whether processes may still come that must hear of a refusal or a loss: they would look for rank 0 in vain.
    pub(crate) fn has_to_tell(&self) -> bool {
        let told = matches!(self.over, Some(Failure::Refused { .. } | Failure::Lost { .. }));
        told && self.hosts.len() + self.refused < self.limits.size
    }

    pub(crate) fn lost(&mut self, host: usize, why: &str) -> Out {
        if !self.has_left(host) {
            self.end(Failure::lost(host, why));
        }
        std::mem::take(&mut self.out)
    }

    pub(crate) fn has_left(&self, host: usize) -> bool {
        let said = |known: &Host| known.held.contains(&ToHub::Bye);
        self.left.contains(&host) || self.hosts.get(&host).is_some_and(said)
    }

    fn handle(&mut self, host: usize, frame: ToHub) -> Result<(), &'static str> {
        match frame {
            ToHub::Set { key, value } => return self.set(host, key, value),
            ToHub::Get { key, waits } => self.get(host, key, waits),
            ToHub::Begin { scope, entry, deadline, site } => {
                let (at, moved, progress) = (self.now, self.now, 0);
                let announced = Announced { id: scope, deadline, site, at, progress, moved };
                return self.announce(host, entry, announced);
            }
            ToHub::Arrive(arrive) => return self.arrive(host, arrive),
            ToHub::Fail { scope, device, cause } => {
                let scope = self.known(host, scope)?;
                self.fail(scope, Failure::Aborted { host: host as u32, device, cause: cut(cause) });
            }
            ToHub::End { scope } => return self.leave(host, scope),
            ToHub::Heard { scope } => return self.heard(host, scope),
            ToHub::Beat { progress } => {
                for (id, progress) in progress {
                    // It may have ended meanwhile.
                    let Some(known) = self.hosts.get_mut(&host) else { break };
                    let scope = known.scopes.get(&id).and_then(|scope| self.scopes.get_mut(scope));
                    let Some(part) = scope.and_then(|scope| scope.parts.get_mut(&host)) else { continue };
                    if part.announced.progress != progress {
                        (part.announced.progress, part.announced.moved) = (progress, self.now);
                        known.moved = self.now;
                    }
                }
            }
            ToHub::Clock { .. } => return Err("a question to rank 0's server"),
            ToHub::Bye => self.bye(host),
        }
        Ok(())
    }

    fn known(&mut self, host: usize, id: u64) -> Result<u64, &'static str> {
        let known = self.hosts.get(&host).and_then(|known| known.scopes.get(&id));
        let number = *known.ok_or("a scope that it is not in")?;
        if let Some(part) = self.scopes.get_mut(&number).and_then(|scope| scope.parts.get_mut(&host)) {
            part.announced.moved = self.now;
        }
        Ok(number)
    }

    fn announce(&mut self, host: usize, entry: Entry, announced: Announced) -> Result<(), &'static str> {
        let known = self.hosts.entry(host).or_default();
        fail_if!(announced.id <= known.last_scope, "an old number of a scope");
        known.last_scope = announced.id;
        match entry {
            Entry::Named(name) => self.announce_named(host, name, announced),
            Entry::Unnamed { nth, failed } => {
                let failed = failed.map(|(device, cause)| Failure::Aborted {
                    host: host as u32,
                    device: Some(device),
                    cause: cut(cause),
                });
                self.announce_unnamed(host, nth, announced, failed);
                Ok(())
            }
        }
    }

    fn announce_named(&mut self, host: usize, name: String, announced: Announced) -> Result<(), &'static str> {
        let known = self.hosts.entry(host).or_default();
        let calls = known.calls.entry(name.clone()).or_default();
        *calls += 1;
        let name = (name, *calls);
        let number = *self.names.entry(name.clone()).or_insert_with(|| {
            self.last_scope += 1;
            self.scopes.insert(self.last_scope, Scope::new(Key::Named(name.0, name.1), self.limits.size));
            self.last_scope
        });
        known.scopes.insert(announced.id, number);
        let scope = self.scopes.get_mut(&number).ok_or("a name without a scope")?;
        let id = announced.id;
        scope.parts.insert(host, Part { announced, heard: scope.failed.is_some(), ended: None });
        if let Some(failure) = scope.failed.clone() {
            self.out.push((host, ToHost::Failed { scope: id, failure }));
            return Ok(());
        }
        if mutant::is(Rule::C5) {
            self.out.push((host, ToHost::Begun { scope: id, known: number }));
        } else if scope.announced().count() == self.limits.size {
            scope.begun = true;
            let begun = |(host, part): (_, &Announced)| (host, ToHost::Begun { scope: part.id, known: number });
            self.out.extend(scope.announced().map(begun));
        }
        Ok(())
    }

    fn leave(&mut self, host: usize, id: u64) -> Result<(), &'static str> {
        let number = self.known(host, id)?;
        if let Some(known) = self.hosts.get_mut(&host) {
            known.scopes.remove(&id);
        }
        let now = self.now;
        let scope = self.scopes.get_mut(&number).ok_or("a scope that is over")?;
        scope.parts.get_mut(&host).ok_or("a scope that it has not announced")?.ended = Some(now);
        if scope.failed.is_none()
            && let Some(failure) = scope.misses_who_ended()
        {
            self.fail(number, failure);
        }
        self.drop_meetings(number);
        if let Some(scope) = self.forget_ended(number).filter(|scope| scope.failed.is_none()) {
            self.out.extend(scope.announced().map(|(host, part)| (host, ToHost::Ended { scope: part.id })));
        }
        Ok(())
    }

    /// The scope has failed: for all hosts, also for those that come later.
    fn fail(&mut self, number: u64, failure: Failure) {
        if mutant::is(Rule::C7) {
            return self.end(failure);
        }
        let Some(scope) = self.scopes.get_mut(&number).filter(|scope| scope.failed.is_none()) else { return };
        if !self.meshed || mutant::is(Rule::DropsAtOnce) {
            scope.meetings.clear();
        }
        for (host, part) in scope.announced() {
            self.out.push((host, ToHost::Failed { scope: part.id, failure: failure.clone() }));
        }
        if !mutant::is(Rule::C2Forgets) {
            scope.failed = Some(failure);
        }
        self.drop_meetings(number);
    }

    fn end(&mut self, failure: Failure) {
        if self.over.is_some() {
            return;
        }
        for (&host, known) in self.hosts.iter().filter(|(host, _)| !self.left.contains(host)) {
            let waits = known.scopes.values().any(|scope| {
                self.scopes.get(scope).is_some_and(|scope| scope.meetings.values().any(|meeting| meeting.has(host)))
            });
            if waits || !mutant::is(Rule::C6) {
                self.out.push((host, ToHost::Over { failure: failure.clone() }));
            }
        }
        self.over = Some(failure);
    }

    fn miss_who_left(&mut self) {
        let asked = self.asked.keys().any(|key| !key.starts_with(WORDS));
        let missed =
            self.left.iter().copied().find(|&host| {
                asked || self.scopes.values().any(|scope| scope.failed.is_none() && scope.waits_for(host))
            });
        if let Some(host) = missed {
            self.end(Failure::lost(host, "it has left the cluster"));
        }
    }
}

impl Scope {
    fn new(key: Key, size: usize) -> Scope {
        Scope {
            key,
            size,
            parts: BTreeMap::new(),
            closed: false,
            begun: false,
            failed: None,
            meetings: BTreeMap::new(),
        }
    }

    fn announced(&self) -> impl Iterator<Item = (usize, &Announced)> {
        self.parts.iter().map(|(host, part)| (*host, &part.announced))
    }

    fn has_ended(&self, host: usize) -> bool {
        self.parts.get(&host).is_some_and(|part| part.ended.is_some())
    }

    fn waits_for(&self, host: usize) -> bool {
        let begins = !self.parts.contains_key(&host) && matches!(self.key, Key::Named(..));
        let ends = !self.has_ended(host) && self.parts.values().any(|part| part.ended.is_some());
        begins || ends || self.meetings.values().any(|meeting| meeting.misses(host))
    }
}

#[cfg(test)]
#[path = "../tests/unit/hub_search.rs"]
mod search_tests;
