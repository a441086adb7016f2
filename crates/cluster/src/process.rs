//! One process's view of the cluster, as a state machine without input and output: the counterpart of `hub.rs`.
//! `world.rs` holds it under a lock for the device threads; the search of `hub_search.rs` drives it directly.
//!
//! Invariants (the rules of `docs/src/design/cluster.md`):
//!
//! * After an arrival only what the hub says ends the wait: a commit, a failure of the scope, or the end of the
//!   cluster, whichever the hub has said first (C2). With a mesh (`mesh.rs`), also the arrivals of all others do, if it
//!   is this process's only arrival whose outcome is open. Then a failure of the scope ends the wait only when the hub
//!   drops the collective.
//! * Turns are in the order of the hub's commits. Scopes and collectives have an order each (C3, C5).

use super::mutant::{self, Rule};
use super::wire::{Arrive, Entry, Failure, Member, Notes, ToHost, ToHub};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

/// So many arrivals of another process are known. More only cost time: the hub tells of each commit.
const MOST_HEARD: usize = 16;

/// Each has an order of its own: a scope that is queued behind another may not hold up that one's collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Scope,
    Collective,
}

/// A collective of this process: scope, members, and number in the group.
pub(crate) type Key = (u64, Arc<[Member]>, u64);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    host: usize,
    values: BTreeMap<String, Vec<u8>>,
    scopes: BTreeMap<u64, Scope>,
    meetings: BTreeMap<Key, Box<Meeting>>,
    arrivals: BTreeMap<u64, Key>,
    orders: [Order; 2],
    over: Option<Failure>,
    last_scope: u64,
    last_arrival: u64,
    /// Processes tell each other of their arrivals.
    meshed: bool,
    /// By host: its last arrival that is committed, and those behind it that it has told.
    heard: BTreeMap<usize, (u64, VecDeque<Arrive>)>,
    /// Arrivals that were taken as committed, and that the hub has not committed yet.
    early: BTreeSet<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Scope {
    /// The hub's number of it.
    known: Option<NonZeroU64>,
    begun: Option<u64>,
    /// A member has the window of that place.
    taken: bool,
    left: bool,
    ended: bool,
    failed: Option<Failure>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Meeting {
    notes: Notes,
    /// The window, once it is committed.
    commit: Option<u64>,
    /// With a mesh: this process's arrival, as it was told to the hub. None also after the hub has dropped it.
    arrive: Option<Arrive>,
    /// Members of this process that have not taken the commit.
    takers: usize,
    /// Of this process's members, and their notes.
    arrived: usize,
    told: Vec<u8>,
}

/// Turns, by their number: 0, 1, ..
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Order {
    received: u64,
    turn: u64,
    /// Those that are not over: how many windows of each are to be closed.
    open: BTreeMap<u64, usize>,
}

impl Order {
    fn enter(&mut self, windows: usize) -> u64 {
        self.open.insert(self.received, windows);
        self.received += 1;
        self.received - 1
    }

    fn close(&mut self, number: u64) {
        if let Some(windows) = self.open.get_mut(&number) {
            *windows = windows.saturating_sub(1);
        }
        while self.turn < self.received && self.open.get(&self.turn).is_none_or(|windows| *windows == 0) {
            self.open.remove(&self.turn);
            self.turn += 1;
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Committed {
    pub notes: Notes,
    /// For [`Process::close`].
    pub window: u64,
}

/// How the text of a loss begins in the process that the others have lost.
const ITSELF: &str = "this is that process";

/// A frame that the hub cannot have sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nonsense;

impl Process {
    pub(crate) fn new(host: usize) -> Process {
        Process { host, ..Process::default() }
    }

    pub(crate) fn over(&self) -> Option<&Failure> {
        self.over.as_ref()
    }

    pub(crate) fn end_cluster(&mut self, mut failure: Failure) {
        if let Failure::Lost { host, why } = &mut failure
            && *host as usize == self.host
            && !why.starts_with(ITSELF)
        {
            *why = format!("{ITSELF}, which was stopped or cut off: {why}");
        }
        self.over.get_or_insert(failure);
    }

    /// From now on, and before any scope begins.
    pub(crate) fn mesh(&mut self) {
        self.meshed = true;
    }

    /// Takes the hub's frame, and returns the answer.
    pub(crate) fn take(&mut self, frame: ToHost) -> Result<Option<ToHub>, Nonsense> {
        match frame {
            ToHost::Value { key, value } => drop(self.values.insert(key, value)),
            ToHost::Begun { scope, known } => {
                // Who has given it up has no turn.
                if let Some(scope) = self.scopes.get_mut(&scope).filter(|scope| !scope.left) {
                    scope.known = NonZeroU64::new(known);
                    scope.begun = Some(self.orders[Class::Scope as usize].enter(1));
                }
            }
            // Each process finds the loss of rank 0 by itself, beside the journal (`near.rs`).
            ToHost::Commit { .. } | ToHost::Dropped { .. } if self.over.is_some() => {}
            ToHost::Commit { arrival, more, .. } if self.early.contains(&arrival) => {
                if !more {
                    self.early.remove(&arrival);
                }
            }
            ToHost::Commit { arrival, known, notes, more } => {
                let key = self.arrivals.get(&arrival).ok_or(Nonsense)?;
                let meeting = self.meetings.get_mut(key).ok_or(Nonsense)?;
                meeting.notes.extend(notes);
                if !more {
                    self.scopes.entry(key.0).and_modify(|scope| scope.known = NonZeroU64::new(known));
                    self.commit(arrival);
                    self.commit_early();
                }
            }
            ToHost::Dropped { arrival } => {
                let meeting = self.arrivals.remove(&arrival).and_then(|key| self.meetings.get_mut(&key));
                meeting.ok_or(Nonsense)?.arrive = None;
                self.commit_early();
            }
            ToHost::Ended { scope } => {
                if let Some(scope) = self.scopes.get_mut(&scope) {
                    scope.ended = true;
                }
            }
            ToHost::Failed { scope, failure } => {
                if let Some(known) = self.scopes.get_mut(&scope) {
                    known.failed.get_or_insert(failure);
                    return Ok(Some(ToHub::Heard { scope }).filter(|_| self.meshed && !known.left));
                }
            }
            ToHost::Over { failure } => self.end_cluster(failure),
            ToHost::Beat | ToHost::Clock { .. } => {}
        }
        Ok(None)
    }

    fn commit(&mut self, arrival: u64) {
        let Some(key) = self.arrivals.remove(&arrival) else { return };
        let Some(meeting) = self.meetings.get_mut(&key) else { return };
        meeting.commit = Some(self.orders[Class::Collective as usize].enter(meeting.takers));
        if self.meshed {
            let hosts: BTreeSet<_> = key.1.iter().map(|member| member.0 as usize).collect();
            for (host, (arrival, _)) in hosts.into_iter().zip(&meeting.notes) {
                let (last, heard) = self.heard.entry(host).or_default();
                *last = (*last).max(*arrival);
                heard.retain(|other| other.arrival > *last);
            }
        }
    }

    /// Another process has told that it has arrived.
    pub(crate) fn hear(&mut self, host: usize, arrive: Arrive) {
        let (last, heard) = self.heard.entry(host).or_default();
        if arrive.arrival > *last {
            heard.push_back(arrive);
        }
        if heard.len() > MOST_HEARD {
            heard.pop_front();
        }
        self.commit_early();
    }

    /// Takes a collective as committed, if all have arrived, and if it is this process's only arrival whose outcome is
    /// open. Later arrivals of this process are [behind](Arrive::behind) it, so the hub has the same order.
    fn commit_early(&mut self) {
        let mut last = self.arrivals.iter().rev();
        let Some((&arrival, key)) = last.next() else { return };
        if last.next().is_some() && !mutant::is(Rule::Hurries) || self.over.is_some() {
            return;
        }
        let Some(meeting) = self.meetings.get_mut(key) else { return };
        let Some(own) = meeting.arrive.as_ref().filter(|own| own.known.is_some()) else { return };
        let mut notes = BTreeMap::from([(self.host, (arrival, own.note.clone()))]);
        let is_it = |other: &Arrive| {
            (other.known, other.number, &other.members) == (own.known, own.number, &own.members) && own.is_alike(other)
        };
        for host in own.members.iter().map(|member| member.0 as usize) {
            let of = |(_, heard): &(_, VecDeque<Arrive>)| heard.iter().find(|other| is_it(other)).cloned();
            match notes.contains_key(&host) {
                true => {}
                false => match self.heard.get(&host).and_then(of) {
                    Some(other) => drop(notes.insert(host, (other.arrival, other.note))),
                    None => return,
                },
            }
        }
        meeting.notes = notes.into_values().collect();
        self.early.insert(arrival);
        self.commit(arrival);
    }

    pub(crate) fn value(&self, key: &str) -> Option<Result<Vec<u8>, Failure>> {
        self.values.get(key).cloned().map(Ok).or_else(|| self.over.clone().map(Err))
    }

    /// Announces a scope. Its number here, and what to tell the hub.
    pub(crate) fn begin(&mut self, entry: Entry, deadline: Duration, site: String) -> (u64, ToHub) {
        self.last_scope += 1;
        let scope = self.last_scope;
        self.scopes.insert(scope, Scope::default());
        (scope, ToHub::Begin { scope, entry, deadline, site })
    }

    /// For an ordered scope: its window, once it has begun and has its turn.
    pub(crate) fn begun(&mut self, scope: u64) -> Option<Result<u64, Failure>> {
        if let Some(failure) = self.failure(scope) {
            return Some(Err(failure));
        }
        let turn = self.orders[Class::Scope as usize].turn;
        let known = self.scopes.get_mut(&scope)?;
        let place = known.begun.filter(|place| *place <= turn)?;
        known.taken = true;
        Some(Ok(place))
    }

    pub(crate) fn failure(&self, scope: u64) -> Option<Failure> {
        let known = self.scopes.get(&scope);
        let failed = known.and_then(|scope| scope.failed.clone()).or_else(|| self.over.clone());
        failed.filter(|_| known.is_none_or(|scope| !scope.ended))
    }

    pub(crate) fn failure_elsewhere(&self, scope: u64) -> Option<Failure> {
        if self.scopes.get(&scope).is_some_and(|scope| scope.ended) {
            return None;
        }
        let own = |failure: &Failure| matches!(failure, Failure::Aborted { host, .. } if *host as usize == self.host);
        self.failure(scope).filter(|failure| !own(failure))
    }

    /// A member has arrived. The leader's arrival is told to the hub; `arrive` then lacks only its number. In a proxied
    /// meeting all lead, and the last one's is told, with the notes of all.
    pub(crate) fn arrive(&mut self, key: &Key, leads: Option<Arrive>) -> Option<ToHub> {
        let meeting = self.meetings.entry(key.clone()).or_insert_with(|| {
            let takers = key.1.iter().filter(|(host, _)| *host as usize == self.host).count();
            Box::new(Meeting { notes: Vec::new(), commit: None, arrive: None, takers, arrived: 0, told: Vec::new() })
        });
        meeting.arrived += 1;
        let all = meeting.arrived == meeting.takers;
        let leads = leads.map(|mut arrive| {
            meeting.told.append(&mut arrive.note);
            Arrive { note: meeting.told.clone(), ..arrive }
        });
        let arrive = leads.filter(|arrive| all || !arrive.proxied || mutant::is(Rule::LastArrives))?;
        let scope = self.scopes.get(&key.0).filter(|scope| !(scope.left || self.meshed && scope.failed.is_some()))?;
        self.last_arrival += 1;
        let (arrival, behind) = (self.last_arrival, self.early.last().copied().and_then(NonZeroU64::new));
        let known = scope.known.filter(|_| self.meshed);
        let arrive = Arrive { arrival, known, behind, ..arrive };
        self.arrivals.insert(arrival, key.clone());
        if self.meshed {
            meeting.arrive = Some(arrive.clone());
            self.commit_early();
        }
        Some(ToHub::Arrive(arrive))
    }

    /// The outcome of a meeting, once that is known and the turn has come. The member then has a window to close.
    pub(crate) fn committed(&mut self, key: &Key) -> Option<Result<Committed, Failure>> {
        let turn = self.orders[Class::Collective as usize].turn;
        let meeting = self.meetings.get(key);
        let Some(window) = meeting.and_then(|meeting| meeting.commit) else {
            // Another process may have taken it as committed.
            let arrived = meeting.is_some_and(|meeting| meeting.arrive.is_some()) && !mutant::is(Rule::LeavesEarly);
            return self.failure_of_meeting(key.0).filter(|_| !arrived || self.over.is_some()).map(Err);
        };
        if window > turn && !mutant::is(Rule::C3) {
            return self.over.clone().map(Err);
        }
        let meeting = self.meetings.get_mut(key)?;
        meeting.takers = meeting.takers.saturating_sub(1);
        let notes = match meeting.takers {
            0 => self.meetings.remove(key).map(|meeting| meeting.notes).unwrap_or_default(),
            _ => meeting.notes.clone(),
        };
        Some(Ok(Committed { notes, window }))
    }

    fn failure_of_meeting(&self, scope: u64) -> Option<Failure> {
        let left = self.scopes.get(&scope).is_none_or(|scope| scope.left);
        let cause = || "a collective after the end of its scope".to_owned();
        let late = || Failure::Aborted { host: self.host as u32, device: None, cause: cause() };
        self.failure(scope).or_else(|| left.then(late))
    }

    pub(crate) fn close(&mut self, class: Class, window: u64) {
        self.orders[class as usize].close(window);
    }

    pub(crate) fn fail(&mut self, scope: u64, device: Option<u32>, cause: String) -> Option<ToHub> {
        let known = self.scopes.get_mut(&scope).filter(|scope| !scope.left)?;
        if mutant::is(Rule::C2Decides) {
            known.failed.get_or_insert(Failure::Aborted { host: self.host as u32, device, cause: cause.clone() });
        }
        Some(ToHub::Fail { scope, device, cause })
    }

    pub(crate) fn end(&mut self, scope: u64) -> Option<ToHub> {
        let known = self.scopes.get_mut(&scope).filter(|scope| !scope.left)?;
        known.left = true;
        Some(ToHub::End { scope })
    }

    pub(crate) fn ended(&self, scope: u64) -> Option<Result<(), Failure>> {
        match self.scopes.get(&scope) {
            Some(scope) if scope.ended => Some(Ok(())),
            _ => self.failure(scope).map(Err),
        }
    }

    pub(crate) fn forget(&mut self, scope: u64) -> Option<ToHub> {
        let told = self.end(scope);
        let untaken = self.scopes.remove(&scope).filter(|scope| !scope.taken);
        if let Some(place) = untaken.and_then(|scope| scope.begun) {
            self.orders[Class::Scope as usize].open.remove(&place);
        }
        let orders = &mut self.orders[Class::Collective as usize];
        self.meetings.retain(|key, meeting| {
            if key.0 == scope
                && let Some(place) = meeting.commit
            {
                orders.open.remove(&place);
            }
            key.0 != scope
        });
        self.orders.iter_mut().for_each(|order| order.close(u64::MAX));
        told
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/process_tests.rs"]
mod tests;
