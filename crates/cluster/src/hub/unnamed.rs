//! Which scopes without names belong together.
//!
//! The hub hears of such a scope when it needs other processes, so all processes announce the same ones in the same
//! order: the n-th one here is the n-th one there. A scope that fails before that is announced as well. It may be one
//! that others wait in, or one of its process alone, which they never announce. The place and the count of its begin
//! decide: two scopes are *the same* if they are the n-th ones of one place in their processes.
//!
//! * A scope that has failed so belongs to those of others that are the same, whenever they come, and to no others.
//! * From then on it is in doubt how the scopes of its process and of others correspond. Until two are the same again,
//!   those that meet are a mismatch, which names both places.

use super::{Announced, BTreeMap, Call, Failure, Hub, Key, Kind, Part, Rule, Scope, ToHost, cut, mutant};

/// The most failed scopes that are kept for others that may come: far more than fail before another host comes.
const MOST: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Unnamed {
    /// In the order in which all processes announce them, from 1 on.
    slots: BTreeMap<u64, Slot>,
    last: u64,
    /// Those that have failed before they needed others, and that no process had announced then; by place and number.
    early: BTreeMap<(String, u64), u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Slot {
    scope: u64,
    place: (String, u64),
    doubtful: bool,
}

/// A process's place in that order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Progress {
    at: u64,
    doubts: bool,
}

impl Hub {
    /// A process announces the n-th scope of a place. `fails`: it has failed before it needed others.
    pub(super) fn announce_unnamed(&mut self, host: usize, nth: u64, announced: Announced, fails: Option<Failure>) {
        let place = (announced.site.clone(), nth);
        let early = fails.is_some();
        let hidden = early && mutant::is(Rule::EarlyFailure);
        let Progress { at, doubts } = &mut self.hosts.entry(host).or_default().unnamed;
        let next = self.unnamed.slots.get_mut(&(*at + 1)).filter(|_| !hidden);
        let same = next.as_ref().is_some_and(|slot| slot.place == place || mutant::is(Rule::EarlyPlace));
        let (mut agreed, mut differs) = (None, false);
        let number = match (next, self.unnamed.early.get(&place)) {
            (Some(slot), _) if same => {
                *at += 1;
                slot.doubtful = false;
                agreed = Some(*at);
                slot.scope
            }
            (_, Some(number)) => *number,
            (Some(slot), None) if !early => {
                *at += 1;
                differs = *doubts || slot.doubtful;
                slot.scope
            }
            _ => {
                self.last_scope += 1;
                let key = if early {
                    *doubts = true;
                    self.unnamed.early.insert(place.clone(), self.last_scope);
                    Key::Early(place)
                } else {
                    self.unnamed.last += 1;
                    *at = self.unnamed.last;
                    self.unnamed.slots.insert(*at, Slot { scope: self.last_scope, place, doubtful: *doubts });
                    Key::Slot(*at)
                };
                self.scopes.insert(self.last_scope, Scope::new(key, self.limits.size));
                self.last_scope
            }
        };
        for other in self.hosts.values_mut().filter(|other| Some(other.unnamed.at) == agreed) {
            other.unnamed.doubts = false;
        }
        let id = announced.id;
        self.hosts.entry(host).or_default().scopes.insert(id, number);
        let Some(scope) = self.scopes.get_mut(&number) else { return };
        scope.parts.insert(host, Part { announced, heard: scope.failed.is_some(), ended: None });
        let mismatch = if differs { scope.places_differ(host) } else { None };
        match (scope.failed.clone(), fails.or(mismatch)) {
            (Some(failure), _) => self.out.push((host, ToHost::Failed { scope: id, failure })),
            (None, Some(failure)) => self.fail(number, failure),
            (None, None) => {}
        }
        self.forget_early();
    }

    /// Of too many failed scopes the oldest one is not kept for others any more.
    fn forget_early(&mut self) {
        if self.unnamed.early.len() <= MOST {
            return;
        }
        let Some(oldest) = self.unnamed.early.values().min().copied() else { return };
        self.unnamed.early.retain(|_, scope| *scope != oldest);
        if let Some(scope) = self.scopes.get_mut(&oldest) {
            scope.closed = true;
        }
        self.forget_ended(oldest);
    }

    pub(super) fn forget_ended(&mut self, number: u64) -> Option<Scope> {
        let ended = |scope: &Scope| scope.parts.values().all(|part| part.ended.is_some());
        let all = |scope: &Scope| scope.closed || scope.parts.len() == scope.size;
        self.scopes.get(&number).filter(|scope| all(scope) && ended(scope))?;
        let scope = self.scopes.remove(&number)?;
        match &scope.key {
            Key::Named(name, call) => {
                self.names.remove(&(name.clone(), *call));
                // Without such a scope all processes have begun as many, so all may count from 1 again.
                let mut open = self.names.range((name.clone(), 0)..=(name.clone(), u64::MAX));
                if open.next().is_none() || mutant::is(Rule::CountsAgain) {
                    for host in self.hosts.values_mut() {
                        host.calls.remove(name);
                    }
                }
            }
            Key::Slot(slot) => drop(self.unnamed.slots.remove(slot)),
            Key::Early(place) => drop(self.unnamed.early.remove(place)),
        }
        Some(scope)
    }
}

impl Scope {
    /// The places of this process's scope and of another's.
    fn places_differ(&self, host: usize) -> Option<Failure> {
        let here = &self.parts.get(&host)?.announced;
        let (other, theirs) = self.announced().find(|(other, _)| *other != host)?;
        let call = |host: usize, part: &Announced| {
            let call = "a scope without a name, after one that has failed before it needed other processes".to_owned();
            Box::new(Call { place: (host as u32, 0), call, site: cut(part.site.clone()) })
        };
        Some(Failure::Mismatch { kind: Kind::Call, a: call(other, theirs), b: call(host, here) })
    }
}

#[cfg(test)]
#[path = "../../tests/unit/hub/unnamed_tests.rs"]
mod tests;
