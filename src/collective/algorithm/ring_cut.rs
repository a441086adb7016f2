//! How an all-reduce around a ring is cut: into chunks in either form, and a chunk into pieces for the kernels'.

use crate::fabric::{
    limits::Limits,
    plan::{GRAIN, slice},
};
use std::ops::Range;

/// Chunk `k` of `n`, in elements of so many bytes. It begins with a line, so that kernels may move 16 bytes at a time.
pub(crate) fn chunk(k: usize, n: usize, len: usize, size: usize) -> Range<usize> {
    slice(k, n, len, GRAIN / size)
}

/// Blocks and pieces begin with a line.
const LINE: usize = GRAIN;
/// Bytes of a chunk that a block is worth starting for: what its threads have under way at once.
const PER_BLOCK: usize = 32 << 10;
/// Bytes of a piece, at most. In the prototype finer ones only cost (`prototypes/README.md`); these make an inbox of 48
/// MiB.
const PIECE: usize = 256 << 10;
/// Pieces of a block that take a hop after one another, while the first is on its way: with 64 blocks, others' pieces
/// are that anyway.
const ABREAST: usize = 1;
/// Slots of a block: one more than the least, so that nobody waits at once for a neighbour that is a little late.
const SLOTS: usize = ABREAST + 2;

/// What all members agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cutting {
    pub blocks: usize,
    /// Bytes; of slots, too. A multiple of [`LINE`].
    pub piece: usize,
    pub rounds: usize,
    pub abreast: usize,
    pub slots: usize,
}

/// How many blocks a kernel has for chunks of up to so many bytes. All of them are at work at once, or those that are
/// would wait for peers' that are not.
pub(crate) fn blocks(chunk: usize, limits: &Limits) -> usize {
    chunk.div_ceil(PER_BLOCK).clamp(1, limits.ring_blocks as usize)
}

/// The inboxes that are worth having for chunks of up to so many bytes, in bytes, from the best down to the least that
/// will do.
pub(super) fn inboxes(chunk: usize, blocks: usize) -> impl Iterator<Item = usize> {
    let best = chunk.div_ceil(blocks * ABREAST).next_multiple_of(LINE).clamp(LINE, PIECE);
    let smaller = |&piece: &usize| (piece > LINE).then(|| (piece / 4).next_multiple_of(LINE));
    std::iter::successors(Some(best), smaller).map(move |piece| piece * SLOTS * blocks)
}

/// Cuts chunks of up to `chunk` bytes, not 0, for so many blocks, and inboxes of which the smallest has `room` bytes.
pub(crate) fn cutting(chunk: usize, blocks: usize, room: usize) -> Cutting {
    let most = room / (blocks * SLOTS) / LINE * LINE;
    assert!(most > 0, "an inbox has a line for every slot");
    let rounds = chunk.div_ceil(blocks * ABREAST * most.min(PIECE));
    let piece = chunk.div_ceil(blocks * ABREAST * rounds).next_multiple_of(LINE);
    Cutting { blocks, piece, rounds, abreast: ABREAST, slots: SLOTS }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
