//! Sums over several processes: all_reduce, reduce_scatter, and reduce (a reduce_scatter of which one member gets all).
//!
//! ```text
//! inside     reduce_scatter over the rails: local index r has slice r, summed over this process
//! rail       the processes' slices are summed, each by its owner
//! all_reduce      rail: the sums go to all processes; inside: all_gather
//! reduce_scatter  inside: all_to_all to the members that own the sums
//! ```
//!
//! Large buffers go in pieces: through the memory of the hosts by [`pieces`](super::pieces), and over rails between
//! devices by [`device_pieces`](super::device_pieces).

use super::{
    super::{request::Request, transport::Transport},
    cut::{Cut, total},
    device_pieces::{DevicePieces, Inside, cuts},
    device_rail::DeviceRail,
    pieces::{Job, PIECE, Pieces},
    trip::{Trip, bytes, part},
};
use crate::{
    error::Result,
    fabric::{
        descriptor::Area,
        plan::{Counts, Shape, Side},
        types::ReduceOp,
    },
};

/// The first step of an all_reduce inside a process of `n` members.
pub(super) fn scatter(cut: &Cut<'_>, n: usize) -> Shape {
    Shape::ReduceScatter { counts: cut.counts(n), in_place: false }
}

/// The last step.
pub(super) fn gather(cut: &Cut<'_>, n: usize) -> Shape {
    Shape::AllGather { counts: cut.counts(n), in_place: false }
}

