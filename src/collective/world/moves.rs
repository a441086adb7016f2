//! all_gather over several processes, and broadcast: an all_gather of which one member has all.
//!
//! ```text
//! inside   all_to_all: rail r gets what of slice r this process has
//! rail     each process sends it to all others, which then have slice r
//! inside   all_gather of the slices
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
    },
};
use std::ops::Range;

/// `in_place`: the own part lies in the destination, at its place.
#[track_caller]
pub(super) fn all_gather(trip: &Trip<'_, '_>, request: &Request, parts: &Counts, in_place: bool) -> Result<()> {
    let area = |side| request.area(side).expect("a member gives memory");
    let (source, destination, dtype) = (area(Side::Source), area(Side::Destination), request.dtype);
    let (size, across, n) = (dtype.size(), trip.across, trip.here.count());
    let cut = trip.cut(parts.total(trip.members()), dtype);
    let (slice, counts) = (cut.slice(across.here), cut.counts(n));
    let owned = cut.owned(across.here, &across.hosts, parts);
    let lens: Vec<usize> = owned.iter().map(|ranges| total(ranges) * size).collect();
    let rail = trip.rail(&slice, &owned, size)?;
    let (own, all) = (trip.scratch(lens[across.me])?, trip.scratch(slice.len() * size)?);
    let ranks = &across.hosts[across.me].ranks;
    let shared = |member: usize, rail: usize| cut.shared(rail, parts, ranks[member]);
    let send = (0..n).map(|member| Counts::By((0..n).map(|rail| shared(member, rail)).collect())).collect();
    let receive = (0..n).map(|rail| Counts::By((0..n).map(|member| shared(member, rail)).collect())).collect();
    let mine = bytes(&parts.part(trip.group.rank), size);
    let from = part(source, if in_place { mine } else { 0..mine.len() });
    trip.inside(dtype, None, Shape::AllToAll { send, receive }, [&from, &own])?;
    match rail {
        Rail::Device(rail) => rail.fill(&own, &all)?,
        Rail::Host(rail) => fill_in_host(trip, rail, [&own, &all], (&slice, &owned, &lens), size)?,
    }
    trip.inside(dtype, None, Shape::AllGather { counts, in_place: false }, [&all, destination])
}

/// Each process sends what it has, `own`, to all others, through the memory of the hosts. `all` is the slice.
#[track_caller]
fn fill_in_host(
    trip: &Trip<'_, '_>,
    mut rail: HostRail<'_, '_, '_>,
    [own, all]: [&Area; 2],
    (slice, owned, lens): (&Range<usize>, &[Ranges], &[usize]),
    size: usize,
) -> Result<()> {
    rail.room_for(lens)?;
    let staged = trip.stage(own)?;
    let (_, commit) = trip.meet(Payload::Nothing, |_| Vec::new())?;
    drop(commit.window);
    let arrived = trip.done(rail.fill(commit.number, &staged, lens))?;
    for (host, theirs) in arrived.iter().map(|(host, bytes)| (*host, bytes)).chain([(trip.across.me, &*staged)]) {
        let mut start = 0;
        for range in &owned[host] {
            let to = part(all, bytes(&(range.start - slice.start..range.end - slice.start), size));
            let end = start + to.bytes.len();
            trip.upload(theirs, start..end, &to)?;
            start = end;
        }
    }
    Ok(())
}
