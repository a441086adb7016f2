//! Sums over several processes: all_reduce, reduce_scatter, and reduce (a reduce_scatter of which one member gets all).
//!
//! ```text
//! inside     reduce_scatter over the rails: local index r has slice r, summed over this process
//! rail       the processes' slices are summed, each by its owner
//! all_reduce      rail: the sums go to all processes; inside: all_gather
//! reduce_scatter  inside: all_to_all to the members that own the sums
//! ```

use super::{
    super::request::Request,
    cut::{Ranges, total},
    host_rail::HostRail,
    trip::{Rail, Trip, bytes, part},
};
use crate::{
    error::Result,
    fabric::{
        descriptor::{Area, Payload},
        plan::{Counts, Shape, Side},
        types::{DType, ReduceOp},
    },
};
use std::{ops::Range, sync::Arc};

/// The operations inside a process and between processes.
fn levels(op: ReduceOp) -> (ReduceOp, ReduceOp) {
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
    let (size, across) = (dtype.size(), trip.across);
    let ((inner, outer), cut) = (levels(request.reduce), trip.cut(len, dtype));
    let (slice, counts) = (cut.slice(across.here), cut.counts(trip.here.count()));
    let owned = cut.equal(across.here, across.hosts.len());
    let rail = trip.rail(&slice, &owned, size)?;
    let own = trip.scratch(slice.len() * size)?;
    let scatter = Shape::ReduceScatter { counts: counts.clone(), in_place: false };
    trip.inside(dtype, Some(inner), scatter, [source, &own])?;
    match rail {
        Rail::Device(rail) => rail.sum_to_all(&own, dtype, outer)?,
        Rail::Host(rail) => sum_in_host(trip, rail, &own, (&slice, &owned), (dtype, outer))?,
    }
    trip.inside(dtype, None, Shape::AllGather { counts, in_place: false }, [&own, destination])
}

/// The slices of all processes are summed into all of them, in the memory of the hosts.
#[track_caller]
fn sum_in_host(
    trip: &Trip<'_, '_>,
    mut rail: HostRail<'_, '_, '_>,
    own: &Area,
    (slice, owned): (&Range<usize>, &[Ranges]),
    (dtype, outer): (DType, ReduceOp),
) -> Result<()> {
    let (size, across) = (dtype.size(), trip.across);
    let lens: Vec<usize> = owned.iter().map(|ranges| total(ranges) * size).collect();
    let mut sum = rail.room_for_sum(&owned[across.me], size)?;
    rail.room_for(&lens)?;
    let staged = trip.stage(own)?;
    let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
    // Nothing waits on a device: the next collective may go on.
    drop(commit.window);
    let summed = rail.sum(commit.number, (&staged, slice), owned, (dtype, outer), &mut sum);
    let sum = Arc::new(sum);
    let arrived = trip.done(summed.and_then(|()| rail.fill(commit.number, &sum, &lens)))?;
    let theirs = arrived.iter().map(|(host, bytes)| (*host, bytes));
    for (host, from) in theirs.chain([(across.me, &*sum)]) {
        for range in &owned[host] {
            let to = part(own, bytes(&(range.start - slice.start..range.end - slice.start), size));
            trip.upload(from, 0..to.bytes.len(), &to)?;
        }
    }
    Ok(())
}

/// `in_place`: the own part lies in the source, at its place.
#[track_caller]
pub(super) fn reduce_scatter(trip: &Trip<'_, '_>, request: &Request, parts: &Counts, in_place: bool) -> Result<()> {
    let ((source, destination), dtype) = (both(request), request.dtype);
    let (size, across, n) = (dtype.size(), trip.across, trip.here.count());
    let (inner, outer) = levels(request.reduce);
    let cut = trip.cut(parts.total(trip.members()), dtype);
    let (slice, counts) = (cut.slice(across.here), cut.counts(n));
    let owned = cut.owned(across.here, &across.hosts, parts);
    let rail = trip.rail(&slice, &owned, size)?;
    let own = trip.scratch(slice.len() * size)?;
    trip.inside(dtype, Some(inner), Shape::ReduceScatter { counts, in_place: false }, [source, &own])?;
    let summed = trip.scratch(total(&owned[across.me]) * size)?;
    match rail {
        Rail::Device(rail) => rail.sum_to_owners(&own, (dtype, outer), &summed)?,
        Rail::Host(mut rail) => {
            let mut sum = rail.room_for_sum(&owned[across.me], size)?;
            let staged = trip.stage(&own)?;
            let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
            drop(commit.window);
            trip.done(rail.sum(commit.number, (&staged, &slice), &owned, (dtype, outer), &mut sum))?;
            trip.upload(&sum, 0..sum.len(), &summed)?;
        }
    }
    // From the rails to the members that own the parts.
    let ranks = &across.hosts[across.me].ranks;
    let shared = |rail: usize, member: usize| cut.shared(rail, parts, ranks[member]);
    let send = (0..n).map(|rail| Counts::By((0..n).map(|member| shared(rail, member)).collect())).collect();
    let receive = (0..n).map(|member| Counts::By((0..n).map(|rail| shared(rail, member)).collect())).collect();
    let mine = bytes(&parts.part(trip.group.rank), size);
    let to = part(destination, if in_place { mine } else { 0..mine.len() });
    trip.inside(dtype, None, Shape::AllToAll { send, receive }, [&summed, &to])
}
