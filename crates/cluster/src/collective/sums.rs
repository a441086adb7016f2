//! Sums over several processes: all_reduce, reduce_scatter, and reduce (a reduce_scatter of which one member gets all).
//!
//! ```text
//! inside     reduce_scatter over the rails: local index r has slice r, summed over this process
//! rail       the processes' slices are summed, each by its owner
//! all_reduce      rail: the sums go to all processes; inside: all_gather
//! reduce_scatter  inside: all_to_all to the members that own the sums
//! ```
//!
//! Through the memory of the hosts all this goes in [`pieces`](super::pieces): [`before`] has the steps up to the
//! rails, [`after`] those behind them. [`pending`](super::pending) lets members work between the two. Over rails
//! between devices large buffers go in [`device_pieces`](super::device_pieces).

use super::{
    cut::{Cut, Ranges, total},
    device_pieces::{DevicePieces, Inside, cuts},
    device_rail::DeviceRail,
    hierarchical::{HierarchicalCall, bytes, part},
    pieces::{Job, PIECE, Piece, Pieces},
};
use crate::runtime::collective::{Area, Counts, Shape, Side};
use crate::{
    runtime::collective::Request,
    traits::{HostTransport, Transport},
};
use gpu_pool::{DType, ReduceOp, Result};
use std::sync::Arc;

/// The first step of an all_reduce inside a process of `n` members.
pub(super) fn scatter(cut: &Cut<'_>, n: usize) -> Shape {
    Shape::ReduceScatter { counts: cut.counts(n), in_place: false }
}

/// The last step.
pub(super) fn gather(cut: &Cut<'_>, n: usize) -> Shape {
    Shape::AllGather { counts: cut.counts(n), in_place: false }
}

/// The operations inside a process and between processes, for so many members of all processes.
pub(super) fn levels(op: ReduceOp, dtype: DType, members: usize) -> (ReduceOp, ReduceOp) {
    match op {
        // The sums of the processes are rounded, and may be out of range where the mean is not.
        ReduceOp::Avg if dtype == DType::F16 => (ReduceOp::Scaled(1.0 / members as f64), ReduceOp::Sum),
        // The mean is taken once, over all members.
        ReduceOp::Avg => (ReduceOp::Sum, ReduceOp::Avg),
        // Each member's factor is its own.
        ReduceOp::Scaled(factor) => (ReduceOp::Scaled(factor), ReduceOp::Sum),
        op => (op, op),
    }
}

fn both(request: &Request) -> (&Area, &Area) {
    let area = |side| request.area(side).expect("a member of a sum gives memory");
    (area(Side::Source), area(Side::Destination))
}

#[track_caller]
pub(super) fn all_reduce(hier: &HierarchicalCall<'_, '_>, request: &Request, len: usize) -> Result<()> {
    let ((source, destination), dtype) = (both(request), request.dtype);
    let transport = match hier.transport()? {
        Transport::Host(transport) => return in_pieces(hier, request, &Sum::ToAll { len }, transport),
        Transport::None(error) => return Err(error.clone()),
        Transport::Device(transport) => transport.clone(),
    };
    let ((inner, outer), whole) = (levels(request.reduce, dtype, hier.members()), hier.cut(len, dtype));
    let (size, across, n) = (dtype.size(), hier.across, hier.here.count());
    let owned = |cut: &Cut<'_>| cut.equal(across.here, across.hosts.len());
    let of = |area: &Area, cut: &Cut<'_>| part(area, bytes(&cut.range(), size));
    let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| gather(cut, n));
    let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
    let (cuts, overlapped) = cuts(hier, &*transport, &whole, &inside);
    let relay = hier.relay(transport, overlapped)?;
    if let Some(reduce) = relay.in_place(dtype, request.reduce) {
        return relay.sum_in_place([source, destination], dtype, reduce);
    }
    hier.overlap(overlapped);
    let (mut pieces, mut slices) = (DevicePieces::new(&relay), Vec::with_capacity(cuts.len()));
    for cut in &cuts {
        let own = hier.scratch(cut.slice(across.here).len() * size)?;
        let rail = DeviceRail::sum_to_all(&relay, cut, owned(cut), &own, (dtype, outer))?;
        hier.inside(dtype, Some(inner), scatter(cut, n), [&of(source, cut), &own])?;
        pieces.add(rail)?;
        slices.push(own);
    }
    pieces.execute()?;
    for (at, (cut, own)) in cuts.iter().zip(&slices).enumerate() {
        pieces.wait(at)?;
        hier.inside(dtype, None, gather(cut, n), [own, &of(destination, cut)])?;
    }
    Ok(())
}

