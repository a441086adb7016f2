//! Judges an operation before it is submitted, and records it afterwards.

use super::{
    Kind, OpSite, Operation, Report,
    clock::{Clock, Component, FlagWait},
    deferred::{self, Deferred},
    heap::{Found, Owned, Source},
    note::{Call, Note, allocation},
    shadow::{Access, Manner},
    state::{HostId, Key, Removed, State},
};
use gpu_pool::{
    extend::driver::{Address, DriverResult, Fault, FaultKind},
    extend::lab::{self, edge},
};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub address: Address,
    pub bytes: usize,
    pub manner: Manner,
}

impl Operand {
    pub(super) fn flag(address: Address) -> Self {
        Operand { address, bytes: 8, manner: Manner::AWAIT }
    }

    pub(super) fn range(&self) -> Option<Range<Address>> {
        let end = self.address.checked_add(self.bytes as u64)?;
        (self.bytes > 0).then_some(self.address..end)
    }
}

pub(super) struct Plan {
    note: Arc<Note>,
    accesses: SmallVec<[(Access, Range<Address>); 3]>,
    deferred: Vec<Deferred>,
}

type Judged<T = ()> = Result<T, Arc<Report>>;
/// The buffer of an access, if it is known.
type Owner<'o> = Option<&'o Arc<Owned>>;

pub(super) fn refusal(report: Arc<Report>) -> Fault {
    let (name, detail) = ("GPU_POOL_MISUSE".into(), report.to_string());
    Fault { kind: FaultKind::Misuse, code: 0, name, detail, report: Some(report) }
}

fn report(
    kind: Kind,
    now: Operation,
    before: Option<Operation>,
    owner: Owner<'_>,
    range: &Range<Address>,
    missing: String,
) -> Arc<Report> {
    let base = owner.map_or(0, |owned| owned.range.start);
    let bytes = range.start.saturating_sub(base) as usize..range.end.saturating_sub(base) as usize;
    Arc::new(lab::report(kind, now, before, bytes, owner.map(|owned| allocation(owned)), missing))
}

pub(super) fn unordered(now: Operation, owner: Owner<'_>, before: &Access, range: &Range<Address>) -> Arc<Report> {
    let reused = matches!((owner, &before.owner), (Some(new), Some(old)) if !Arc::ptr_eq(new, old));
    let (kind, owner) = if reused { (Kind::EarlyReuse, before.owner.as_ref()) } else { (Kind::Race, owner) };
    conflict(kind, now, owner, before, range)
}

fn conflict(kind: Kind, now: Operation, owner: Owner<'_>, before: &Access, range: &Range<Address>) -> Arc<Report> {
    let earlier = before.note.operation(before.manner.write);
    let missing = edge(kind, &now, &earlier);
    report(kind, now, Some(earlier), owner, range, missing)
}

pub(super) fn unwritten(now: Operation, owner: Owner<'_>, gap: &Range<Address>) -> Arc<Report> {
    let missing = format!("nothing that writes these bytes was submitted before the {}", now.op);
    report(Kind::UninitializedRead, now, None, owner, gap, missing)
}

impl State {
    /// The live buffer that contains `range`, or the report that there is none.
    fn owner(&self, range: &Range<Address>, now: impl FnOnce() -> Operation) -> Judged<Option<Arc<Owned>>> {
        let (owned, missing) = match self.heap.find(range) {
            Found::Live(owned) => return Ok(Some(owned)),
            Found::Unknown => return Ok(None),
            Found::Freed(owned) => (owned, "the buffer must live until after"),
            Found::Stray(owned) => (owned, "no live buffer holds all of the bytes that are named by"),
        };
        let now = now();
        let missing = format!("{missing} the {}", now.op);
        Err(report(Kind::UseAfterFree, now, None, Some(&owned), range, missing))
    }

