//! How an all-reduce around a ring is cut: one chunk for each rank, and pieces of a chunk for the slots of the kernels'
//! scratch. Invariant: all members cut alike, since they know the smallest scratch of any member.

use crate::fabric::{GRAIN, Limits, Tiling, layout::RING_BLOCKS, plan::slice, tiling};
use std::ops::Range;

/// Chunk `k` of `n` of a buffer, in elements of `size` bytes. Each begins at a multiple of [`GRAIN`], so that kernels
/// may move 16 bytes at a time.
pub(crate) fn chunk(k: usize, n: usize, len: usize, size: usize) -> Range<usize> {
    slice(k, n, len, GRAIN / size)
}

/// Smallest sum. 32 MB on 4 H200s: 156 us, slices with barriers 173. Between two, every byte crosses the link once with
/// each algorithm. (A ring of copies was nowhere faster: 1 GB on 4 H200s in 5008 us, by kernels 4536.) A ring adds up
/// in another order, so no measured number may decide here: one call gives the same bits in every run.
pub(crate) fn least(members: usize) -> usize {
    if members > 2 { 32 << 20 } else { usize::MAX }
}

/// Bytes of a chunk for which another block is worth starting: as many as its threads move at once.
const PER_BLOCK: usize = 32 << 10;
/// Most bytes of a piece: finer ones only cost time. With these a member has at most 48 MiB of scratch.
const PIECE: usize = 256 << 10;
/// Pieces of a block that take a hop one after another: with 64 blocks, other blocks' are on their way meanwhile.
const ABREAST: usize = 1;
/// Slots of a block: one more than the least, so that a neighbour may be a little late.
const SLOTS: usize = ABREAST + 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cutting {
    pub blocks: usize,
    /// Bytes of a piece and of a slot: a multiple of [`GRAIN`].
    pub piece: usize,
    pub rounds: usize,
    pub abreast: usize,
    pub slots: usize,
}

pub(crate) fn blocks(chunk: usize, limits: &Limits) -> usize {
    chunk.div_ceil(PER_BLOCK).clamp(1, limits.blocks(RING_BLOCKS as u32) as usize)
}

pub(super) fn scratch_sizes(chunk: usize, blocks: usize) -> impl Iterator<Item = usize> {
    let best = Tiling::new(chunk, blocks * ABREAST, 1, GRAIN, PIECE).tile;
    let smaller = |&piece: &usize| (piece > GRAIN).then(|| (piece / 4).next_multiple_of(GRAIN));
    std::iter::successors(Some(best), smaller).map(move |piece| piece * SLOTS * blocks)
}

/// Cuts chunks of up to `chunk` bytes for `blocks` blocks. `room` is the smallest scratch of any member, in bytes.
pub(crate) fn cutting(chunk: usize, blocks: usize, room: usize) -> Cutting {
    let most = tiling::share(room, blocks * SLOTS);
    assert!(most > 0, "scratch has a grain for every slot");
    let Tiling { tile, rounds, .. } = Tiling::even(chunk, blocks * ABREAST, most.min(PIECE));
    Cutting { blocks, piece: tile, rounds, abreast: ABREAST, slots: SLOTS }
}

#[cfg(test)]
#[path = "../../../../tests/unit/collective/algorithm/ring/cut_tests.rs"]
mod tests;
