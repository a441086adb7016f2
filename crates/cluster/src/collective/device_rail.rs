//! One rail's work on one piece between processes, in the memory of the devices.
//!
//! [`device_pieces`](super::device_pieces) makes a [`DeviceRail`] for each piece, with its memory, before the member
//! arrives, and submits them after the commit: to the [`Relay`]'s stream, in the order of commits. From the commit on
//! nothing here looks at the gang, and no memory is asked for.
//!
//! Sums go over the transport's own all-reduce where all processes take part and their order is free; else the elements
//! go as messages, and this device's kernels add them up in the order of processes.

use super::{
    cut::{Cut, Ranges, total},
    hierarchical::{HierarchicalCall, copy_within},
    relay::{Load, Relay},
};
use crate::{
    internals::*,
    mutant::{self, Rule},
    runtime::{
        collective::{Area, MOST, Part},
        driver::Address,
        memory::Access,
        record, wait_for,
    },
    traits::{RailCall, RailMessage},
};
use gpu_pool::{DType, Error, Event, ReduceOp, Result};
use smallvec::{SmallVec, smallvec};
use std::{mem, ops::Range};

/// A member's rail, for one piece. `own` is its slice.
pub(super) struct DeviceRail<'t, 'g, 'd> {
    hier: &'t HierarchicalCall<'g, 'd>,
    relay: &'t Relay<'t, 'g, 'd>,
    slice: Range<usize>,
    owned: Vec<Ranges>,
    size: usize,
    work: Work,
    /// The memory. The step inside the process has written the first one.
    uses: SmallVec<[(Area, Access); 4]>,
    /// Behind that step, if it runs on another stream.
    pub staged: Option<Event>,
}

enum Work {
    /// Each process's slice is summed into all of them, by the transport,
    Native(DType, ReduceOp),
    /// or by their owners. `to_all`: the sums go from their places in the slice to all.
    Sum { of: (DType, ReduceOp), parts: Parts, to_all: Option<Load> },
    /// Every process sends what it owns to all others.
    Fill(Load),
}

/// The input of a sum: a part from each other process, for each of the own ranges.
struct Parts {
    area: Area,
    load: Load,
    /// Zeros in the place of members that other members have spoken for, where a mean needs them.
    zeros: Option<Area>,
}

impl<'t, 'g, 'd> DeviceRail<'t, 'g, 'd> {
    fn new(
        relay: &'t Relay<'t, 'g, 'd>,
        cut: &Cut<'_>,
        owned: Vec<Ranges>,
        size: usize,
        own: &Area,
        to: Access,
    ) -> Self {
        let slice = cut.slice(relay.hier.across.here);
        let (work, uses) = (Work::Fill(Load::default()), smallvec![(own.clone(), to)]);
        DeviceRail { hier: relay.hier, relay, slice, owned, size, work, uses, staged: None }
    }

    /// The slices of all processes are going to be summed into all of them.
    #[track_caller]
    pub fn sum_to_all(
        relay: &'t Relay<'t, 'g, 'd>,
        cut: &Cut<'_>,
        owned: Vec<Ranges>,
        own: &Area,
        (dtype, op): (DType, ReduceOp),
    ) -> Result<Self> {
        let mut rail = Self::new(relay, cut, owned, dtype.size(), own, Access::Write);
        rail.work = match relay.native(dtype, op) {
            Some(reduce) => Work::Native(dtype, reduce),
            None => {
                let parts = rail.room(own, dtype, op)?;
                let from = |at: &Range<usize>| own.address + rail.at(at).start as u64;
                let to_all = Some(relay.load(rail.to_all(from, own))?);
                Work::Sum { of: (dtype, op), parts, to_all }
            }
        };
        Ok(rail)
    }

    /// The slices of all processes are going to be summed, each by its owner, into `summed`: one own range behind the
    /// other.
    #[track_caller]
    pub fn sum_to_owners(
        relay: &'t Relay<'t, 'g, 'd>,
        cut: &Cut<'_>,
        owned: Vec<Ranges>,
        [own, summed]: [&Area; 2],
        (dtype, op): (DType, ReduceOp),
    ) -> Result<Self> {
        let mut rail = Self::new(relay, cut, owned, dtype.size(), own, Access::Read);
        rail.uses.push((summed.clone(), Access::Write));
        let parts = rail.room(own, dtype, op)?;
        rail.work = Work::Sum { of: (dtype, op), parts, to_all: None };
        Ok(rail)
    }

