//! An explicit-state search over the cluster's control: the real hub and the real state of each process, and a model
//! of what surrounds them: connections, the streams of devices, and their queues of scopes. It tries every order of
//! steps, arrivals, failures, deadlines and losses of small programs. In each:
//!
//! * nobody waits for ever, and who waits gets an answer;
//! * collectives are launched in one order in all processes, by all of their members or by none;
//! * what must succeed does: a failed scope leaves the next one in order.
//!
//! It does so for processes that are connected to the hub, and for those that meet by a journal, where each has a
//! replica of the hub (`near.rs`): a record is appended in one step, and a process reads at any time. And it does so
//! for those that also tell each other of arrivals (`mesh.rs`): such a word comes at any time.
//!
//! For each rule of `docs/src/design/cluster.md` there is a program that fails when the rule is broken.
//!
//! This is a unit test of `crates/cluster/src/hub.rs`, with and without loom: nothing here is concurrent.

use super::{Hub, Limits, Out};
use crate::{
    mutant::{Rule, broken},
    process::{Class, Process},
    wire::{Arrive, Entry, Failure, Member, Record, ToHost, ToHub},
};
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    ops::{Deref, DerefMut},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

const DEADLINE: Duration = Duration::from_secs(2);

/// In the journal so many ticks are one record, since more records have far more orders.
const TICKS: u32 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Op {
    /// A collective of one device of each of these hosts; the device is the thread's number.
    Meet(&'static [u32]),
    /// Of a proxy thread: a collective of these members, with this number.
    Carry(&'static [Member], u64),
    Fail,
    /// Never gets on by itself.
    Stuck,
}
use Op::{Carry, Fail, Meet, Stuck};

/// A scope of one process: its name, and a program for each device. Names that begin with `-` are of scopes without
/// one: a letter for the place and a digit for the number there. With `!` such a scope fails before it joins.
type Script = (&'static str, &'static [&'static [Op]]);

/// Rules of launches, C1 and C4, and of the journal, broken in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Rule(Rule),
    /// C1: a committed collective is left out when the gang has failed.
    LooksAtItsGang,
    /// C4: a window is closed before the launch.
    ClosesEarly,
    /// A failure is told to nobody.
    FailsSilently,
    /// A process takes its own record before it reads it in its place.
    OwnPlace,
    /// Each process has a clock of its own.
    OwnClock,
}

/// How the processes meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Hub,
    Journal,
    Mesh,
}

#[derive(Clone, Copy, Default)]
struct Program {
    /// For each process: threads that begin scopes, each with the scopes that it begins one after the other.
    hosts: &'static [&'static [&'static [Script]]],
    kills: usize,
    ticks: u32,
    /// Of steps before all have begun, and behind the last collective, only one order is tried.
    middle: bool,
    /// So many states are tried, if all are too many for a test.
    some: Option<usize>,
    /// Scopes that must succeed in all processes if nobody is killed.
    succeeds: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Idle,
    Begins,
    Runs,
    Ends,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Runner {
    scope: usize,
    phase: Phase,
    id: u64,
    devices: Vec<Device>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Device {
    at: usize,
    arrived: bool,
    /// A committed collective, by its number in the search, and its window, before the launch.
    committed: Option<(u64, u64)>,
    /// A collective that was launched.
    launched: Option<u64>,
    failed: bool,
}

#[derive(Clone, Debug, Hash)]
struct Host {
    process: Process,
    runners: Vec<Runner>,
    /// The scopes that wait for the devices, and the collectives that the devices have been given.
    queue: VecDeque<u64>,
    stream: VecDeque<u64>,
    alive: bool,
    known_dead: bool,
    to_hub: VecDeque<ToHub>,
    to_host: VecDeque<ToHost>,
    /// Where the processes meet by a journal: the records to read.
    replica: Option<Part<Hub>>,
    journal: VecDeque<(usize, Record)>,
    /// By host: the arrivals that it has told this one.
    words: BTreeMap<usize, VecDeque<Arrive>>,
    last_told: Option<Arrive>,
    results: Vec<(&'static str, bool)>,
}

/// A part of a state: states that differ elsewhere share it, and it is hashed once.
#[derive(Clone, Debug)]
struct Part<T> {
    value: Rc<T>,
    hash: Cell<Option<u64>>,
}

impl<T> Part<T> {
    fn new(value: T) -> Part<T> {
        Part { value: Rc::new(value), hash: Cell::new(None) }
    }
}

impl<T> Deref for Part<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Clone> DerefMut for Part<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.hash.set(None);
        Rc::make_mut(&mut self.value)
    }
}

impl<T: Hash> Hash for Part<T> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let known = self.hash.get().unwrap_or_else(|| {
            let mut own = DefaultHasher::new();
            self.value.hash(&mut own);
            own.finish()
        });
        self.hash.set(Some(known));
        known.hash(hasher);
    }
}

#[derive(Clone, Debug, Hash)]
struct State {
    hub: Part<Hub>,
    hosts: Vec<Part<Host>>,
    members: BTreeMap<u64, Vec<Member>>,
    kills: usize,
    ticks: u32,
}

struct Search {
    program: Program,
    way: Way,
    mutant: Option<Broken>,
}

impl Search {
    /// All states from the first one; the first mistake, if any.
    fn run(&self) -> Result<usize, String> {
        let rule = match self.mutant {
            Some(Broken::Rule(rule)) => Some(rule),
            _ => None,
        };
        broken(rule, || {
            let mut seen = HashSet::new();
            let mut stack = vec![self.first()];
            while let Some(state) = stack.pop() {
                let mut hasher = DefaultHasher::new();
                state.hash(&mut hasher);
                if !seen.insert(hasher.finish()) {
                    continue;
                }
                let before = stack.len();
                self.next(&state, &mut stack)?;
                if self.program.middle && !self.is_busy(&state) {
                    stack.truncate(before + 1);
                }
                if stack.len() == before {
                    self.finished(&state)?;
                }
                if self.program.some == Some(seen.len()) {
                    break;
                }
                if seen.len() > 2_000_000 {
                    return Err("too many states".to_owned());
                }
                if state.kills < self.program.kills {
                    self.kill(&state, &mut stack);
                }
            }
            Ok(seen.len())
        })
    }

    fn first(&self) -> State {
        let size = self.program.hosts.len();
        let hour = Duration::from_secs(3600);
        let limits = Limits { size, heartbeat_timeout: hour, connect_timeout: hour };
        let mut hub = Hub::new(limits);
        let meshed = self.way == Way::Mesh;
        if meshed {
            hub.mesh();
        }
        let host = |(host, runners): (usize, &&[&[Script]])| {
            let mut process = Process::new(host);
            if meshed {
                process.mesh();
            }
            Part::new(Host {
                process,
                runners: vec![Runner::default(); runners.len()],
                queue: VecDeque::new(),
                stream: VecDeque::new(),
                alive: true,
                known_dead: false,
                to_hub: VecDeque::new(),
                to_host: VecDeque::new(),
                replica: (self.way == Way::Journal).then(|| Part::new(Hub::replica(limits, host))),
                journal: VecDeque::new(),
                words: BTreeMap::new(),
                last_told: None,
                results: Vec::new(),
            })
        };
        (0..size).for_each(|host| drop(hub.joined(host)));
        let hosts = self.program.hosts.iter().enumerate().map(host).collect();
        State { hub: Part::new(hub), hosts, members: BTreeMap::new(), kills: 0, ticks: 0 }
    }

    fn has_begun(state: &State) -> bool {
        let begun = |runner: &Runner| runner.scope > 0 || matches!(runner.phase, Phase::Runs | Phase::Ends);
        state.hosts.iter().all(|host| !host.alive || host.runners.iter().all(begun))
    }

    /// All have begun, and some device has something to do.
    fn is_busy(&self, state: &State) -> bool {
        let busy = |(runner, scripts): (&Runner, &&[Script])| {
            let Some((_, scripts)) = scripts.get(runner.scope) else { return false };
            runner.devices.iter().zip(*scripts).any(|(device, script)| !device.failed && device.at < script.len())
        };
        let mut hosts = state.hosts.iter().zip(self.program.hosts);
        Self::has_begun(state) && hosts.any(|(host, scripts)| host.runners.iter().zip(*scripts).any(busy))
    }

    fn kill(&self, state: &State, stack: &mut Vec<State>) {
        for host in (0..state.hosts.len()).filter(|host| state.hosts[*host].alive) {
            let mut next = state.clone();
            next.kills += 1;
            next.hosts[host].alive = false;
            next.hosts[host].to_host.clear();
            next.hosts[host].journal.clear();
            next.hosts[host].words.clear();
            stack.push(next);
        }
    }

    fn finished(&self, state: &State) -> Result<(), String> {
        for (number, host) in state.hosts.iter().enumerate().filter(|(_, host)| host.alive) {
            let scripts = self.program.hosts[number];
            let waits = host.runners.iter().zip(scripts).find(|(runner, scripts)| runner.scope < scripts.len());
            if let Some((runner, _)) = waits {
                return Err(format!("host {number} waits for ever: {runner:?} {state:#?}"));
            }
            for (name, well) in &host.results {
                let must = state.kills == 0 && self.program.succeeds.contains(name);
                if must && !well {
                    return Err(format!("scope {name} has failed in host {number}"));
                }
            }
        }
        Ok(())
    }

    /// All states after one step.
    fn next(&self, state: &State, stack: &mut Vec<State>) -> Result<(), String> {
        let before = stack.len();
        let near = self.way == Way::Journal;
        for at in 0..state.hosts.len() {
            let host = &state.hosts[at];
            if !host.to_hub.is_empty() {
                let mut next = state.clone();
                match next.hosts[at].to_hub.pop_front() {
                    Some(frame) if near => {
                        let record = Record::Frame(frame);
                        let short = record.short(next.hosts[at].last_told.as_ref());
                        if let Record::Frame(ToHub::Arrive(arrive)) = &record {
                            next.hosts[at].last_told = Some(arrive.without_note());
                        }
                        let record = (at, short.unwrap_or(record));
                        let first = self.mutant == Some(Broken::OwnPlace);
                        if first {
                            next.hosts[at].journal.push_front(record.clone());
                            next.read(at)?;
                        }
                        next.append(&record, |host| !first || host != at);
                    }
                    Some(frame) => {
                        let out = next.hub.frame(at, frame);
                        next.send(out);
                    }
                    None => {}
                }
                stack.push(next);
            }
            if !host.alive {
                if host.to_hub.is_empty() && !host.known_dead {
                    let mut next = state.clone();
                    next.hosts[at].known_dead = true;
                    let out = next.hub.lost(at, "killed");
                    // Rank 0 tells it there first. Its own loss each finds by itself.
                    if near && at != 0 {
                        next.append(&(0, Record::Over(Failure::lost(at, "killed"))), |_| true);
                    }
                    next.send(out);
                    stack.push(next);
                }
                continue;
            }
            if !host.to_host.is_empty() {
                let mut next = state.clone();
                while !next.hosts[at].journal.is_empty() {
                    next.read(at)?;
                }
                let host = &mut next.hosts[at];
                if let Some(frame) = host.to_host.pop_front() {
                    let answer = host.process.take(frame).map_err(|_| "the hub has sent nonsense".to_owned())?;
                    host.to_hub.extend(answer);
                }
                stack.push(next);
            }
            if !host.journal.is_empty() {
                let mut next = state.clone();
                next.read(at)?;
                stack.push(next);
            }
            for from in host.words.keys() {
                let mut next = state.clone();
                let host = &mut *next.hosts[at];
                let words = host.words.get_mut(from).expect("it is a key");
                host.process.hear(*from, words.pop_front().expect("one word at least"));
                host.words.retain(|_, words| !words.is_empty());
                stack.push(next);
            }
            for runner in 0..host.runners.len() {
                self.runner(state, at, runner, stack)?;
            }
        }
        // At any time some ticks pass; when nothing else can happen, as many as are needed.
        let still = stack.len() == before;
        let sure = if near { self.program.ticks.div_ceil(TICKS) } else { self.program.ticks };
        if state.ticks < sure || still && state.ticks < 4 * self.program.ticks {
            let mut next = state.clone();
            next.ticks += 1;
            let clock = DEADLINE / 4 * next.ticks;
            let out = next.hub.tick(clock);
            next.send(out);
            match self.mutant {
                _ if !near => stack.push(next),
                Some(Broken::OwnClock) => stack.extend((0..next.hosts.len()).map(|own| {
                    let mut next = next.clone();
                    next.append(&(0, Record::Tick(clock)), |host| host == own);
                    next
                })),
                _ => {
                    next.append(&(0, Record::Tick(clock)), |_| true);
                    stack.push(next);
                }
            }
        }
        Ok(())
    }

    fn runner(&self, state: &State, at: usize, which: usize, stack: &mut Vec<State>) -> Result<(), String> {
        let runner = &state.hosts[at].runners[which];
        let Some((name, scripts)) = self.program.hosts[at][which].get(runner.scope) else { return Ok(()) };
        let mut next = state.clone();
        let Host { process, runners, queue, to_hub, .. } = &mut *next.hosts[at];
        let now = &mut runners[which];
        match runner.phase {
            Phase::Idle => {
                let (id, frame) = process.begin(entry(name), DEADLINE, name.get(1..2).unwrap_or_default().to_owned());
                (now.id, now.phase) = (id, Phase::Begins);
                to_hub.push_back(frame);
                match name.as_bytes()[0] {
                    b'!' => next.hosts[at].over(which, name, false),
                    b'-' => {
                        queue.push_back(id);
                        now.devices = vec![Device::default(); scripts.len()];
                        now.phase = Phase::Runs;
                    }
                    _ => {}
                }
                stack.push(next);
            }
            Phase::Begins => {
                let Some(begun) = process.begun(now.id) else { return Ok(()) };
                match begun {
                    Ok(window) => {
                        queue.push_back(now.id);
                        process.close(Class::Scope, window);
                        now.devices = vec![Device::default(); scripts.len()];
                        now.phase = Phase::Runs;
                    }
                    Err(_) => next.hosts[at].over(which, name, false),
                }
                stack.push(next);
            }
            Phase::Runs if self.program.middle && !Self::has_begun(state) => {}
            Phase::Runs => {
                if queue.front() != Some(&now.id) {
                    return Ok(());
                }
                let busy = |(device, script): (&Device, &&[Op])| !device.failed && device.at < script.len();
                if !now.devices.iter().zip(*scripts).any(busy) {
                    if now.devices.iter().any(|device| device.failed) {
                        next.hosts[at].over(which, name, false);
                    } else {
                        now.phase = Phase::Ends;
                        to_hub.extend(process.end(now.id));
                    }
                    stack.push(next);
                    return Ok(());
                }
                for (device, script) in scripts.iter().enumerate() {
                    self.device(state, (at, which, device), script, stack)?;
                }
            }
            Phase::Ends => {
                let Some(ended) = process.ended(now.id) else { return Ok(()) };
                next.hosts[at].over(which, name, ended.is_ok());
                stack.push(next);
            }
        }
        Ok(())
    }

    fn device(
        &self,
        state: &State,
        (at, which, number): (usize, usize, usize),
        script: &[Op],
        stack: &mut Vec<State>,
    ) -> Result<(), String> {
        let step = state.hosts[at].runners[which].devices[number].at;
        if let Some(Carry(members, of)) = script.get(step) {
            return self.carry(state, (at, which, number), (members, *of), stack);
        }
        let mut next = state.clone();
        let State { hosts, members: groups, .. } = &mut next;
        let gang_failed = hosts[at].runners[which].devices.iter().any(|device| device.failed);
        let done = |hosts: &[Part<Host>], commit: u64| {
            let passed = |(host, _): &Member| hosts[*host as usize].stream.iter().all(|queued| *queued != commit);
            groups.get(&commit).is_some_and(|members| members.iter().all(passed))
        };
        let heads = |hosts: &[Part<Host>], commit: u64| {
            let head = |(host, _): &Member| hosts[*host as usize].stream.front() == Some(&commit);
            groups.get(&commit).is_some_and(|members| members.iter().all(head))
        };
        let Host { process, runners, stream, to_hub, .. } = &mut *hosts[at];
        let Runner { id, devices, .. } = &mut runners[which];
        let device = &mut devices[number];
        let Some(op) = script.get(device.at).filter(|_| !device.failed) else { return Ok(()) };
        match op {
            Fail => {
                device.failed = true;
                if self.mutant != Some(Broken::FailsSilently) {
                    to_hub.extend(process.fail(*id, Some(number as u32), String::new()));
                }
            }
            Stuck if process.failure(*id).is_some() => device.failed = true,
            Stuck | Carry(..) => return Ok(()),
            Meet(group) => {
                let members: Vec<Member> = group.iter().map(|host| (*host, number as u32)).collect();
                let members: Arc<[Member]> = members.into();
                let key = (*id, members.clone(), device.at as u64 + 1);
                if let Some(commit) = device.launched {
                    if process.over().is_some() && !heads(&state.hosts, commit) {
                        // The transport has failed.
                        device.failed = true;
                    } else if heads(&state.hosts, commit) || done(&state.hosts, commit) {
                        for (host, _) in groups.get(&commit).into_iter().flatten() {
                            hosts[*host as usize].stream.retain(|queued| *queued != commit);
                        }
                        let device = &mut hosts[at].runners[which].devices[number];
                        *device = Device { at: device.at + 1, ..Device::default() };
                    } else {
                        return Ok(());
                    }
                } else if let Some((commit, window)) = device.committed {
                    if self.mutant != Some(Broken::LooksAtItsGang) || !gang_failed {
                        stream.push_back(commit);
                        device.launched = Some(commit);
                    } else {
                        device.failed = true;
                    }
                    process.close(Class::Collective, window);
                } else if !device.arrived {
                    let arrive = Arrive {
                        arrival: 0,
                        scope: *id,
                        members,
                        number: key.2,
                        device: number as u32,
                        known: None,
                        behind: None,
                        proxied: false,
                        call: "".into(),
                        site: "".into(),
                        note: Vec::new(),
                    };
                    device.arrived = true;
                    let told = process.arrive(&key, Some(arrive));
                    next.tell(at, told);
                } else {
                    match process.committed(&key) {
                        None => return Ok(()),
                        Some(Err(_)) => device.failed = true,
                        Some(Ok(taken)) => {
                            // Of the first of its hosts the arrival.
                            let commit = u64::from(group[0]) << 32 | taken.notes[0].0;
                            device.committed = Some((commit, taken.window));
                            if groups.entry(commit).or_insert_with(|| members.to_vec())[..] != members[..] {
                                return Err(format!("host {at} has another commit {commit}"));
                            }
                            if self.mutant == Some(Broken::ClosesEarly) {
                                process.close(Class::Collective, taken.window);
                            }
                        }
                    }
                }
            }
        }
        stack.push(next);
        Ok(())
    }
}

impl State {
    /// Sends a process's frame to the hub, and an arrival to the other members.
    fn tell(&mut self, at: usize, told: Option<ToHub>) {
        if let Some(ToHub::Arrive(arrive)) = &told
            && arrive.known.is_some()
        {
            let others: BTreeSet<_> = arrive.members.iter().map(|member| member.0 as usize).collect();
            for host in others.into_iter().filter(|host| *host != at) {
                if self.hosts[host].alive {
                    self.hosts[host].words.entry(at).or_default().push_back(arrive.clone());
                }
            }
        }
        self.hosts[at].to_hub.extend(told);
    }

    /// Appends a record, for these hosts to read.
    fn append(&mut self, record: &(usize, Record), reads: impl Fn(usize) -> bool) {
        let reading = self.hosts.iter_mut().enumerate().filter(|(host, state)| state.alive && reads(*host));
        reading.for_each(|(_, host)| host.journal.push_back(record.clone()));
    }

    /// A process reads the next record.
    fn read(&mut self, at: usize) -> Result<(), String> {
        let Host { process, replica: Some(replica), journal, .. } = &mut *self.hosts[at] else { return Ok(()) };
        let Some((from, record)) = journal.pop_front() else { return Ok(()) };
        let records = match record {
            Record::Tick(clock) => (0..TICKS).map(|tick| Record::Tick(clock * TICKS + DEADLINE / 4 * tick)).collect(),
            other => vec![other],
        };
        let out: Vec<_> = records.into_iter().flat_map(|record| replica.record(from, Ok(record))).collect();
        for (_, frame) in out.into_iter().filter(|(to, _)| *to == at) {
            process.take(frame).map_err(|_| "a replica has sent nonsense".to_owned())?;
        }
        Ok(())
    }

    fn send(&mut self, out: Out) {
        for (host, frame) in out {
            if self.hosts[host].alive && frame != ToHost::Beat {
                self.hosts[host].to_host.push_back(frame);
            }
        }
    }
}

fn entry(name: &str) -> Entry {
    let nth = name.bytes().last().map_or(0, |digit| u64::from(digit - b'0'));
    match name.as_bytes()[0] {
        b'!' => Entry::Unnamed { nth, failed: Some((0, String::new())) },
        b'-' => Entry::Unnamed { nth, failed: None },
        _ => Entry::Named(name.to_owned()),
    }
}

impl Host {
    /// The scope is over in this process.
    fn over(&mut self, which: usize, name: &'static str, well: bool) {
        let runner = &mut self.runners[which];
        self.queue.retain(|id| *id != runner.id);
        self.to_hub.extend(self.process.forget(runner.id));
        *runner = Runner { scope: runner.scope + 1, ..Runner::default() };
        self.results.push((name, well));
    }
}

#[path = "hub_search/programs.rs"]
mod programs;
#[path = "hub_search/proxies.rs"]
mod proxies;