/// `in_place`: the own part lies in the source, at its place.
#[track_caller]
pub(super) fn reduce_scatter(
    hier: &HierarchicalCall<'_, '_>,
    request: &Request,
    parts: &Counts,
    in_place: bool,
) -> Result<()> {
    let ((source, _), dtype) = (both(request), request.dtype);
    let sum = Sum::ToOwners { parts, in_place };
    let transport = match hier.transport()? {
        Transport::Host(transport) => return in_pieces(hier, request, &sum, transport),
        Transport::None(error) => return Err(error.clone()),
        Transport::Device(transport) => transport.clone(),
    };
    let (inner, outer) = levels(request.reduce, dtype, hier.members());
    let whole = hier.cut(parts.total(hier.members()), dtype);
    let (size, across, n) = (dtype.size(), hier.across, hier.here.count());
    let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| deliver(hier, cut, parts));
    let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
    let (cuts, overlapped) = cuts(hier, &*transport, &whole, &inside);
    let relay = hier.relay(transport, overlapped)?;
    hier.overlap(overlapped);
    let (mut pieces, mut sums) = (DevicePieces::new(&relay), Vec::with_capacity(cuts.len()));
    for cut in &cuts {
        let owned = sum.owned(hier, cut);
        let reduced = hier.scratch(cut.slice(across.here).len() * size)?;
        let summed = hier.scratch(total(&owned[across.me]) * size)?;
        let rail = DeviceRail::sum_to_owners(&relay, cut, owned, [&reduced, &summed], (dtype, outer))?;
        let of = part(source, bytes(&cut.range(), size));
        hier.inside(dtype, Some(inner), scatter(cut, n), [&of, &reduced])?;
        pieces.add(rail)?;
        sums.push(summed);
    }
    pieces.execute()?;
    for (at, (cut, summed)) in cuts.iter().zip(&sums).enumerate() {
        pieces.wait(at)?;
        hier.inside(dtype, None, deliver(hier, cut, parts), [summed, &sum.destination(hier, request, cut)])?;
    }
    Ok(())
}

/// A sum, by where it goes.
pub(super) enum Sum<'r> {
    ToAll { len: usize },
    ToOwners { parts: &'r Counts, in_place: bool },
}

impl Sum<'_> {
    /// What this process's members ask for, if it is a sum for gradients.
    pub fn of(request: &Request) -> Option<Sum<'_>> {
        match request.shape.as_ref()? {
            Shape::AllReduce { len } => Some(Sum::ToAll { len: *len }),
            Shape::ReduceScatter { counts, in_place } => Some(Sum::ToOwners { parts: counts, in_place: *in_place }),
            _ => None,
        }
    }

    fn cuts<'t>(&self, hier: &'t HierarchicalCall<'_, '_>, request: &Request) -> Vec<Cut<'t>> {
        let len = match self {
            Sum::ToAll { len } => *len,
            Sum::ToOwners { parts, .. } => parts.total(hier.members()),
        };
        hier.cut(len, request.dtype).pieces(PIECE / request.dtype.size())
    }

    /// What of this member's slice belongs to each process.
    fn owned(&self, hier: &HierarchicalCall<'_, '_>, cut: &Cut<'_>) -> Vec<Ranges> {
        let (here, hosts) = (hier.across.here, &hier.across.hosts);
        match self {
            Sum::ToAll { .. } => cut.equal(here, hosts.len()),
            Sum::ToOwners { parts, .. } => cut.owned(here, hosts, parts),
        }
    }

    fn destination(&self, hier: &HierarchicalCall<'_, '_>, request: &Request, cut: &Cut<'_>) -> Area {
        let (_, destination) = both(request);
        let size = request.dtype.size();
        match self {
            Sum::ToAll { .. } => part(destination, bytes(&cut.range(), size)),
            Sum::ToOwners { parts, in_place } => {
                let mine = bytes(&parts.part(hier.group.rank()), size);
                let own = part(destination, if *in_place { mine } else { 0..mine.len() });
                part(&own, bytes(&cut.within(parts, hier.group.rank()), size))
            }
        }
    }
}