/// The operations inside a process and between processes.
pub(super) fn levels(op: ReduceOp) -> (ReduceOp, ReduceOp) {
    match op {
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
pub(super) fn all_reduce(trip: &Trip<'_, '_>, request: &Request, len: usize) -> Result<()> {
    let ((source, destination), dtype) = (both(request), request.dtype);
    let ((inner, outer), whole) = (levels(request.reduce), trip.cut(len, dtype));
    let (size, across, n) = (dtype.size(), trip.across, trip.here.count());
    let owned = |cut: &Cut<'_>| cut.equal(across.here, across.hosts.len());
    let of = |area: &Area, cut: &Cut<'_>| part(area, bytes(&cut.range(), size));
    let transport = match trip.transport()? {
        Transport::Host(transport) => transport,
        Transport::None(error) => return Err(error.clone()),
        Transport::Device(transport) => {
            let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| gather(cut, n));
            let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
            let (cuts, beside) = cuts(trip, &**transport, &whole, &inside);
            let way = trip.way(transport.clone(), beside)?;
            if let Some(reduce) = way.in_place(dtype, request.reduce) {
                return way.sum_in_place([source, destination], dtype, reduce);
            }
            trip.overlap(beside);
            let (mut pieces, mut slices) = (DevicePieces::new(&way), Vec::with_capacity(cuts.len()));
            for cut in &cuts {
                let own = trip.scratch(cut.slice(across.here).len() * size)?;
                let rail = DeviceRail::sum_to_all(&way, cut, owned(cut), &own, (dtype, outer))?;
                trip.inside(dtype, Some(inner), scatter(cut, n), [&of(source, cut), &own])?;
                pieces.add(rail)?;
                slices.push(own);
            }
            pieces.carry()?;
            for (at, (cut, own)) in cuts.iter().zip(&slices).enumerate() {
                pieces.wait(at)?;
                trip.inside(dtype, None, gather(cut, n), [own, &of(destination, cut)])?;
            }
            return Ok(());
        }
    };
    let cuts = whole.pieces(PIECE / size);
    let mut pieces = Pieces::new(trip, transport, dtype, Job::SumAndFill(outer));
    let mut slices = Vec::with_capacity(cuts.len());
    for cut in &cuts {
        let own = trip.scratch(cut.slice(across.here).len() * size)?;
        let to = pieces.add(cut, owned(cut), &own)?;
        trip.inside(dtype, Some(inner), scatter(cut, n), [&of(source, cut), &to])?;
        pieces.stage(&to)?;
        slices.push(own);
    }
    pieces.meet()?;
    let (mut inside, mut rest) = (Ok(()), cuts.iter().zip(&slices));
    while let (Some(piece), Some((cut, own))) = (pieces.carry_next()?, rest.next()) {
        if inside.is_ok() {
            inside = trip.done(piece.upload_all(trip, own));
        }
        if inside.is_ok() {
            inside = trip.done(trip.inside(dtype, None, gather(cut, n), [own, &of(destination, cut)]));
        }
    }
    inside
}

/// `in_place`: the own part lies in the source, at its place.
#[track_caller]
pub(super) fn reduce_scatter(trip: &Trip<'_, '_>, request: &Request, parts: &Counts, in_place: bool) -> Result<()> {
    let ((source, destination), dtype) = (both(request), request.dtype);
    let (size, across, n) = (dtype.size(), trip.across, trip.here.count());
    let ((inner, outer), whole) = (levels(request.reduce), trip.cut(parts.total(trip.members()), dtype));
    let owned = |cut: &Cut<'_>| cut.owned(across.here, &across.hosts, parts);
    // From the rails to the members that own the parts.
    let ranks = &across.hosts[across.me].ranks;
    let deliver = |cut: &Cut<'_>| {
        let shared = |rail: usize, member: usize| cut.shared(rail, parts, ranks[member]);
        let send = (0..n).map(|rail| Counts::By((0..n).map(|member| shared(rail, member)).collect())).collect();
        let receive = (0..n).map(|member| Counts::By((0..n).map(|rail| shared(rail, member)).collect())).collect();
        Shape::AllToAll { send, receive }
    };
    let mine = bytes(&parts.part(trip.group.rank), size);
    let own = part(destination, if in_place { mine } else { 0..mine.len() });
    let to = |cut: &Cut<'_>| part(&own, bytes(&cut.within(parts, trip.group.rank), size));
    let of = |cut: &Cut<'_>| part(source, bytes(&cut.range(), size));
    let transport = match trip.transport()? {
        Transport::Host(transport) => transport,
        Transport::None(error) => return Err(error.clone()),
        Transport::Device(transport) => {
            let before = |cut: &Cut<'_>| scatter(cut, n);
            let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &deliver };
            let (cuts, beside) = cuts(trip, &**transport, &whole, &inside);
            let way = trip.way(transport.clone(), beside)?;
            trip.overlap(beside);
            let (mut pieces, mut sums) = (DevicePieces::new(&way), Vec::with_capacity(cuts.len()));
            for cut in &cuts {
                let owned = owned(cut);
                let reduced = trip.scratch(cut.slice(across.here).len() * size)?;
                let summed = trip.scratch(total(&owned[across.me]) * size)?;
                let rail = DeviceRail::sum_to_owners(&way, cut, owned, [&reduced, &summed], (dtype, outer))?;
                trip.inside(dtype, Some(inner), scatter(cut, n), [&of(cut), &reduced])?;
                pieces.add(rail)?;
                sums.push(summed);
            }
            pieces.carry()?;
            for (at, (cut, summed)) in cuts.iter().zip(&sums).enumerate() {
                pieces.wait(at)?;
                trip.inside(dtype, None, deliver(cut), [summed, &to(cut)])?;
            }
            return Ok(());
        }
    };
    let cuts = whole.pieces(PIECE / size);
    let mut pieces = Pieces::new(trip, transport, dtype, Job::Sum(outer));
    let mut sums = Vec::with_capacity(cuts.len());
    for cut in &cuts {
        let owned = owned(cut);
        let reduced = trip.scratch(cut.slice(across.here).len() * size)?;
        sums.push(trip.scratch(total(&owned[across.me]) * size)?);
        let to = pieces.add(cut, owned, &reduced)?;
        trip.inside(dtype, Some(inner), scatter(cut, n), [&of(cut), &to])?;
        pieces.stage(&to)?;
    }
    pieces.meet()?;
    let (mut inside, mut rest) = (Ok(()), cuts.iter().zip(&sums));
    while let (Some(piece), Some((cut, summed))) = (pieces.carry_next()?, rest.next()) {
        if inside.is_ok() {
            inside = trip.done(piece.upload_own(trip, summed));
        }
        if inside.is_ok() {
            inside = trip.done(trip.inside(dtype, None, deliver(cut), [summed, &to(cut)]));
        }
    }
    inside
}
