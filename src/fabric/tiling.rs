//! Tilings: how a collective cuts a stretch of memory into tiles of one size, so that blocks of a kernel, copy engines
//! or host threads can work on several tiles at once.
//!
//! The algorithms call it with their own limits. It uses nothing else of the crate.
//!
//! Invariant: all members cut alike, since a tiling depends on its arguments alone. Every byte of a part lies in
//! exactly one tile, tiles follow each other in order, and each begins at a multiple of [`GRAIN`].

use std::ops::Range;

/// Slices and tiles begin at multiples of this many bytes: a cache line, so that no two devices or threads write to one
/// line.
pub const GRAIN: usize = 128;

/// Tiles in rounds: a round has one tile for each of `abreast` workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Bytes of a tile: whole grains, and not 0.
    pub tile: usize,
    /// Tiles of a round.
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

    /// Cuts parts of up to `len` bytes into as few rounds as tiles of at most `most` bytes allow, with tiles as even as
    /// they can be.
    pub(crate) fn even(len: usize, abreast: usize, most: usize) -> Tiling {
        Self::new(len, abreast, len.div_ceil(abreast * most).max(1), GRAIN, most)
    }

    /// Where a tile lies in a part of `len` bytes, which may be shorter than the longest. Tile `b` of round `j` is
    /// number `j * abreast + b`.
    pub(crate) fn range(&self, number: usize, len: usize) -> Range<usize> {
        (number * self.tile).min(len)..((number + 1) * self.tile).min(len)
    }
}

/// Bytes of the largest tile of which `tiles` fit into `room` bytes: whole grains.
pub(crate) fn share(room: usize, tiles: usize) -> usize {
    room / tiles / GRAIN * GRAIN
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lengths() -> impl Strategy<Value = usize> {
        prop_oneof![0usize..5000, 0usize..2_000_000, 1usize << 33..1 << 34]
    }

    /// Checks what every tiling of parts of up to `len` bytes promises.
    fn check(cut: Tiling, len: usize, most: usize) -> Result<(), TestCaseError> {
        let Tiling { tile, abreast, rounds } = cut;
        prop_assert!(tile.is_multiple_of(GRAIN) && tile > 0 && tile <= most, "{cut:?}");
        // The rounds cover everything, and no round is empty.
        prop_assert!(rounds * abreast * tile >= len, "{cut:?}");
        prop_assert!((len == 0 && rounds == 0) || (rounds - 1) * abreast * tile < len, "{cut:?}");
        // A shorter part has the same boundaries, as far as it goes: also an empty one.
        for part in [len, len / 2, len / 7 + 1, 1, 0].map(|part| part.min(len)) {
            let tiles = rounds * abreast;
            let first = [0, 1, tiles / 2, part / tile].map(|number| number.min(tiles));
            for number in first.into_iter().chain(tiles.saturating_sub(2)..=tiles) {
                let (this, next) = (cut.range(number, part), cut.range(number + 1, part));
                prop_assert!(this.start == number * tile || this.is_empty() && this.start == part, "{cut:?}");
                prop_assert!(this.end == next.start && this.len() <= tile, "{cut:?}");
                prop_assert!(this.len() == tile || this.end == part && next.is_empty(), "{cut:?}");
            }
            prop_assert_eq!(cut.range(0, part).start, 0);
            prop_assert!(cut.range(tiles, part).is_empty() && cut.range(tiles, part).start == part, "{cut:?}");
            if tiles < 5000 {
                prop_assert_eq!((0..tiles).map(|number| cut.range(number, part).len()).sum::<usize>(), part);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_tile(
            len in lengths(),
            abreast in 1usize..100,
            rounds in 1usize..9,
            least in 0usize..(1 << 20),
            most in 1usize..10_000,
        ) {
            let most = most * GRAIN;
            let cut = Tiling::new(len, abreast, rounds, least, most);
            check(cut, len, most)?;
            prop_assert!(cut.tile >= least.min(most), "{cut:?}");
            prop_assert!(cut.rounds <= rounds || cut.tile == most, "smaller tiles in more rounds: {cut:?}");
        }

        #[test]
        fn even_tiles_are_in_the_fewest_rounds(len in lengths(), abreast in 1usize..100, most in 1usize..10_000) {
            let most = most * GRAIN;
            let cut = Tiling::even(len, abreast, most);
            check(cut, len, most)?;
            prop_assert_eq!(cut.rounds, len.div_ceil(abreast * most));
            // No smaller tile would do with these rounds.
            prop_assert!(cut.rounds * abreast * (cut.tile - GRAIN) < len || len == 0, "{cut:?}");
        }

        #[test]
        fn shares_fit(room in 0usize..1 << 30, tiles in 1usize..1000) {
            let most = share(room, tiles);
            prop_assert!(most.is_multiple_of(GRAIN) && most * tiles <= room && (most + GRAIN) * tiles > room);
        }
    }
}
