//! The exchange in one kernel on each member, which writes to all others: `kernels/exchange.cu` has the protocol.
//!
//! What others send goes to a member's [inbox](super::super::inbox), of which all know the smallest, and cut alike.

use super::{
    super::{
        Group, ReduceOp,
        board::Notice,
        direct,
        kernels::{self, EXCHANGE_SLOTS, Exchange, Meet, Pieces, Trade},
        plan::{Place, Shape},
        run::{GRAIN, Request, lent},
        tuner::Limits,
    },
    Slice,
};
use crate::error::Result;
use smallvec::SmallVec;
use std::sync::Arc;

/// Bytes of a piece, at most, and of a slice that a block is worth starting for. Of 16 KB to 512 KB, on 4 H200s: where a block has one
/// piece alone (16 MB and 32 MB) larger is better; where it has many, 64 KB was as good as any.
const PIECE: usize = 64 << 10;
/// The least that is worth it: with less, reading from peers is faster, and needs no memory.
const LEAST: usize = 4 << 10;
/// Bytes of an inbox, at most.
const ROOM: usize = 64 << 20;

/// What all members agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cutting {
    pub blocks: usize,
    /// Bytes, of slots too: a multiple of [`GRAIN`].
    pub piece: usize,
    /// Pieces of a block's part of the largest slice.
    pub pieces: usize,
    /// Bytes of an inbox.
    pub room: usize,
}

/// How many blocks a kernel has for slices of up to so many bytes.
pub(crate) fn blocks(largest: usize, limits: &Limits) -> usize {
    largest.div_ceil(PIECE).clamp(1, limits.exchange_blocks as usize)
}

/// The ways to cut slices of up to so many bytes, not 0, for so many blocks of so many members, from the best to the smallest pieces.
fn cuttings(largest: usize, blocks: usize, members: usize) -> impl Iterator<Item = Cutting> {
    let smaller = |&piece: &usize| (piece > LEAST).then_some(piece / 2);
    let cut = move |most: usize| {
        let pieces = largest.div_ceil(blocks * most);
        let piece = largest.div_ceil(blocks * pieces).next_multiple_of(GRAIN);
        Cutting { blocks, piece, pieces, room: pieces.min(EXCHANGE_SLOTS) * blocks * (members - 1) * piece }
    };
    std::iter::successors(Some(PIECE), smaller).map(cut).filter(|cut| cut.room <= ROOM)
}

/// Bytes of the largest slice.
pub(in super::super) fn largest(group: &Group<'_>, request: &Request, shape: &Shape) -> usize {
    shape.largest(group.count(), request.grain()) * request.dtype.size()
}

/// The sizes of inbox that sums may have, from the best down.
pub(in super::super) fn inboxes(
    group: &Group<'_>,
    request: &Request,
    shape: &Shape,
    limits: &Limits,
) -> impl Iterator<Item = usize> + use<> {
    let largest = largest(group, request, shape);
    cuttings(largest, blocks(largest, limits), group.count()).map(|cut| cut.room)
}

/// Submits this member's kernel, for slices that are not all empty and members that all have inboxes. The meeting on the host is over and committed: whatever comes
/// of this, the meeting of the kernels is counted.
pub(in super::super) fn launch(
    group: &Group<'_>,
    request: &Request,
    shape: &Shape,
    notices: &[Arc<Notice>],
    limits: &Limits,
    meet: Meet,
) -> Result<()> {
    let (n, me, size) = (group.count(), group.rank, request.dtype.size());
    let inbox = |member: usize| lent(&notices[member]).inbox.expect("every member has one");
    let room = (0..n).map(|member| inbox(member).1).min().expect("there are members");
    let largest = largest(group, request, shape);
    let fits = |cut: &Cutting| cut.room <= room;
    let cut = cuttings(largest, blocks(largest, limits), n).find(fits).expect("every member has room for one of them");
    let address = |place: &Place| lent(&notices[place.member]).area(place.side).address + (place.start * size) as u64;
    let mut exchange = Exchange::default();
    for owner in 0..n {
        let slice = Slice::of(shape, n, owner, size);
        exchange.from[owner] = address(&slice.sources[me]);
        exchange.bytes[owner] = slice.bytes as u64;
        exchange.inbox[owner] = inbox(owner).0;
        for to in slice.destinations.iter().filter(|_| owner == me) {
            exchange.to[to.member] = address(to);
        }
    }
    let pieces = Pieces {
        piece: cut.piece as u64,
        count: u32::try_from(cut.pieces).expect("they are counted in 32 bits; a terabyte has some millions"),
        returns: u32::from(!matches!(shape, Shape::ReduceScatter { .. })),
    };
    let factors: SmallVec<[f64; 8]> = match request.reduce {
        ReduceOp::Scaled(_) => notices.iter().map(|notice| lent(notice).factor).collect(),
        _ => SmallVec::new(),
    };
    let trade = Trade { op: request.reduce, factors: &factors, exchange, pieces, meet };
    let entry = kernels::exchange(request.dtype);
    direct::launch_meeting(group.dev, &meet, request.call.op(), entry, cut.blocks as u32, &trade.args())
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
