//! The hub's part where processes tell each other of their arrivals (`mesh.rs`).
//!
//! Such a process takes a collective as committed once it knows that all have arrived. So the hub must commit it, too:
//!
//! * In a scope that has failed, arrivals count until their process has heard of the failure. A collective that misses
//!   a process that has heard is dropped, and those that have arrived are told.
//! * An arrival that is [behind](super::Arrive::behind) another one waits until that one is committed, and with it all
//!   that its process tells later.

use super::{Hub, Rule, Scope, ToHost, ToHub, mutant};
use crate::wire::Failure;
use std::num::NonZeroU64;

impl Hub {
    /// From now on, and before any scope begins.
    pub(crate) fn mesh(&mut self) {
        self.meshed = true;
    }

    pub(super) fn handle_in_order(&mut self, host: usize, frame: ToHub) {
        let nonsense = |nonsense| Failure::lost(host, format!("it has sent nonsense: {nonsense}"));
        if !self.meshed {
            return self.handle(host, frame).unwrap_or_else(|why| self.end(nonsense(why)));
        }
        let known = self.hosts.entry(host).or_default();
        known.held.push_back(frame);
        let beats = known.held.len() > 1 && matches!(known.held.back(), Some(ToHub::Beat { .. }));
        let next = if beats { known.held.pop_back() } else { self.next_held(host) };
        let mut next = next.map(|frame| (host, frame));
        while let Some((host, frame)) = next {
            if let Err(nonsense) = self.handle(host, frame) {
                return self.end(Failure::lost(host, format!("it has sent nonsense: {nonsense}")));
            }
            let waiting: Vec<_> = self.hosts.iter().filter(|of| !of.1.held.is_empty()).map(|(host, _)| *host).collect();
            next = waiting.into_iter().find_map(|host| Some((host, self.next_held(host)?)));
        }
    }

    fn next_held(&mut self, host: usize) -> Option<ToHub> {
        let pending = |arrival: NonZeroU64| {
            let mut meetings = self.scopes.values().flat_map(|scope| scope.meetings.values());
            meetings.any(|meeting| meeting.arrived.get(&host).is_some_and(|arrive| arrive.arrival == arrival.get()))
        };
        if let Some(ToHub::Arrive(arrive)) = self.hosts.get(&host)?.held.front()
            && arrive.behind.is_some_and(pending)
            && !mutant::is(Rule::Overtakes)
        {
            return None;
        }
        self.hosts.get_mut(&host)?.held.pop_front()
    }

    pub(super) fn heard(&mut self, host: usize, id: u64) -> Result<(), &'static str> {
        let number = self.known(host, id)?;
        self.arrives_no_more(host, number);
        Ok(())
    }

    /// The process leaves. It may have said so before it has ended a scope that has failed.
    pub(super) fn bye(&mut self, host: usize) {
        self.left.insert(host);
        let scopes = self.hosts.get(&host).map(|known| known.scopes.values().copied().collect::<Vec<_>>());
        scopes.into_iter().flatten().for_each(|number| self.arrives_no_more(host, number));
    }

    fn arrives_no_more(&mut self, host: usize, number: u64) {
        if let Some(part) = self.scopes.get_mut(&number).and_then(|scope| scope.parts.get_mut(&host)) {
            part.heard = true;
        }
        self.drop_meetings(number);
    }

    /// Drops the collectives of a failed scope that no process can take as committed.
    pub(super) fn drop_meetings(&mut self, number: u64) {
        let Some(scope) = self.scopes.get_mut(&number).filter(|scope| scope.failed.is_some()) else { return };
        let mut meetings = std::mem::take(&mut scope.meetings);
        meetings.retain(|_, meeting| {
            let first = meeting.arrived.values().next();
            let alike = meeting.arrived.values().all(|other| first.is_none_or(|first| first.is_alike(other)));
            let stays = alike && meeting.missing().into_iter().all(|host| scope.may_arrive(host));
            if !stays {
                let dropped = meeting.arrived.iter().map(|(host, of)| (*host, ToHost::Dropped { arrival: of.arrival }));
                self.out.extend(dropped);
            }
            stays
        });
        scope.meetings = meetings;
    }
}

impl Scope {
    /// Whether an arrival of this process may be on its way, though the scope has failed.
    pub(super) fn may_arrive(&self, host: usize) -> bool {
        self.parts.get(&host).is_some_and(|part| !part.heard && part.ended.is_none())
    }
}
