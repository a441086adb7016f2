//! One process's view of the cluster, as a state machine without input and output: the counterpart of `hub.rs`.
//! `world.rs` holds it under a lock for the device threads; the search of `hub_search.rs` drives it directly.
//!
//! Invariants (the rules of `docs/src/design/cluster.md`):
//!
//! * After an arrival only what the hub says ends the wait: a commit, a failure of the scope, or the end of the
//!   cluster, whichever the hub has said first (C2).
//! * Turns are in the order of the hub's commits. Scopes and collectives have an order each (C3, C5).

use super::mutant::{self, Rule};
use super::wire::{Arrive, Entry, Failure, Member, ToHost, ToHub};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

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
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Scope {
    begun: Option<u64>,
    /// A member has the window of that place.
    taken: bool,
    left: bool,
    ended: bool,
    failed: Option<Failure>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Meeting {
    notes: Vec<Vec<u8>>,
    commit: Option<(u64, u64)>,
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
    /// The number of the collective in the cluster.
    pub number: u64,
    pub notes: Vec<Vec<u8>>,
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

    pub(crate) fn take(&mut self, frame: ToHost) -> Result<(), Nonsense> {
        match frame {
            ToHost::Value { key, value } => drop(self.values.insert(key, value)),
            ToHost::Begun { scope } => {
                // Who has given it up has no turn.
                if let Some(scope) = self.scopes.get_mut(&scope).filter(|scope| !scope.left) {
                    scope.begun = Some(self.orders[Class::Scope as usize].enter(1));
                }
            }
            // Each process finds the loss of rank 0 by itself, beside the journal (`near.rs`).
            ToHost::Commit { .. } if self.over.is_some() => {}
            ToHost::Commit { arrival, number, notes, more } => {
                let key = self.arrivals.get(&arrival).ok_or(Nonsense)?;
                let meeting = self.meetings.get_mut(key).ok_or(Nonsense)?;
                meeting.notes.extend(notes);
                if !more {
                    let place = self.orders[Class::Collective as usize].enter(meeting.takers);
                    meeting.commit = Some((number, place));
                    self.arrivals.remove(&arrival);
                }
            }
            ToHost::Ended { scope } => {
                if let Some(scope) = self.scopes.get_mut(&scope) {
                    scope.ended = true;
                }
            }
            ToHost::Failed { scope, failure } => {
                if let Some(scope) = self.scopes.get_mut(&scope) {
                    scope.failed.get_or_insert(failure);
                }
            }
            ToHost::Over { failure } => self.end_cluster(failure),
            ToHost::Beat | ToHost::Clock { .. } => {}
        }
        Ok(())
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
            Box::new(Meeting { notes: Vec::new(), commit: None, takers, arrived: 0, told: Vec::new() })
        });
        meeting.arrived += 1;
        let all = meeting.arrived == meeting.takers;
        let leads = leads.map(|mut arrive| {
            meeting.told.append(&mut arrive.note);
            Arrive { note: meeting.told.clone(), ..arrive }
        });
        let arrive = leads.filter(|arrive| all || !arrive.proxied || mutant::is(Rule::LastArrives))?;
        self.scopes.get(&key.0).filter(|scope| !scope.left)?;
        self.last_arrival += 1;
        self.arrivals.insert(self.last_arrival, key.clone());
        Some(ToHub::Arrive(Arrive { arrival: self.last_arrival, ..arrive }))
    }

    /// The outcome of a meeting, once that is known and the turn has come. The member then has a window to close.
    pub(crate) fn committed(&mut self, key: &Key) -> Option<Result<Committed, Failure>> {
        let turn = self.orders[Class::Collective as usize].turn;
        let commit = self.meetings.get(key).and_then(|meeting| meeting.commit);
        let Some((number, window)) = commit else { return self.failure_of_meeting(key.0).map(Err) };
        if window > turn && !mutant::is(Rule::C3) {
            return self.over.clone().map(Err);
        }
        let meeting = self.meetings.get_mut(key)?;
        meeting.takers = meeting.takers.saturating_sub(1);
        let notes = match meeting.takers {
            0 => self.meetings.remove(key).map(|meeting| meeting.notes).unwrap_or_default(),
            _ => meeting.notes.clone(),
        };
        Some(Ok(Committed { number, notes, window }))
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
                && let Some((_, place)) = meeting.commit
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