/// From the rails to the members that own the parts.
fn deliver(hier: &HierarchicalCall<'_, '_>, cut: &Cut<'_>, parts: &Counts) -> Shape {
    let (ranks, n) = (&hier.across.hosts[hier.across.me].ranks, hier.here.count());
    let shared = |rail: usize, member: usize| cut.shared(rail, parts, ranks[member]);
    let send = (0..n).map(|rail| Counts::By((0..n).map(|member| shared(rail, member)).collect())).collect();
    let receive = (0..n).map(|member| Counts::By((0..n).map(|rail| shared(rail, member)).collect())).collect();
    Shape::AllToAll { send, receive }
}

#[track_caller]
fn in_pieces(
    hier: &HierarchicalCall<'_, '_>,
    request: &Request,
    sum: &Sum<'_>,
    transport: &Arc<dyn HostTransport>,
) -> Result<()> {
    let (mut pieces, areas) = before(hier, request, sum, transport)?;
    pieces.meet(hier)?;
    after(hier, request, sum, &areas, &mut || hier.done(pieces.carry_next()))
}

/// Sums up inside the process, and stages. Returns the pieces, and memory for what comes of each.
#[track_caller]
pub(super) fn before(
    hier: &HierarchicalCall<'_, '_>,
    request: &Request,
    sum: &Sum<'_>,
    transport: &Arc<dyn HostTransport>,
) -> Result<(Pieces, Vec<Area>)> {
    let ((source, _), dtype) = (both(request), request.dtype);
    let (inner, outer) = levels(request.reduce, dtype, hier.members());
    let (size, n) = (dtype.size(), hier.here.count());
    let job = match sum {
        Sum::ToAll { .. } => Job::SumAndFill(outer),
        Sum::ToOwners { .. } => Job::Sum(outer),
    };
    let cuts = sum.cuts(hier, request);
    let mut pieces = Pieces::new(hier, transport, dtype, job);
    let mut areas = Vec::with_capacity(cuts.len());
    for cut in &cuts {
        let owned = sum.owned(hier, cut);
        let slice = hier.scratch(cut.slice(hier.across.here).len() * size)?;
        areas.push(match sum {
            Sum::ToAll { .. } => slice.clone(),
            Sum::ToOwners { .. } => hier.scratch(total(&owned[hier.across.me]) * size)?,
        });
        let to = pieces.add(hier, cut, owned, &slice)?;
        hier.inside(dtype, Some(inner), scatter(cut, n), [&part(source, bytes(&cut.range(), size)), &to])?;
        hier.done(pieces.stage(hier, &to))?;
    }
    Ok((pieces, areas))
}

/// Brings what has come between the processes to its members. `next` gives the pieces. After a failure inside, the
/// pieces still come: the other processes count on them.
#[track_caller]
pub(super) fn after(
    hier: &HierarchicalCall<'_, '_>,
    request: &Request,
    sum: &Sum<'_>,
    areas: &[Area],
    next: &mut dyn FnMut() -> Result<Option<Piece>>,
) -> Result<()> {
    let (dtype, n, cuts) = (request.dtype, hier.here.count(), sum.cuts(hier, request));
    let (mut inside, mut rest) = (Ok(()), cuts.iter().zip(areas));
    while let (Some(piece), Some((cut, area))) = (next()?, rest.next()) {
        if inside.is_err() {
            continue;
        }
        let (there, shape) = match sum {
            Sum::ToAll { .. } => (piece.upload_all(hier, area), gather(cut, n)),
            Sum::ToOwners { parts, .. } => (piece.upload_own(hier, area), deliver(hier, cut, parts)),
        };
        let to = sum.destination(hier, request, cut);
        inside = hier.done(there.and_then(|from| hier.inside(dtype, None, shape, [&from, &to])));
    }
    inside
}
