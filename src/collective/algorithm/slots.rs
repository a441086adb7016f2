//! Sums of floats of any size, as data that are their own flags, piece by piece through slots of the members' inboxes:
//! parts go to their owners, and sums to all. Two members add up everything, each for itself.
//!
//! `choose` picks it for sums that are too large for [`inbox`](super::inbox), up to where copy engines or a ring are
//! faster. `kernels/inbox.cu` has the protocol. Never touches a peer's user buffer, and needs no scratch.
//!
//! Invariant: a kernel ends when the others have taken all that it has sent, so slots are empty between calls.

use super::{Algorithm, Case, Matched, Member, Slice};
use crate::collective::{
    Arguments, Bulk, Entry, Pieces, code, eights, factors,
    kernels::{typed_float, value},
    launch,
};
use crate::fabric::{BLOCKS, DType, DeviceBarrier, Limits, MOST, ReduceOp, Shape, Side, Tiling, types};
use crate::{driver::Address, error::Result, kernel::builtin};

pub(crate) struct Slots;

/// Largest buffer. All-reduces of up to four members are faster in one trip ([`inbox`](super::inbox)) or by one kernel
/// with barriers ([`fused`](super::fused)): on four H200s, in graphs, 1 MB takes 13.2 us through slots and 9.6 with
/// barriers. More than four: by a model (`fabric/limits/traffic_tests.rs`).
pub(crate) fn most(bulk: Bulk, members: usize) -> usize {
    match (bulk, members) {
        (Bulk::Sums, 0..=4) => 0,
        (_, 0..=4) => 8 << 20,
        _ => 16 << 20,
    }
}

/// Smallest all-reduce in a graph, where copy engines do not go. On two H200s: 256 MB in 779 us, with barriers 796.
pub(crate) fn held(members: usize) -> usize {
    if members == 2 { 128 << 20 } else { usize::MAX }
}

impl Algorithm for Slots {
    about!("slots", Inbox, "data");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let bulk = case.bulk()?;
        let large = case.held() && case.bytes >= held(case.members) && bulk == Bulk::Sums;
        (case.auto() && (case.bytes <= most(bulk, case.members) || large) && can(case))
            .then_some("a sum of floats: data that are their own flags, piece by piece")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.wants(types::Algorithm::Inbox) && can(case)).then_some("asked for; it goes piece by piece")
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        let Some((_, slot)) = case.inboxes() else { return 0 };
        let both = matches!(case.shape, Some(Shape::AllReduce { .. })) && goes_whole(case.members, case.bytes);
        blocks(if both { case.bytes } else { case.largest() }, slot, case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let (request, shape) = (member.request, matched.shape);
        let (n, me, size) = (member.count(), member.rank, request.dtype.size());
        let (mut from, mut bytes, mut to) = ([0; MOST], [0; MOST], [0; MOST]);
        let mut returns = false;
        match shape {
            Shape::AllReduce { len } if goes_whole(n, len * size) => {
                from[..2].fill(member.own(Side::Source, 0, *len));
                bytes[..2].fill((len * size) as u64);
                to[me] = member.own(Side::Destination, 0, *len);
            }
            _ => {
                returns = matches!(shape, Shape::AllReduce { .. });
                for owner in 0..n {
                    let Slice { bytes: all, sources, destinations } = Slice::of(shape, n, owner, size);
                    bytes[owner] = all as u64;
                    from[owner] = member.own(sources[me].side, sources[me].start, all);
                    let own = destinations.iter().find(|to| to.member == me);
                    to[owner] = own.map_or(0, |to| member.own(to.side, to.start, all));
                }
            }
        }
        let largest = bytes.into_iter().max().unwrap_or(0) as usize;
        let slot = member.pad().layout().inbox_slot;
        let blocks = blocks(largest, slot, member.limits);
        let cut = Tiling::even(largest, blocks as usize, slot);
        let pieces = Pieces::of(&cut, returns);
        let (op, factors, meet) = (request.reduce, &member.factors(matched), member.barrier);
        let parcels = Parcels { from, bytes, to, op, factors, pieces, meet };
        let entry = entry(request.dtype).expect("chosen for floats");
        member.launch(&entry, cut.abreast as u32, &parcels.args())
    }
}

/// Between two as many bytes cross the link as by parts, in one trip instead of two; but each adds up all of it. On two
/// H200s 8 MB take 31.7 us whole and 33.8 by parts, 16 MB 63.1 and 59.8.
fn goes_whole(members: usize, bytes: usize) -> bool {
    members == 2 && bytes <= 8 << 20
}

/// Whether every member gets a part of a sum of floats, or all. (An empty one has no steps: no kernel would wait.)
fn can(case: &Case<'_>) -> bool {
    let shape = matches!(case.bulk(), Some(Bulk::Sums | Bulk::Parts));
    shape && case.largest() > 0 && case.inboxes().is_some() && entry(case.dtype).is_some()
}

/// Blocks of a kernel for slices of up to `largest` bytes: half a slot for each, so more work on little.
fn blocks(largest: usize, slot: usize, limits: &Limits) -> u32 {
    launch::blocks_of(largest, slot / 2, limits.blocks(BLOCKS))
}

/// The kernel of any size, if there is one for the type. Launched with [`Parcels::args`].
pub(in super::super) fn entry(dtype: DType) -> Option<Entry> {
    let name = typed_float!(dtype, "slots")?;
    Some(Entry { module: &builtin::INBOX, name, host: None })
}

/// One member's part of sums whose pieces go through slots. Every member launches the same grid. By rank:
pub(in super::super) struct Parcels<'a> {
    pub from: [Address; MOST],
    pub bytes: [u64; MOST],
    /// Where the sums of the slice go in the own memory; looked at for the own slice, and for all if sums return.
    pub to: [Address; MOST],
    pub op: ReduceOp,
    pub factors: &'a [f64],
    pub pieces: Pieces,
    pub meet: DeviceBarrier,
}

impl Parcels<'_> {
    pub(in super::super) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.pieces.count > 0);
        let [low, high] = factors(self.factors);
        let head = [value(self.meet), value(code(self.op)), low, high, value(self.pieces)];
        head.into_iter().chain([&self.from, &self.bytes, &self.to].into_iter().flat_map(eights)).collect()
    }
}
