//! Who is silent, and who keeps others waiting without getting on.

use super::{Duration, Failure, Hub, Key, Scope};

impl Hub {
    pub(super) fn look_for_the_silent(&mut self) {
        let (now, limits) = (self.now, self.limits);
        let silent = |host: &super::Host| host.joined && !host.left && now - host.heard >= limits.silence;
        if let Some(host) = self.hosts.iter().position(silent) {
            let why = format!("it has said nothing for {:?}", limits.silence);
            return self.end(Failure::lost(host, why));
        }
        let missing: Vec<u32> = (0..).zip(&self.hosts).filter(|(_, host)| !host.joined).map(|(host, _)| host).collect();
        if !missing.is_empty() && now >= limits.patience {
            self.end(Failure::Timeout { op: "connect".to_owned(), waited: now, missing });
        }
    }

    pub(super) fn look_for_the_late(&mut self) {
        let late: Vec<(u64, Failure)> = self
            .scopes
            .iter()
            .filter(|(_, scope)| scope.failed.is_none())
            .filter_map(|(number, scope)| Some((*number, self.late(scope)?)))
            .collect();
        for (number, failure) in late {
            self.fail(number, failure);
        }
    }

    /// The failure of a scope in which a process waits for others that have not got on for its deadline.
    fn late(&self, scope: &Scope) -> Option<Failure> {
        let deadline = |hosts: &mut dyn Iterator<Item = usize>| {
            let of = |host: usize| scope.parts[host].announced.as_ref().map(|part| part.deadline);
            hosts.filter_map(of).min().unwrap_or(Duration::MAX)
        };
        for meeting in scope.meetings.values() {
            let limit = deadline(&mut meeting.arrived.keys().copied());
            // Who waits in another meeting is late only if that one is.
            let missing = meeting.missing().into_iter().filter(|host| !scope.excused(*host, meeting));
            let call = meeting.arrived.values().next().map_or("a collective", |arrive| &arrive.call);
            if let Some(failure) = self.stalled(scope, missing, meeting.since, limit, call) {
                return Some(failure);
            }
        }
        let waits = |host: usize| scope.meetings.values().any(|meeting| meeting.has(host));
        if let Some(since) = scope.parts.iter().filter_map(|part| part.ended).min() {
            let (ended, others): (Vec<_>, Vec<_>) =
                (0..scope.parts.len()).partition(|host| scope.parts[*host].ended.is_some());
            let limit = deadline(&mut ended.into_iter());
            let missing = others.into_iter().filter(|host| !waits(*host));
            return self.stalled(scope, missing, since, limit, "the end of a scope");
        }
        let since = scope.announced().map(|(_, part)| part.at).min()?;
        if scope.begun || !matches!(scope.key, Key::Named(..)) {
            return None;
        }
        let limit = deadline(&mut scope.announced().map(|(host, _)| host));
        let missing = (0..scope.parts.len()).filter(|host| scope.parts[*host].announced.is_none());
        self.stalled(scope, missing, since, limit, "the beginning of a scope")
    }

    /// Those of `missing` that have not got on for `limit`, if any.
    fn stalled(
        &self,
        scope: &Scope,
        missing: impl Iterator<Item = usize>,
        since: Duration,
        limit: Duration,
        op: &str,
    ) -> Option<Failure> {
        let moved = |host: usize| match &scope.parts[host].announced {
            Some(part) => part.moved,
            None => self.hosts[host].moved,
        };
        let idle = missing.map(|host| (host, self.now.saturating_sub(moved(host).max(since))));
        let late: Vec<_> = idle.filter(|(_, idle)| *idle >= limit).collect();
        let waited = late.iter().map(|(_, idle)| *idle).max()?;
        let op = match &scope.key {
            Key::Named(name, _) => format!("{op} of scope {name:?}"),
            Key::Slot(_) | Key::Early(_) => op.to_owned(),
        };
        Some(Failure::Timeout { op, waited, missing: late.into_iter().map(|(host, _)| host as u32).collect() })
    }
}
