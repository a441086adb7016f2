//! The hub's clock, and its limits: processes that are silent, and members that keep others waiting without progress.

use super::{super::wire::MOST_MEMBERS, BTreeSet, Duration, Failure, Hub, Key, Out, Scope, TICKS, ToHost};

impl Hub {
    /// [`lost`](Self::lost) at a time by the clock: also where a process has heard nothing since this one was stopped.
    pub(crate) fn lost_at(&mut self, clock: Duration, host: usize, why: &str) -> Out {
        self.look(clock);
        match self.stopped.filter(|(end, _)| clock.saturating_sub(*end) < self.limits.heartbeat_timeout / 4) {
            Some((_, time)) if !self.has_left(host) => {
                self.lost(0, &format!("it was stopped for {time:?}, so the others have given it up"))
            }
            _ => self.lost(host, why),
        }
    }

    fn look(&mut self, clock: Duration) {
        let time = clock.saturating_sub(self.looked);
        if time >= self.limits.heartbeat_timeout / 4 * 3 {
            self.stopped = Some((clock, time));
        }
        self.now += time.min(self.step);
        self.looked = clock;
    }

    /// Of the time between two ticks only [`STEP`](super::STEP) counts, or a quarter of the shortest of the hub's own
    /// limits: while this process was stopped, no process was late. Members' deadlines do not count here: a short one
    /// must not slow the clock for all. That one passes after [`TICKS`] ticks at the earliest.
    pub(crate) fn tick(&mut self, clock: Duration) -> Out {
        self.earlier.rotate_left(1);
        self.earlier[TICKS - 1] = Some(self.now);
        self.look(clock);
        if self.over.is_none() {
            self.look_for_the_silent();
        }
        if self.over.is_none() {
            self.look_for_the_late();
        }
        for host in self.hosts.keys().filter(|host| !self.left.contains(host)) {
            self.out.push((*host, ToHost::Beat));
        }
        std::mem::take(&mut self.out)
    }

    fn look_for_the_silent(&mut self) {
        let (now, limits) = (self.now, self.limits);
        let silent = |host: &super::Host| now - host.heard >= limits.heartbeat_timeout;
        let found = self.hosts.iter().find(|(host, known)| !self.has_left(**host) && silent(known));
        if let Some((&host, _)) = found {
            let why = format!("it has said nothing for {:?}", limits.heartbeat_timeout);
            return self.end(Failure::lost(host, why));
        }
        if self.opened.len() < limits.size && now >= limits.connect_timeout {
            let (op, missing) = self.keep_the_start_waiting();
            let missing = missing.into_iter().map(|host| host as u32).collect();
            self.end(Failure::Timeout { op: op.to_owned(), waited: now, missing });
        }
    }

    /// Hosts that have not joined; else those that neither have opened the transport nor wait for a value of others.
    fn keep_the_start_waiting(&self) -> (&'static str, Vec<usize>) {
        let of =
            |keep: &dyn Fn(&usize) -> bool| (0..self.limits.size).filter(keep).take(MOST_MEMBERS).collect::<Vec<_>>();
        let absent = of(&|host| !self.hosts.contains_key(host));
        if !absent.is_empty() {
            return ("connect", absent);
        }
        let waiting: BTreeSet<_> =
            self.asked.values().flatten().filter(|(_, waits)| *waits).map(|(host, _)| *host).collect();
        let idle = of(&|host| !self.opened.contains(host) && !waiting.contains(host));
        ("build", if idle.is_empty() { of(&|host| !self.opened.contains(host)) } else { idle })
    }

    fn look_for_the_late(&mut self) {
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

    fn late(&self, scope: &Scope) -> Option<Failure> {
        let deadline = |hosts: &mut dyn Iterator<Item = usize>| {
            let of = |host: usize| scope.parts.get(&host).map(|part| part.announced.deadline);
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
        if let Some(since) = scope.parts.values().filter_map(|part| part.ended).min() {
            let limit = deadline(&mut scope.parts.keys().copied().filter(|host| scope.has_ended(*host)));
            let missing = (0..scope.size).filter(|host| !scope.has_ended(*host) && !waits(*host));
            return self.stalled(scope, missing, since, limit, "the end of a scope");
        }
        let since = scope.announced().map(|(_, part)| part.at).min()?;
        if scope.begun || !matches!(scope.key, Key::Named(..)) {
            return None;
        }
        let limit = deadline(&mut scope.announced().map(|(host, _)| host));
        let missing = (0..scope.size).filter(|host| !scope.parts.contains_key(host));
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
        let moved = |host: usize| match (scope.parts.get(&host), self.hosts.get(&host)) {
            (Some(part), _) => part.announced.moved,
            (None, Some(known)) => known.moved,
            (None, None) => Duration::ZERO,
        };
        let before = self.earlier[0]?;
        let late = |at: Duration| at <= before && self.now.saturating_sub(at) >= limit;
        let late = missing.map(|host| (host, moved(host).max(since))).filter(|(_, at)| late(*at));
        let late: Vec<_> = late.take(MOST_MEMBERS).collect();
        let waited = self.now.saturating_sub(late.iter().map(|(_, at)| *at).min()?);
        let op = match &scope.key {
            Key::Named(name, _) => format!("{op} of scope {name:?}"),
            Key::Slot(_) | Key::Early(_) => op.to_owned(),
        };
        Some(Failure::Timeout { op, waited, missing: late.into_iter().map(|(host, _)| host as u32).collect() })
    }
}
