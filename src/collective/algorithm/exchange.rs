//! Sums by one kernel per member, which only writes to its peers: parts to their owners, then sums back.
//! `kernels/exchange.cu` has the protocol; [`exchange_ce`](super::exchange_ce) does the same by copy engines.
//!
//! Peers write into a member's scratch. All members know the smallest scratch, and cut by it. If a member has no memory
//! for scratch, [`fused`] carries the sum out, with the same bits.

use super::{
    super::{
        choose::{Bulk, Case},
        kernels::{self, EXCHANGE_SLOTS, Pieces, Trade},
    },
    Algorithm, Matched, Meeting, Member, Needs, Scratch,
    exchange_ce::Slice,
    fused,
};
use crate::error::Result;
use crate::fabric::{
    limits::Limits,
    plan::{GRAIN, Place, Shape},
    types,
};

pub(crate) struct Exchange;

impl Algorithm for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn group(&self, _: &Case<'_>) -> types::Algorithm {
        types::Algorithm::Exchange
    }

    fn waits_by(&self) -> &'static str {
        "flags"
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let large = case.bulk() == Some(Bulk::Sums) && case.bytes >= case.limits.exchange;
        (case.meets_on_devices() && case.auto() && large)
            .then_some("at this size kernels that only write to each other are fastest")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.meets_on_devices() && case.sums() && case.wants(types::Algorithm::Exchange)).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let largest = case.largest();
        let sizes = cuttings(largest, blocks(largest, case.limits), case.members).map(|cut| cut.room);
        Needs {
            meeting: Meeting::Kernels { launches: 1, in_full: true },
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
        let cut = cuttings(largest, blocks(largest, member.limits), n).find(|cut| cut.room <= room);
        let cut = cut.expect("every member has room for one of them");
        let address = |place: &Place| matched.address(place.member, place.side) + (place.start * size) as u64;
        let mut exchange = kernels::Exchange::default();
        for owner in 0..n {
            let slice = Slice::of(shape, n, owner, size);
            exchange.from[owner] = address(&slice.sources[me]);
            exchange.bytes[owner] = slice.bytes as u64;
            exchange.inbox[owner] = matched.recv_scratch(owner).address;
            for to in slice.destinations.iter().filter(|_| owner == me) {
                exchange.to[to.member] = address(to);
            }
        }
        let pieces = Pieces {
            piece: cut.piece as u64,
            count: u32::try_from(cut.pieces).expect("they are counted in 32 bits; a terabyte has some millions"),
            returns: u32::from(!matches!(shape, Shape::ReduceScatter { .. })),
        };
        let (factors, meet) = (&member.factors(matched), member.barrier);
        let trade = Trade { op: request.reduce, factors, exchange, pieces, meet };
        let entry = kernels::exchange(request.dtype);
        member.launch(&entry, cut.blocks as u32, &trade.args())
    }
}

/// Most bytes of a piece, and bytes of a slice for which there is one block. Measured from 16 KB to 512 KB on 4 H200s:
/// with one piece per block (16 MB and 32 MB) larger is better; with many pieces 64 KB was as good as any.
const PIECE: usize = 64 << 10;
/// Fewest bytes of a piece. With smaller ones, kernels that read from peers are faster, and need no memory.
const LEAST: usize = 4 << 10;
/// Most bytes of a member's scratch.
const ROOM: usize = 64 << 20;

/// How slices are cut. All members cut alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cutting {
    pub blocks: usize,
    /// Bytes, of slots too: a multiple of [`GRAIN`].
    pub piece: usize,
    /// Pieces of a block's part of the largest slice.
    pub pieces: usize,
    /// Bytes of the scratch.
    pub room: usize,
}

/// How many blocks a kernel has for slices of up to so many bytes.
fn blocks(largest: usize, limits: &Limits) -> usize {
    largest.div_ceil(PIECE).clamp(1, limits.exchange_blocks as usize)
}

/// The ways to cut slices of up to so many bytes, not 0, for so many blocks of so many members, from the best to the
/// smallest pieces.
fn cuttings(largest: usize, blocks: usize, members: usize) -> impl Iterator<Item = Cutting> {
    let smaller = |&piece: &usize| (piece > LEAST).then_some(piece / 2);
    let cut = move |most: usize| {
        let pieces = largest.div_ceil(blocks * most);
        let piece = largest.div_ceil(blocks * pieces).next_multiple_of(GRAIN);
        Cutting { blocks, piece, pieces, room: pieces.min(EXCHANGE_SLOTS) * blocks * (members - 1) * piece }
    };
    std::iter::successors(Some(PIECE), smaller).map(cut).filter(|cut| cut.room <= ROOM)
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
