//! What one rail does between processes in the memory of the devices: submitted to streams, in the order of commits.
//!
//! [`sums`] and [`moves`](super::moves) call it between their steps inside the process; its messages go the member's
//! [`Way`]. The process's turn ([`Window`]) ends when everything is submitted; from the commit to there nothing looks
//! at the gang, and no memory is asked for.
//!
//! Sums go over the transport's own all-reduce where all processes take part and their order is free; else the elements
//! go as messages, and this device's kernels add them up in the order of processes.
//!
//! [`sums`]: super::sums
//! [`Window`]: super::super::transport::Window

use super::{
    super::{
        kernels::{self, Combine, Part},
        launch,
        transport::{RailCall, RailMessage},
    },
    cut::{Ranges, total},
    trip::Trip,
    way::{Load, Way},
};
use crate::{
    driver::Address,
    error::{Error, Result},
    fabric::{
        descriptor::{Area, Payload},
        layout::{DeviceBarrier, MOST},
        types::{DType, ReduceOp, ReduceOrder},
    },
    memory::hazard::Access,
};
use smallvec::SmallVec;
use std::ops::Range;

/// A member's rail. `own` is its slice.
pub(super) struct DeviceRail<'t, 'g, 'd> {
    trip: &'t Trip<'g, 'd>,
    way: Way<'t, 'g, 'd>,
    slice: Range<usize>,
    owned: &'t [Ranges],
    size: usize,
}

/// What arrives for a sum: a part from each other process, for each of the own ranges.
struct Parts {
    area: Area,
    load: Load,
    /// Zeros in the place of members that other members have spoken for, where a mean needs them.
    zeros: Option<Area>,
}