    /// Every process is going to send what it owns, packed in `own`, to all others: `all` is the slice.
    #[track_caller]
    pub fn fill(
        relay: &'t Relay<'t, 'g, 'd>,
        cut: &Cut<'_>,
        owned: Vec<Ranges>,
        [own, all]: [&Area; 2],
        size: usize,
    ) -> Result<Self> {
        let mut rail = Self::new(relay, cut, owned, size, own, Access::Read);
        rail.uses.push((all.clone(), Access::Write));
        let from = |at: &Range<usize>| own.address + rail.before(at) as u64;
        rail.work = Work::Fill(relay.load(rail.to_all(from, all))?);
        Ok(rail)
    }

    /// Submits the piece, in the commit's turn. Returns an event behind it, if it runs beside other work.
    pub fn submit(&self) -> Result<Option<Event>> {
        let (op, stream) = (self.hier.call.op, self.relay.stream());
        // The step inside has ordered the first memory behind all that came before.
        let mut rest = &self.uses[..];
        if let Some(staged) = &self.staged {
            rest = &rest[1..];
            if !mutant::is(Rule::RailWaits) {
                wait_for(stream, op, staged)?;
            }
        }
        rest.iter().try_for_each(|(area, access)| area.block.order(op, stream, &area.bytes, *access))?;
        let submitted = self.work();
        let last = stream.submit();
        for (area, access) in &self.uses {
            area.block.note(stream, last, area.bytes.clone(), *access);
            if submitted.is_err() {
                // The transport may still use it.
                mem::forget(area.block.clone());
            }
        }
        submitted?;
        if self.relay.has_side_stream() { record(stream, op).map(Some) } else { Ok(None) }
    }

    fn work(&self) -> Result<()> {
        let area = |at: usize| &self.uses[at].0;
        let own = area(0);
        match &self.work {
            _ if self.slice.is_empty() => Ok(()),
            Work::Native(dtype, reduce) => {
                let (at, len) = (own.address, self.slice.len());
                self.relay.submit(&RailCall::AllReduce { at, len, dtype: *dtype, reduce: *reduce })
            }
            Work::Sum { of, parts, to_all: Some(sums) } => {
                self.sum_parts(own, parts, *of, |at| own.address + self.at(at).start as u64)?;
                self.relay.send(sums)
            }
            Work::Sum { of, parts, to_all: None } => {
                self.sum_parts(own, parts, *of, |at| area(1).address + self.before(at) as u64)
            }
            Work::Fill(load) => {
                self.relay.send(load)?;
                // The own ranges are on this device already.
                self.owned[self.hier.across.me].iter().try_for_each(|range| {
                    let (to, from) = (area(1).address + self.at(range).start as u64, own.address);
                    let (from, bytes) = (from + self.before(range) as u64, range.len() * self.size);
                    copy_within(self.hier, self.relay.stream(), to, from, bytes)
                })
            }
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.hier.across.hosts.len(), self.hier.across.me);
        (1..n).map(move |k| (me + k) % n)
    }

    /// The range in the own slice, in bytes.
    fn at(&self, range: &Range<usize>) -> Range<usize> {
        (range.start - self.slice.start) * self.size..(range.end - self.slice.start) * self.size
    }

    fn host(&self, host: usize) -> usize {
        self.hier.across.hosts[host].host
    }

    /// Memory for what [`sum_parts`](Self::sum_parts) receives.
    #[track_caller]
    fn room(&mut self, from: &Area, dtype: DType, op: ReduceOp) -> Result<Parts> {
        let hier = self.hier;
        let own = total(&self.owned[hier.across.me]) * self.size;
        let area = hier.scratch(own * (hier.across.hosts.len() - 1))?;
        let mean = op == ReduceOp::Avg;
        if mean && hier.members() > MOST {
            let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
            if !float {
                let why = format_args!("an average of {dtype:?} over more than {MOST} members of several processes");
                return Err(Error::invalid_at(hier.call.site, hier.call.op, why));
            }
        }
        let pads = mean && hier.members() <= MOST;
        let load = self.relay.load(self.to_owners(from, &area))?;
        let zeros = pads.then(|| hier.zeros(own)).transpose()?;
        self.uses.push((area.clone(), Access::Write));
        self.uses.extend(zeros.iter().map(|zeros| (zeros.clone(), Access::Read)));
        Ok(Parts { area, load, zeros })
    }

