//! all_gather over several processes, and broadcast: an all_gather of which one member has all.
//!
//! ```text
//! inside   all_to_all: rail r gets what of slice r this process has
//! rail     each process sends it to all others, which then have slice r
//! inside   all_gather of the slices
//! ```
//!
//! Large buffers go in pieces: through the memory of the hosts by [`pieces`](super::pieces), and over rails between
//! devices by [`device_pieces`](super::device_pieces).

use super::{
    cut::{Cut, Ranges, total},
    device_pieces::{DevicePieces, Inside, cuts},
    device_rail::DeviceRail,
    hierarchical::{HierarchicalCall, bytes, part},
    pieces::{Job, PIECE, Pieces},
    relay::Relay,
    sums::gather,
};
use crate::{
    runtime::collective::{Counts, Request, Shape, Side},
    traits::Transport,
};
use gpu_pool::Result;

/// `in_place`: the own part lies in the destination, at its place.
#[track_caller]
pub(super) fn all_gather(
    hier: &HierarchicalCall<'_, '_>,
    request: &Request,
    parts: &Counts,
    in_place: bool,
) -> Result<()> {
    let area = |side| request.area(side).expect("a member gives memory");
    let (source, destination, dtype) = (area(Side::Source), area(Side::Destination), request.dtype);
    let (size, across, n) = (dtype.size(), hier.across, hier.here.count());
    let whole = hier.cut(parts.total(hier.members()), dtype);
    let owned = |cut: &Cut<'_>| cut.owned(across.here, &across.hosts, parts);
    // From the members to the rails.
    let ranks = &across.hosts[across.me].ranks;
    let collect = |cut: &Cut<'_>| {
        let shared = |member: usize, rail: usize| cut.shared(rail, parts, ranks[member]);
        let send = (0..n).map(|member| Counts::By((0..n).map(|rail| shared(member, rail)).collect())).collect();
        let receive = (0..n).map(|rail| Counts::By((0..n).map(|member| shared(member, rail)).collect())).collect();
        Shape::AllToAll { send, receive }
    };
    let mine = bytes(&parts.part(hier.group.rank()), size);
    let given = part(source, if in_place { mine } else { 0..mine.len() });
    let from = |cut: &Cut<'_>| part(&given, bytes(&cut.within(parts, hier.group.rank()), size));
    let to = |cut: &Cut<'_>| part(destination, bytes(&cut.range(), size));
    let lens = |owned: &[Ranges], cut: &Cut<'_>| (total(&owned[across.me]) * size, cut.slice(across.here).len() * size);
    let transport = match hier.transport()? {
        Transport::Host(transport) => transport,
        Transport::None(error) => return Err(error.clone()),
        Transport::Device(transport) => {
            let after = |cut: &Cut<'_>| gather(cut, n);
            let inside = Inside { dtype, reduce: None, before: &collect, after: &after };
            let (cuts, overlapped) = cuts(hier, &**transport, &whole, &inside);
            let relay = Relay::new(hier, transport.clone(), overlapped)?;
            hier.overlap(overlapped);
            let mut pieces = DevicePieces::new(&relay, &inside);
            for cut in &cuts {
                let owned = owned(cut);
                let (mine, slice) = lens(&owned, cut);
                let (own, all) = (hier.scratch(mine)?, hier.scratch(slice)?);
                let rail = DeviceRail::fill(&relay, cut, owned, [&own, &all], size)?;
                pieces.add(cut, rail, [&from(cut), &own], &all)?;
            }
            return pieces.carry_out(&cuts, to);
        }
    };
    let cuts = whole.pieces(PIECE / size);
    let mut pieces = Pieces::new(hier, transport, dtype, Job::Fill);
    let mut slices = Vec::with_capacity(cuts.len());
    for cut in &cuts {
        let owned = owned(cut);
        let (mine, slice) = lens(&owned, cut);
        let (own, all) = (hier.scratch(mine)?, hier.scratch(slice)?);
        let to = pieces.add(hier, cut, owned, &own)?;
        hier.inside(dtype, None, collect(cut), [&from(cut), &to])?;
        pieces.stage(hier, &to)?;
        slices.push(all);
    }
    pieces.meet(hier)?;
    let (mut inside, mut rest) = (Ok(()), cuts.iter().zip(&slices));
    while let (Some(piece), Some((cut, all))) = (hier.done(pieces.carry_next())?, rest.next()) {
        if inside.is_ok() {
            inside = hier.done(piece.upload_all(hier, all).map(drop));
        }
        if inside.is_ok() {
            inside = hier.done(hier.inside(dtype, None, gather(cut, n), [all, &to(cut)]));
        }
    }
    inside
}