impl<'t, 'g, 'd> DeviceRail<'t, 'g, 'd> {
    pub fn new(way: Way<'t, 'g, 'd>, slice: Range<usize>, owned: &'t [Ranges], size: usize) -> Self {
        DeviceRail { trip: way.trip, way, slice, owned, size }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.trip.across.hosts.len(), self.trip.across.me);
        (1..n).map(move |k| (me + k) % n)
    }

    /// The range in the own slice, in bytes.
    fn at(&self, range: &Range<usize>) -> Range<usize> {
        (range.start - self.slice.start) * self.size..(range.end - self.slice.start) * self.size
    }

    fn host(&self, host: usize) -> usize {
        self.trip.across.hosts[host].host
    }

    /// The slices of all processes are summed into all of them.
    #[track_caller]
    pub fn sum_to_all(&self, own: &Area, dtype: DType, op: ReduceOp) -> Result<()> {
        let trip = self.trip;
        let native = self.native(dtype, op);
        let parts = if native.is_none() { Some(self.room(own, dtype, op)?) } else { None };
        let own_range = |at: &Range<usize>| own.address + self.at(at).start as u64;
        let sums = self.way.load(if native.is_none() { self.to_all(own_range, own) } else { Vec::new() })?;
        let mut access = trip.op()?;
        access.touch(&own.block, own.bytes.clone(), Access::Write, false)?;
        self.touch(&parts, &mut access)?;
        let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
        let submitted = match (native, &parts) {
            _ if self.slice.is_empty() => Ok(()),
            (Some(reduce), _) => {
                self.way.submit(&RailCall::AllReduce { at: own.address, len: self.slice.len(), dtype, reduce })
            }
            (None, Some(parts)) => {
                let summed = self.sum_parts(own, parts, (dtype, op), own_range);
                summed.and_then(|()| self.way.send(&sums))
            }
            (None, None) => unreachable!("there is room unless the transport sums"),
        };
        drop(commit.window);
        trip.finish(access, submitted)
    }

    /// The operation by which the transport may sum up in the members' own memory, if it may: nothing is to be done
    /// inside the processes, since each has one member.
    pub fn in_place(&self, dtype: DType, op: ReduceOp) -> Option<ReduceOp> {
        let alone = self.trip.members() == self.trip.across.hosts.len();
        // A member's own factor is rounded to the elements' type.
        let kept = !matches!(op, ReduceOp::Scaled(_)) || matches!(dtype, DType::F32 | DType::F64);
        if alone && kept { self.native(dtype, op) } else { None }
    }

    /// The members' buffers are summed into all of them, without scratch. Until the commit nothing is touched.
    #[track_caller]
    pub fn sum_in_place(&self, [source, destination]: [&Area; 2], dtype: DType, reduce: ReduceOp) -> Result<()> {
        let (trip, bytes) = (self.trip, destination.bytes.len());
        let apart = source.address != destination.address && bytes > 0;
        let mut access = trip.op()?;
        if apart {
            access.touch(&source.block, source.bytes.clone(), Access::Read, false)?;
        }
        access.touch(&destination.block, destination.bytes.clone(), Access::Write, false)?;
        trip.registered.set(trip.registered_at(destination));
        let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
        let copied = if apart { self.copy(destination.address, source.address, bytes) } else { Ok(()) };
        let call = RailCall::AllReduce { at: destination.address, len: bytes / dtype.size(), dtype, reduce };
        let submitted = copied.and_then(|()| if bytes > 0 { self.way.submit(&call) } else { Ok(()) });
        drop(commit.window);
        trip.finish(access, submitted)
    }

    /// Copies memory of this device, for which the caller has asked.
    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        let (handle, stream) = (&self.trip.group.dev.worker.handle, self.trip.group.dev.stream.raw);
        // SAFETY: both are memory of this device, in the caller's `Op`.
        let copied = unsafe { handle.driver.copy_within(to, from, bytes, stream) };
        handle.check(self.trip.call.op, copied)
    }

    /// The slices of all processes are summed, each by its owner, into `summed`: one own range behind the other.
    #[track_caller]
    pub fn sum_to_owners(&self, own: &Area, (dtype, op): (DType, ReduceOp), summed: &Area) -> Result<()> {
        let trip = self.trip;
        let parts = Some(self.room(own, dtype, op)?);
        let mut access = trip.op()?;
        access.touch(&own.block, own.bytes.clone(), Access::Read, false)?;
        access.touch(&summed.block, summed.bytes.clone(), Access::Write, false)?;
        self.touch(&parts, &mut access)?;
        let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
        let to = |at: &Range<usize>| summed.address + self.before(at) as u64;
        let submitted = parts.iter().try_for_each(|parts| self.sum_parts(own, parts, (dtype, op), to));
        drop(commit.window);
        trip.finish(access, submitted)
    }

    /// Every process sends what it owns, packed in `own`, to all others: `all` is the slice.
    #[track_caller]
    pub fn fill(&self, own: &Area, all: &Area) -> Result<()> {
        let trip = self.trip;
        let from = |at: &Range<usize>| own.address + self.before(at) as u64;
        let load = self.way.load(self.to_all(from, all))?;
        let mut access = trip.op()?;
        access.touch(&own.block, own.bytes.clone(), Access::Read, false)?;
        access.touch(&all.block, all.bytes.clone(), Access::Write, false)?;
        let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
        let mut submitted = self.way.send(&load);
        drop(commit.window);
        // The own ranges are on this device already.
        for range in &self.owned[trip.across.me] {
            let (to, bytes) = (all.address + self.at(range).start as u64, range.len() * self.size);
            submitted = submitted.and_then(|()| self.copy(to, from(range), bytes));
        }
        trip.finish(access, submitted)
    }

    /// The operation by which the transport itself may sum slices up, if it may.
    pub fn native(&self, dtype: DType, op: ReduceOp) -> Option<ReduceOp> {
        let trip = self.trip;
        let whole = trip.across.hosts.len() == trip.link.world.devices().len();
        let free = trip.group.dev.worker.shared.reduce_order != ReduceOrder::Rank;
        let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        let op = match op {
            // The mean of all members, not of the processes.
            ReduceOp::Avg => float.then(|| ReduceOp::Scaled(1.0 / trip.members() as f64))?,
            op => op,
        };
        (whole && trip.lanes.direct && free && self.way.transport.can(dtype, op)).then_some(op)
    }

    /// Memory for what [`sum_parts`](Self::sum_parts) receives.
    #[track_caller]
    fn room(&self, from: &Area, dtype: DType, op: ReduceOp) -> Result<Parts> {
        let trip = self.trip;
        let own = total(&self.owned[trip.across.me]) * self.size;
        let area = trip.scratch(own * (trip.across.hosts.len() - 1))?;
        let mean = op == ReduceOp::Avg;
        if mean && trip.members() > MOST {
            let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
            if !float {
                let why = format_args!("an average of {dtype:?} over more than {MOST} members of several processes");
                return Err(Error::invalid_at(trip.call.site, trip.call.op, why));
            }
        }
        let pads = mean && trip.members() <= MOST;
        let load = self.way.load(self.to_owners(from, &area))?;
        Ok(Parts { area, load, zeros: pads.then(|| trip.zeros(own)).transpose()? })
    }

    fn touch(&self, parts: &Option<Parts>, access: &mut crate::token::op::Op<'_>) -> Result<()> {
        let Some(Parts { area, zeros, .. }) = parts else { return Ok(()) };
        access.touch(&area.block, area.bytes.clone(), Access::Write, false)?;
        zeros.iter().try_for_each(|zeros| access.touch(&zeros.block, zeros.bytes.clone(), Access::Read, false))
    }

    /// Bytes of the own ranges before this one.
    fn before(&self, range: &Range<usize>) -> usize {
        let own = &self.owned[self.trip.across.me];
        own.iter().take_while(|other| other.start < range.start).map(|other| other.len() * self.size).sum()
    }

    /// In [`Parts`]: the part of a process for an own range.
    fn arrived(&self, area: &Area, host: usize, range: &Range<usize>) -> Address {
        let (me, hosts) = (self.trip.across.me, self.trip.across.hosts.len());
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
            for range in &self.owned[self.trip.across.me] {
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
        let (me, hosts) = (self.trip.across.me, self.trip.across.hosts.len());
        let mine = &self.owned[me];
        self.way.send(&parts.load)?;
        let members = self.trip.members();
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
        let (dev, bytes) = (self.trip.group.dev, n * dtype.size());
        let part = |&address: &Address| Part { address, bytes };
        let software = dev.worker.is_software();
        let mut begin = 0;
        while begin < sources.len() {
            let first = begin == 0;
            let end = sources.len().min(begin + if first { MOST } else { MOST - 1 });
            let mut some: SmallVec<[Part; MOST]> = (!first).then_some(part(&to)).into_iter().collect();
            some.extend(sources[begin..end].iter().map(part));
            let mut by: SmallVec<[f64; MOST]> = (!first && !factors.is_empty()).then_some(1.0).into_iter().collect();
            by.extend(factors.get(begin..end).unwrap_or_default().iter().copied());
            let into = [part(&to)];
            let meet = DeviceBarrier::NONE;
            let combine = Combine { n, op, factors: &by, sources: &some, destinations: &into, meet };
            let (entry, args) = (kernels::combine(dtype), combine.args(software));
            launch::launch_on(&dev.worker, &dev.stream, self.trip.call.op, &entry, launch::blocks(bytes), &args)?;
            begin = end;
        }
        Ok(())
    }

    /// Every process sends its ranges to all others, which receive them at their places in `all`.
    fn to_all(&self, from: impl Fn(&Range<usize>) -> Address, all: &Area) -> Vec<RailMessage> {
        let mut messages = Vec::new();
        for host in self.others() {
            for range in &self.owned[self.trip.across.me] {
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
