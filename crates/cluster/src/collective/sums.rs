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
    relay::Relay,
};
use crate::{
    runtime::collective::{Area, Counts, Request, Shape, Side},
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
pub(super) fn sum(hier: &HierarchicalCall<'_, '_>, request: &Request, sum: &Sum<'_>) -> Result<()> {
    let ((source, destination), dtype) = (both(request), request.dtype);
    let transport = match hier.transport()? {
        Transport::Host(transport) => return in_pieces(hier, request, sum, transport),
        Transport::None(error) => return Err(error.clone()),
        Transport::Device(transport) => transport.clone(),
    };
    let (inner, outer) = levels(request.reduce, dtype, hier.members());
    let (size, across, n) = (dtype.size(), hier.across, hier.here.count());
    let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| sum.behind(hier, cut));
    let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
    let (cuts, overlapped) = cuts(hier, &*transport, &sum.whole(hier, request), &inside);
    let relay = Relay::new(hier, transport, overlapped)?;
    if let Sum::ToAll { len } = sum
        && let Some(way) = relay.in_place(dtype, request.reduce, *len)
    {
        return relay.sum_in_place([source, destination], dtype, way);
    }
    hier.overlap(overlapped);
    let mut pieces = DevicePieces::new(&relay, &inside);
    for cut in &cuts {
        let (owned, of) = (sum.owned(hier, cut), part(source, bytes(&cut.range(), size)));
        let slice = hier.scratch(cut.slice(across.here).len() * size)?;
        match sum {
            Sum::ToAll { .. } => {
                let rail = DeviceRail::sum_to_all(&relay, cut, owned, &slice, (dtype, outer))?;
                pieces.add(cut, rail, [&of, &slice], &slice)?;
            }
            Sum::ToOwners { .. } => {
                let summed = hier.scratch(total(&owned[across.me]) * size)?;
                let rail = DeviceRail::sum_to_owners(&relay, cut, owned, [&slice, &summed], (dtype, outer))?;
                pieces.add(cut, rail, [&of, &slice], &summed)?;
            }
        }
    }
    pieces.carry_out(&cuts, |cut| sum.destination(hier, request, cut))
}

/// A sum, by where it goes.
pub(super) enum Sum<'r> {
    ToAll {
        len: usize,
    },
    /// `in_place`: the own part lies in the destination, at its place.
    ToOwners {
        parts: &'r Counts,
        in_place: bool,
    },
}

impl Sum<'_> {
    /// The request of this process's members, if it is a sum for gradients.
    pub fn of(request: &Request) -> Option<Sum<'_>> {
        match request.shape.as_ref()? {
            Shape::AllReduce { len } => Some(Sum::ToAll { len: *len }),
            Shape::ReduceScatter { counts, in_place } => Some(Sum::ToOwners { parts: counts, in_place: *in_place }),
            _ => None,
        }
    }

    fn whole<'t>(&self, hier: &'t HierarchicalCall<'_, '_>, request: &Request) -> Cut<'t> {
        let len = match self {
            Sum::ToAll { len } => *len,
            Sum::ToOwners { parts, .. } => parts.total(hier.members()),
        };
        hier.cut(len, request.dtype)
    }

    fn cuts<'t>(&self, hier: &'t HierarchicalCall<'_, '_>, request: &Request) -> Vec<Cut<'t>> {
        self.whole(hier, request).pieces(PIECE / request.dtype.size())
    }

    /// The step behind the rails.
    fn behind(&self, hier: &HierarchicalCall<'_, '_>, cut: &Cut<'_>) -> Shape {
        match self {
            Sum::ToAll { .. } => gather(cut, hier.here.count()),
            Sum::ToOwners { parts, .. } => deliver(hier, cut, parts),
        }
    }

    /// Each process's share of this member's slice.
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
    let (dtype, cuts) = (request.dtype, sum.cuts(hier, request));
    let (mut inside, mut rest) = (Ok(()), cuts.iter().zip(areas));
    while let (Some(piece), Some((cut, area))) = (next()?, rest.next()) {
        if inside.is_err() {
            continue;
        }
        let there = match sum {
            Sum::ToAll { .. } => piece.upload_all(hier, area),
            Sum::ToOwners { .. } => piece.upload_own(hier, area),
        };
        let (shape, to) = (sum.behind(hier, cut), sum.destination(hier, request, cut));
        inside = hier.done(there.and_then(|from| hier.inside(dtype, None, shape, [&from, &to])));
    }
    inside
}