    /// Bytes of the own ranges before this one.
    fn before(&self, range: &Range<usize>) -> usize {
        let own = &self.owned[self.hier.across.me];
        own.iter().take_while(|other| other.start < range.start).map(|other| other.len() * self.size).sum()
    }

    /// In [`Parts`]: the part of a process for an own range.
    fn arrived(&self, area: &Area, host: usize, range: &Range<usize>) -> Address {
        let (me, hosts) = (self.hier.across.me, self.hier.across.hosts.len());
        let (k, each) = ((host + hosts - me) % hosts - 1, total(&self.owned[me]) * self.size);
        area.address + (k * each + self.before(range)) as u64
    }

    /// Sends the others their ranges of the own slice, and receives theirs of the own ones.
    fn to_owners(&self, own: &Area, parts: &Area) -> Vec<RailMessage> {
        let mut messages = Vec::new();
        for host in self.others() {
            for range in &self.owned[host] {
                let at = self.at(range);
                let (to, bytes) = (self.host(host), at.len());
                messages.push(RailMessage::Send { to, at: own.address + at.start as u64, bytes });
            }
            for range in &self.owned[self.hier.across.me] {
                let (at, bytes) = (self.arrived(parts, host, range), range.len() * self.size);
                messages.push(RailMessage::Receive { from: self.host(host), at, bytes });
            }
        }
        messages
    }

    /// Sends and receives the parts, and combines them in the order of processes. `to`: where an own range goes.
    fn sum_parts(
        &self,
        own: &Area,
        parts: &Parts,
        (dtype, op): (DType, ReduceOp),
        to: impl Fn(&Range<usize>) -> Address,
    ) -> Result<()> {
        let (me, hosts) = (self.hier.across.me, self.hier.across.hosts.len());
        let mine = &self.owned[me];
        self.relay.send(&parts.load)?;
        let members = self.hier.members();
        for range in mine {
            let from = |host: usize| match host == me {
                true => own.address + self.at(range).start as u64,
                false => self.arrived(&parts.area, host, range),
            };
            let mut sources: SmallVec<[Address; MOST]> = (0..hosts).map(from).collect();
            let mut factors = SmallVec::<[f64; MOST]>::new();
            let mut op = op;
            match (&parts.zeros, op) {
                (Some(zeros), _) => sources.resize(members, zeros.address),
                (None, ReduceOp::Avg) => {
                    op = ReduceOp::Scaled(1.0);
                    factors.resize(hosts, 1.0 / members as f64);
                }
                _ => {}
            }
            self.combine(range.len(), (dtype, op), &sources, &factors, to(range))?;
        }
        Ok(())
    }

    /// `to` = the combination of the sources: as many at once as a kernel can name.
    fn combine(
        &self,
        n: usize,
        (dtype, op): (DType, ReduceOp),
        sources: &[Address],
        factors: &[f64],
        to: Address,
    ) -> Result<()> {
        let (dev, bytes) = (self.hier.group.device(), n * dtype.size());
        let part = |&address: &Address| Part { address, bytes };
        let on = (&**self.relay.stream(), self.hier.call.op);
        let mut begin = 0;
        while begin < sources.len() {
            let first = begin == 0;
            let end = sources.len().min(begin + if first { MOST } else { MOST - 1 });
            let mut some: SmallVec<[Part; MOST]> = (!first).then_some(part(&to)).into_iter().collect();
            some.extend(sources[begin..end].iter().map(part));
            let mut by: SmallVec<[f64; MOST]> = (!first && !factors.is_empty()).then_some(1.0).into_iter().collect();
            by.extend(factors.get(begin..end).unwrap_or_default().iter().copied());
            dev.combine(on, (dtype, op), n, &by, &some, part(&to))?;
            begin = end;
        }
        Ok(())
    }

    /// Every process sends its ranges to all others, which receive them at their places in `all`.
    fn to_all(&self, from: impl Fn(&Range<usize>) -> Address, all: &Area) -> Vec<RailMessage> {
        let mut messages = Vec::new();
        for host in self.others() {
            for range in &self.owned[self.hier.across.me] {
                messages.push(RailMessage::Send {
                    to: self.host(host),
                    at: from(range),
                    bytes: range.len() * self.size,
                });
            }
            for range in &self.owned[host] {
                let at = self.at(range);
                let (from, bytes) = (self.host(host), at.len());
                messages.push(RailMessage::Receive { from, at: all.address + at.start as u64, bytes });
            }
        }
        messages
    }
}
