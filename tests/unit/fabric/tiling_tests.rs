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
