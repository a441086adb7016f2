//! Sums by one kernel per member, which only writes to its peers: parts go to their owners, and sums come back.
//! `kernels/exchange.cu` has the protocol; [`exchange_ce`](super::exchange_ce) does the same by copy engines.
//!
//! `choose` picks it for large sums where kernels can wait for each other on the devices. Peers write to a member's
//! scratch. If a member has no memory for scratch, [`fused`] carries the sum out, with the same bits.
//!
//! Invariant: all members know the smallest scratch, so all cut alike.

use super::{Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, Slice, fused};
use crate::collective::{Arguments, Bulk, Entry, Pieces, code, eights, factors, kernels::value};
use crate::fabric::{BLOCKS, DType, DeviceBarrier, Limits, MOST, ReduceOp, Shape, Tiling, plan::Place, types};
use crate::{driver::Address, error::Result, kernel::builtin};

pub(crate) struct Exchange;

impl Algorithm for Exchange {
    about!("exchange", Exchange, "flags");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let large = case.bulk() == Some(Bulk::Sums) && case.bytes >= least(case.members);
        (case.meets_on_devices() && case.auto() && large)
            .then_some("at this size kernels that only write to each other are fastest")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.meets_on_devices() && case.sums() && case.wants(types::Algorithm::Exchange)).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let largest = case.largest();
        let sizes = cuttings(largest, blocks(largest, case.limits), case.members).map(|(_, room)| room);
        Needs {
            meeting: MeetBy::Kernels { launches: 1, in_full: true },
            scratch: if largest > 0 { Scratch::Optional(sizes.collect()) } else { Scratch::None },
        }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        blocks(case.largest(), case.limits) as u32
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let (request, shape) = (member.request, matched.shape);
        let (n, me, size) = (member.count(), member.rank, request.dtype.size());
        if (0..n).any(|member| matched.scratch(member).is_none()) {
            return fused::Fused.submit(member, matched);
        }
        let (largest, room) = (shape.largest(n, request.grain()) * size, matched.least_scratch(n));
        let fits = |(_, needed): &(Tiling, usize)| *needed <= room;
        let (cut, _) = cuttings(largest, blocks(largest, member.limits), n)
            .find(fits)
            .expect("every member has scratch for one of them");
        let address = |place: &Place| matched.address(place.member, place.side) + (place.start * size) as u64;
        let mut exchange = Addresses::default();
        for owner in 0..n {
            let slice = Slice::of(shape, n, owner, size);
            exchange.from[owner] = address(&slice.sources[me]);
            exchange.bytes[owner] = slice.bytes as u64;
            exchange.recv_scratch[owner] = matched.recv_scratch(owner).address;
            for to in slice.destinations.iter().filter(|_| owner == me) {
                exchange.to[to.member] = address(to);
            }
        }
        let pieces = Pieces::of(&cut, !matches!(shape, Shape::ReduceScatter { .. }));
        let (factors, meet) = (&member.factors(matched), member.barrier);
        let trade = Trade { op: request.reduce, factors, exchange, pieces, meet };
        let entry = entry(request.dtype);
        member.launch(&entry, cut.abreast as u32, &trade.args())
    }
}

/// Smallest all-reduce. On 4 H200s: 16 MB in 85 us, by a ring 89; 8 MB in 49, by slices with barriers 51. (A
/// reduce-scatter gains nothing: 256 MB in 682 us, by slices 656.) 8 devices: by what one sends, not measured.
pub(crate) fn least(members: usize) -> usize {
    match members {
        0..=2 => usize::MAX,
        3..=4 => 8 << 20,
        _ => 16 << 20,
    }
}

/// Most bytes of a piece, and bytes of a slice that is worth another block: the best of 16 KB to 512 KB on 4 H200s.
const PIECE: usize = 64 << 10;
/// The smallest limit on pieces that is worth it. Below it, reading from peers is faster and needs no memory.
const LEAST: usize = 4 << 10;
const ROOM: usize = 64 << 20;

fn blocks(largest: usize, limits: &Limits) -> usize {
    largest.div_ceil(PIECE).clamp(1, limits.blocks(BLOCKS) as usize)
}

/// The ways to cut slices of up to `largest` bytes, from the best to the smallest pieces. Each comes with the bytes of
/// scratch that it needs: slots for every block and every sender.
fn cuttings(largest: usize, blocks: usize, members: usize) -> impl Iterator<Item = (Tiling, usize)> {
    let smaller = |&piece: &usize| (piece > LEAST).then_some(piece / 2);
    let cut = move |most| {
        let cut = Tiling::even(largest, blocks, most);
        (cut, cut.rounds.min(EXCHANGE_SLOTS) * blocks * (members - 1) * cut.tile)
    };
    std::iter::successors(Some(PIECE), smaller).map(cut).filter(|(_, room)| *room <= ROOM)
}

pub(in super::super) fn entry(dtype: DType) -> Entry {
    Entry { module: &builtin::EXCHANGE, name: typed_name!(dtype, "exchange"), host: None }
}

/// Slots of a block in its member's scratch, for each sender. For a single piece one slot is enough.
pub(in super::super) const EXCHANGE_SLOTS: usize = 2;

/// The addresses that a member reads and writes, by rank.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Addresses {
    pub from: [Address; MOST],
    pub bytes: [u64; MOST],
    /// Where the member wants the sums of the own slice; 0 if it does not want them.
    pub to: [Address; MOST],
    /// Every member's scratch, to which peers write: slots by parity of the piece, then by block, then by sender.
    pub recv_scratch: [Address; MOST],
}

/// One member's part of sums that are exchanged; on GPUs only. Every member launches the same grid.
pub(in super::super) struct Trade<'a> {
    pub op: ReduceOp,
    pub factors: &'a [f64],
    pub exchange: Addresses,
    pub pieces: Pieces,
    pub meet: DeviceBarrier,
}

impl Trade<'_> {
    pub(in super::super) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.pieces.count > 0);
        let [low, high] = factors(self.factors);
        let head = [value(self.meet), value(code(self.op)), low, high, value(self.pieces)];
        let Addresses { from, bytes, to, recv_scratch } = &self.exchange;
        head.into_iter().chain([from, bytes, to, recv_scratch].into_iter().flat_map(eights)).collect()
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/algorithm/exchange/tests.rs"]
mod tests;
