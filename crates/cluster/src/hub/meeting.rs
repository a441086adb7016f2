//! Collectives that some hosts of a group have arrived at.

use super::super::mutant::{self, Rule};
use super::super::wire::{self, Notes};
use super::{Arrive, Call, Duration, Failure, Hub, Kind, Member, Out, Scope, ToHost, cut};
use crate::traits::OUTBOX;
use smallvec::SmallVec;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Notes in one frame; the rest of the frame is small.
const MOST_NOTES: usize = 48 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Meeting {
    pub since: Duration,
    pub members: Arc<[Member]>,
    pub proxied: bool,
    /// By host.
    pub arrived: BTreeMap<usize, Box<Arrive>>,
}

pub(super) enum Next {
    Wait,
    Commit(Box<Meeting>),
    Fail(Failure),
}

pub(super) fn check(arrive: &Arrive, host: usize, size: usize) -> Result<(), &'static str> {
    let mut members: SmallVec<[Member; 16]> = arrive.members.iter().copied().collect();
    members.sort_unstable();
    if members.windows(2).any(|two| two[0] == two[1]) || members.len() > wire::MOST_MEMBERS {
        return Err("a member that is listed twice, or too many");
    }
    fail_if!(members.iter().any(|(host, _)| *host as usize >= size), "a member of no process");
    fail_if!(members.binary_search(&(host as u32, arrive.device)).is_err(), "a collective of others");
    fail_if!(arrive.note.len() > crate::traits::MOST_NOTE, "a note that is too long");
    Ok(())
}

impl Meeting {
    pub fn missing(&self) -> BTreeSet<usize> {
        let hosts = self.members.iter().map(|(host, _)| *host as usize);
        hosts.filter(|host| !self.arrived.contains_key(host)).collect()
    }

    pub fn misses(&self, host: usize) -> bool {
        !self.has(host) && self.members.iter().any(|(member, _)| *member as usize == host)
    }

    pub fn has(&self, host: usize) -> bool {
        self.arrived.contains_key(&host)
    }

    /// Whether this member waits here. A shipment keeps its sender nowhere, a proxied meeting only from proxied ones.
    pub fn holds(&self, member: &Member) -> bool {
        (member.1 as usize) < OUTBOX && self.has(member.0 as usize) && self.members.contains(member)
    }

    /// Whether this one cannot be committed before the other.
    pub fn waits_for(&self, other: &Meeting) -> bool {
        self.members.iter().any(|member| !self.has(member.0 as usize) && other.holds(member))
    }

    /// Tells all its hosts, or one of them only.
    pub fn commit(mut self, known: u64, only: Option<usize>, out: &mut Out) {
        let mut frames: Vec<Notes> = vec![Vec::new()];
        let mut bytes = 0;
        for arrive in self.arrived.values_mut() {
            if bytes + arrive.note.len() > MOST_NOTES {
                frames.push(Vec::new());
                bytes = 0;
            }
            bytes += arrive.note.len() + 13;
            if let Some(frame) = frames.last_mut() {
                frame.push((arrive.arrival, std::mem::take(&mut arrive.note)));
            }
        }
        let count = frames.len();
        for (host, arrive) in self.arrived.iter().filter(|(host, _)| only.is_none_or(|only| only == **host)) {
            for (at, notes) in frames.iter_mut().enumerate() {
                let notes = if only.is_some() { std::mem::take(notes) } else { notes.clone() };
                out.push((*host, ToHost::Commit { arrival: arrive.arrival, known, notes, more: at + 1 < count }));
            }
        }
    }

    fn call(&self, host: usize) -> Option<Box<Call>> {
        let arrive = self.arrived.get(&host)?;
        let (first, count) = (self.members.first()?, self.members.len());
        let call = format!("{} (collective {} of a group of {count} from {first:?})", arrive.call, arrive.number);
        Some(Box::new(Call {
            place: (host as u32, arrive.device),
            call: cut(call),
            site: cut(arrive.site.to_string()),
        }))
    }
}

impl Hub {
    pub(super) fn arrive(&mut self, host: usize, arrive: Arrive) -> Result<(), &'static str> {
        let number = self.known(host, arrive.scope)?;
        let scope = self.scopes.get_mut(&number).ok_or("a scope that is over")?;
        check(&arrive, host, self.limits.size)?;
        if scope.failed.is_some() && !(self.meshed && scope.may_arrive(host)) {
            // With a mesh the process waits until it is told so.
            let dropped = ToHost::Dropped { arrival: arrive.arrival };
            self.out.extend(self.meshed.then_some((host, dropped)));
            return Ok(());
        }
        fail_if!(scope.has_ended(host), "an arrival after the end");
        match scope.arrive(host, arrive, self.now) {
            Next::Wait => {}
            Next::Fail(failure) => self.fail(number, failure),
            Next::Commit(meeting) => meeting.commit(number, self.only, &mut self.out),
        }
        self.drop_meetings(number);
        Ok(())
    }
}