    /// Changes nothing.
    pub(super) fn judge(&self, by: HostId, key: Key, call: Call, operands: &[Operand]) -> Judged<Plan> {
        let (stream, host) = (&self.streams[&key], &self.host(by).clock);
        let place = OpSite::current();
        let operation = |write| call.operation(place, Some(key.0), Some(stream.number), write);
        let ordered = |a: &Access| knows(stream.component, &stream.clock, host, a.component, a.count);

        let is_pending = stream.clock.is_pending();
        let pending = is_pending.then(|| {
            let mut clock = stream.clock.clone();
            clock.flatten();
            clock.join(host);
            clock
        });
        let note = Arc::new(Note { call, place, device: key.0, stream: stream.number, pending });
        let mut accesses: SmallVec<[(Access, Range<Address>); 3]> = SmallVec::new();
        for operand in operands {
            let Some(range) = operand.range() else { continue };
            let owner = self.owner(&range, || operation(operand.manner.write))?;
            let (component, count) = (stream.component, stream.count + 1);
            accesses.push((Access { component, count, manner: operand.manner, note: note.clone(), owner }, range));
        }

        let mut deferred = Vec::new();
        for (access, range) in &accesses {
            let mut worst: Option<(Access, Range<Address>)> = None;
            self.shadow.conflicts(range, access.manner, |before, part| match &mut worst {
                Some((first, bytes)) if first.same(before) && bytes.end == part.start => bytes.end = part.end,
                Some(_) => {}
                None if ordered(before) => {}
                None if is_pending || before.note.is_pending() => {
                    deferred.push(Deferred::Conflict { before: before.clone(), after: access.clone(), range: part });
                }
                None => worst = Some((before.clone(), part)),
            });
            if let Some((before, bytes)) = worst {
                return Err(unordered(operation(access.manner.write), access.owner.as_ref(), &before, &bytes));
            }
        }
        for (access, range) in accesses.iter().filter(|(access, _)| !access.manner.write && access.owner.is_some()) {
            let Some(gap) = self.unwritten(range) else { continue };
            if !is_pending {
                return Err(unwritten(operation(false), access.owner.as_ref(), &gap));
            }
            deferred.push(Deferred::Unwritten { reader: access.clone(), range: range.clone() });
        }
        Ok(Plan { note, accesses, deferred })
    }

    pub(super) fn enter(&mut self, by: HostId, key: Key, plan: Plan) {
        let Some(stream) = self.hear(key, by) else { return };
        stream.count += 1;
        let (component, count) = (stream.component, stream.count);
        stream.clock.set(component, count);
        let State { streams, shadow, heap, flags, deferred, .. } = self;
        let clock = &streams[&key].clock;
        let ordered = |a: &Access| a.component == component || clock.covers(a.component, a.count);
        // Reads first: an operation that reads and writes the same bytes writes them last.
        for write in [false, true] {
            for (access, range) in plan.accesses.iter().filter(|(access, _)| access.manner.write == write) {
                shadow.note(range, access, ordered);
                if write && access.owner.is_some() {
                    heap.write(range.clone());
                }
                if access.manner == Manner::WRITE {
                    flags.overwrite(range, component, count, clock);
                }
            }
        }
        deferred.extend(plan.deferred);
        if deferred.len() > deferred::KEPT {
            deferred.drain(..deferred.len() - deferred::KEPT);
        }
        debug_assert_eq!(plan.note.device, key.0);
    }

    pub fn submit(
        &mut self,
        by: HostId,
        key: Key,
        call: Call,
        operands: &[Operand],
        forward: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        if !self.streams.contains_key(&key) {
            // Most likely it is no stream of the driver, which reports that.
            return forward();
        }
        if self.captures.contains_key(&key) {
            forward()?;
            self.note_captured(key, call, operands);
            return Ok(());
        }
        let plan = self.judge(by, key, call, operands).map_err(refusal)?;
        forward()?;
        self.enter(by, key, plan);
        Ok(())
    }

    pub fn lend(&mut self, by: HostId, key: Key, call: Call, operand: Operand) -> Judged {
        if !self.streams.contains_key(&key) {
            self.stream_created(key);
        }
        let plan = self.judge(by, key, call, &[operand])?;
        self.enter(by, key, plan);
        Ok(())
    }

    /// The streams that wait for the flag get the knowledge of this stream. Deferred judgements that waited for the
    /// flag are made; if one finds a mistake, the raise is refused.
    pub fn raise(
        &mut self,
        by: HostId,
        key: Key,
        call: Call,
        (address, value): (Address, u64),
        forward: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        let Some(stream) = self.streams.get(&key) else { return forward() };
        let (component, count, mut clock) = (stream.component, stream.count + 1, stream.clock.clone());
        let operand = Operand { address, bytes: 8, manner: Manner::RAISE };
        let plan = self.judge(by, key, call, &[operand]).map_err(refusal)?;
        clock.flatten();
        clock.join(&self.host(by).clock);
        clock.set(component, count);
        let mut waits = self.flags.ended_by(address, value);
        // An operation that comes after a wait cannot end it.
        waits.retain(|wait| !clock.waits().iter().any(|own| Arc::ptr_eq(own, wait)));
        waits.iter().for_each(|wait| wait.raise(clock.clone()));
        let bad = if waits.is_empty() {
            None
        } else {
            self.deferred.iter().chain(&plan.deferred).find_map(|deferred| deferred.judge(&self.heap))
        };
        if let Err(fault) = bad.map_or_else(forward, |report| Err(refusal(report))) {
            waits.iter().for_each(|wait| wait.lower());
            return Err(fault);
        }
        self.flags.end(&waits);
        self.enter(by, key, plan);
        if !waits.is_empty() {
            self.deferred.retain(Deferred::is_pending);
        }
        self.flags.write(address, value, component, count, clock);
        Ok(())
    }

