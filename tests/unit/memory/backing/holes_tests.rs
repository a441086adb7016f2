use super::*;
use proptest::prelude::*;

fn hole(range: Range<Address>, before: u64, after: u64) -> Hole {
    Hole { range, before, after }
}

#[test]
fn least_is_mapped_and_then_lowest() {
    let holes = [hole(10..20, 0, 3), hole(40..60, 5, 2), hole(80..1000, 5, 0)];
    assert_eq!(to_fill(&holes, 4, 1), Some(40..40), "nothing is missing");
    assert_eq!(to_fill(&holes, 10, 1), Some(40..45), "five are missing in two places");
    assert_eq!(to_fill(&holes, 26, 1), Some(40..60), "less than the 21 that are missing at the end");
    assert_eq!(to_fill(&holes, 28, 1), Some(80..103));
    assert_eq!(to_fill(&holes[..2], 28, 1), None);
    assert_eq!(to_fill(&holes[..1], 12, 1), Some(11..20), "beside what is free after it");
    assert_eq!(to_fill(&holes, 7, 4), Some(16..20), "in whole grains");
}

#[test]
fn what_is_counted_on_does_not_move() {
    // Free: 35..40, which is a unit; 60..62; 70..80, a unit; 90..94, a unit.
    let holes = [hole(40..60, 5, 2), hole(94..100, 4, 0)];
    let from = [35..40, 70..80, 90..94];
    let [a, b, _] = &from;
    let moved = |at, unit: &Unit| Some((at, Vec::from_iter([unit.clone()])));
    assert_eq!(to_move(&holes, 9, &from), moved(94, a), "four would do, but units are whole");
    assert_eq!(to_move(&holes, 12, &from[1..]), moved(40, b));
    assert_eq!(to_move(&holes, 20, &from), None, "there is not that much to move");
    assert_eq!(to_move(&holes, 5, &from), None, "nothing is missing");
    // The whole hole, with the free memory on both sides.
    assert_eq!(to_move(&[hole(40..50, 5, 2)], 17, &from), moved(40, b));
    assert_eq!(to_move(&[hole(40..52, 5, 2)], 19, &from), None, "it would not be filled");
}

proptest! {
    /// Compared with a map of cells: the chosen range lies in a hole, is sufficient, and nothing smaller is.
    #[test]
    fn the_choice_is_the_best_there_is(cells in prop::collection::vec(0u8..3, 1..40), bytes in 1u64..30) {
        const HOLE: u8 = 0;
        const FREE: u8 = 1;
        let n = cells.len();
        let mut holes = Vec::new();
        let mut at = 0;
        while at < n {
            let end = (at..n).find(|&i| cells[i] != HOLE).unwrap_or(n);
            if end > at {
                let before = (0..at).rev().take_while(|&i| cells[i] == FREE).count() as u64;
                let after = (end..n).take_while(|&i| cells[i] == FREE).count() as u64;
                holes.push(hole(at as u64..end as u64, before, after));
            }
            at = end.max(at + 1);
        }
        let longest = |cells: &[u8]| cells.split(|&cell| cell != FREE).map(<[u8]>::len).max().unwrap_or(0) as u64;
        let filled = |place: &Range<u64>| {
            let mut cells = cells.clone();
            cells[place.start as usize..place.end as usize].fill(FREE);
            longest(&cells)
        };
        let in_hole = |range: &Range<u64>| {
            cells[range.start as usize..range.end as usize].iter().all(|&cell| cell == HOLE)
        };
        let at_hole = |range: &Range<u64>| {
            holes.iter().find(|h| h.range.start <= range.start && range.end <= h.range.end)
        };
        match to_fill(&holes, bytes, 1) {
            Some(place) => {
                prop_assert!(in_hole(&place));
                let beside = at_hole(&place).unwrap();
                prop_assert!(place.start == beside.range.start || place.end == beside.range.end);
                if place.is_empty() {
                    prop_assert!(longest(&cells) >= bytes);
                } else {
                    prop_assert!(filled(&place) >= bytes);
                    // Free cells away from all holes concern the heap only.
                    prop_assume!(longest(&cells) < bytes);
                    let len = place.end - place.start - 1;
                    let smaller = (0..n as u64).flat_map(|s| (s..=(s + len).min(n as u64)).map(move |e| s..e));
                    for other in smaller.filter(|o| o.end - o.start <= len) {
                        let possible = in_hole(&other) && at_hole(&other).is_some() && !other.is_empty();
                        prop_assert!(!possible || filled(&other) < bytes);
                    }
                }
            }
            None => prop_assert!(holes.iter().all(|hole| filled(&hole.range) < bytes || longest(&cells) >= bytes)),
        }
    }
}