impl Scope {
    fn arrive(&mut self, host: usize, arrive: Arrive, now: Duration) -> Next {
        let key = (arrive.members.clone(), arrive.number);
        match self.meetings.get_mut(&key) {
            Some(meeting) => drop(meeting.arrived.insert(host, Box::new(arrive))),
            None => {
                let (members, proxied) = (arrive.members.clone(), arrive.proxied);
                let mut arrived = BTreeMap::new();
                arrived.insert(host, Box::new(arrive));
                let meeting = Meeting { since: now, members, proxied, arrived };
                self.meetings.insert(key.clone(), Box::new(meeting));
            }
        }
        let Some(meeting) = self.meetings.get(&key) else { return Next::Wait };
        let own = &meeting.arrived[&host];
        let other = meeting.arrived.iter().find(|(_, other)| !other.is_alike(own)).map(|(other, _)| *other);
        if let Some(other) = other {
            return mismatch(Kind::Call, meeting.call(other), meeting.call(host));
        }
        if meeting.members.iter().all(|(host, _)| meeting.has(*host as usize)) {
            return self.meetings.remove(&key).map_or(Next::Wait, Next::Commit);
        }
        if let Some(failure) = self.misses_who_ended() {
            return Next::Fail(failure);
        }
        match self.circle(meeting) {
            Some(other) => {
                let theirs = meeting.members.iter().find_map(|(host, _)| match meeting.has(*host as usize) {
                    true => None,
                    false => other.call(*host as usize),
                });
                let kind = if other.members == meeting.members { Kind::Call } else { Kind::Group };
                mismatch(kind, meeting.call(host), theirs)
            }
            None => Next::Wait,
        }
    }

    /// A meeting that this one waits for, and that waits for this one, perhaps by way of others.
    fn circle(&self, meeting: &Meeting) -> Option<&Meeting> {
        let both = |one: &Meeting, other: &Meeting| one.proxied == other.proxied || mutant::is(Rule::Proxied);
        let waits = |one: &Meeting, other: &Meeting| both(one, other) && one.waits_for(other);
        self.meetings
            .values()
            .map(|other| &**other)
            .find(|other| waits(meeting, other) && self.reaches(other, meeting, &waits))
    }

    /// Whether `from` waits for `to`, perhaps by way of others.
    fn reaches(&self, from: &Meeting, to: &Meeting, waits: &dyn Fn(&Meeting, &Meeting) -> bool) -> bool {
        let mut seen = vec![from];
        let mut at = 0;
        while let Some(next) = seen.get(at).copied() {
            if next == to {
                return true;
            }
            for other in self.meetings.values().map(|other| &**other).filter(|other| waits(next, other)) {
                if !seen.contains(&other) {
                    seen.push(other);
                }
            }
            at += 1;
        }
        false
    }

    /// Whether a host that misses a meeting waits in another one, which must be over first. Not if that one waits for
    /// this: a member may wait for its proxied meetings.
    pub(super) fn excused(&self, host: usize, meeting: &Meeting) -> bool {
        let held =
            |other: &Meeting| meeting.members.iter().any(|member| member.0 as usize == host && other.holds(member));
        let mut others = self.meetings.values().filter(|other| held(other));
        others.any(|other| !self.reaches(other, meeting, &|one, other| one.waits_for(other)))
    }

    /// A host waits in a collective for a process that has ended the scope.
    pub(super) fn misses_who_ended(&self) -> Option<Failure> {
        self.meetings.values().find_map(|meeting| {
            let gone = *self.parts.iter().find(|(host, part)| part.ended.is_some() && meeting.misses(**host))?.0;
            let device = meeting.members.iter().find(|(host, _)| *host as usize == gone)?.1;
            let site = self.parts.get(&gone).map_or_else(String::new, |part| part.announced.site.clone());
            let b = Box::new(Call { place: (gone as u32, device), call: "the end of the scope".to_owned(), site });
            let a = meeting.call(*meeting.arrived.keys().next()?)?;
            Some(Failure::Mismatch { kind: Kind::Participation, a, b })
        })
    }
}

fn mismatch(kind: Kind, a: Option<Box<Call>>, b: Option<Box<Call>>) -> Next {
    match (a, b) {
        (Some(a), Some(b)) => Next::Fail(Failure::Mismatch { kind, a, b }),
        _ => Next::Wait,
    }
}
