//! Tilings: how a collective cuts a stretch of memory into tiles of one size, for blocks of a kernel, copy engines or
//! host threads. Invariant: all members cut alike, since a tiling depends on its arguments alone. Every byte of a part
//! lies in exactly one tile, tiles follow each other in order, and each begins at a multiple of [`GRAIN`].

use std::ops::Range;

/// Slices and tiles begin at multiples of so many bytes: a cache line, so no two devices or threads write to one line.
pub const GRAIN: usize = 128;

/// Tiles in rounds: a round has one tile for each of `abreast` workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Bytes of a tile: whole grains, and not 0.
    pub tile: usize,
    pub abreast: usize,
    /// Rounds that the longest part takes; 0 if it is empty.
    pub rounds: usize,
}

impl Tiling {
    /// Cuts parts of up to `len` bytes into `rounds` rounds: more if a tile would have more than `most` bytes, fewer if
    /// it would have less than `least`. `most` is in whole grains, and comes before `least`.
    pub(crate) fn new(len: usize, abreast: usize, rounds: usize, least: usize, most: usize) -> Tiling {
        let least = least.next_multiple_of(GRAIN).min(most);
        let tile = len.div_ceil(abreast * rounds).next_multiple_of(GRAIN).clamp(least, most);
        Tiling { tile, abreast, rounds: len.div_ceil(abreast * tile) }
    }

    /// Cuts parts of up to `len` bytes into as few rounds as tiles of `most` bytes allow, with even tiles.
    pub(crate) fn even(len: usize, abreast: usize, most: usize) -> Tiling {
        Self::new(len, abreast, len.div_ceil(abreast * most).max(1), GRAIN, most)
    }

    /// Where a tile lies in a part of `len` bytes, maybe a short one. Tile `b` of round `j` is `j * abreast + b`.
    pub(crate) fn range(&self, number: usize, len: usize) -> Range<usize> {
        (number * self.tile).min(len)..((number + 1) * self.tile).min(len)
    }
}

/// Bytes of the largest tile of which `tiles` fit into `room` bytes: whole grains.
pub(crate) fn share(room: usize, tiles: usize) -> usize {
    room / tiles / GRAIN * GRAIN
}

#[cfg(test)]
#[path = "../../tests/unit/fabric/tiling_tests.rs"]
mod tests;