    /// Already submitted, with the operand [`Operand::flag`].
    pub fn waits_for_flag(&mut self, key: Key, address: Address, value: u64) {
        let Some(stream) = self.streams.get_mut(&key) else { return };
        let (component, clock) = (stream.component, &stream.clock);
        match self.flags.acquire(address, value, |c, n| c == component || clock.covers(c, n)) {
            Some(learnt) => {
                stream.clock.join(&learnt);
            }
            None => {
                let wait = FlagWait::new(address, value);
                self.flags.wait(&wait);
                stream.clock.add_wait(wait);
            }
        }
    }

    /// The record of an event that a wait names, if the checker knows the event; or the report that it has no record.
    pub fn awaited(
        &self,
        key: Key,
        event: u64,
        call: Call,
        stream: Option<Key>,
    ) -> Judged<Option<(Key, Arc<Clock>, u64)>> {
        let Some(key) = self.event_key(key.0, event) else { return Ok(None) };
        let found = &self.events[&key];
        if let Some(record) = &found.record {
            return Ok(Some((key, record.clone(), found.version)));
        }
        let number = stream.and_then(|stream| self.streams.get(&stream)).map(|stream| stream.number);
        let now = call.operation(OpSite::current(), stream.map(|stream| stream.0), number, false);
        let missing = format!(
            "record the event on the stream that is waited for, before the {}: this wait would do nothing",
            now.op
        );
        Err(report(Kind::UnrecordedEvent, now, None, None, &(0..0), missing))
    }

    pub fn host_access(&mut self, by: HostId, operand: Operand) -> Judged {
        let Some(range) = operand.range() else { return Ok(()) };
        let write = operand.manner.write;
        let operation = || Call::new("host access", "").operation(OpSite::current(), None, None, write);
        let owner = self.owner(&range, operation)?;
        if let Some((before, bytes)) = self.unknown_to(by, &range, operand.manner) {
            return Err(conflict(Kind::HostAccess, operation(), owner.as_ref(), &before, &bytes));
        }
        if write {
            self.heap.write(range.clone());
            let host = self.host(by).clock.clone();
            self.flags.host_writes(&range, &host);
        } else if let Some(gap) = self.heap.unwritten(&range).filter(|_| owner.is_some()) {
            return Err(unwritten(operation(), owner.as_ref(), &gap));
        }
        Ok(())
    }

    fn unknown_to(&self, by: HostId, range: &Range<Address>, manner: Manner) -> Option<(Access, Range<Address>)> {
        let host = &self.host(by).clock;
        let mut worst: Option<(Access, Range<Address>)> = None;
        self.shadow.conflicts(range, manner, |before, part| match &mut worst {
            Some((first, bytes)) if first.same(before) && bytes.end == part.start => bytes.end = part.end,
            None if !host.covers(before.component, before.count) => worst = Some((before.clone(), part)),
            _ => {}
        });
        worst
    }

    /// Unless an operation may still use the memory. `None` if it is not of this kind of call: the driver reports that.
    pub fn free(&mut self, by: HostId, call: Call, address: Address, source: Source) -> Judged<Option<Removed>> {
        let operation = || call.operation(OpSite::current(), None, None, true);
        let Some(range) = self.heap.chunk(address, source) else {
            let Some(owned) = self.heap.freed_before(address) else { return Ok(None) };
            let missing = "it was freed before: memory is freed once".to_owned();
            return Err(report(Kind::UseAfterFree, operation(), None, Some(&owned), &owned.range, missing));
        };
        if let Some((before, bytes)) = self.unknown_to(by, &range, Manner::WRITE) {
            let whole = self.heap.whole(address);
            let owner = before.owner.as_ref().or(whole.as_ref());
            return Err(conflict(Kind::FreeInUse, operation(), owner, &before, &bytes));
        }
        Ok(Some(self.mem_removed(&range)))
    }

    pub fn free_unasked(&mut self, address: Address, source: Source) -> Option<Removed> {
        let range = self.heap.chunk(address, source)?;
        Some(self.mem_removed(&range))
    }
}

/// Whether an operation that a thread (clock `host`) submits to a stream comes after another operation.
fn knows(own: Component, stream: &Clock, host: &Clock, component: Component, count: u64) -> bool {
    own == component || stream.covers(component, count) || host.covers(component, count)
}
