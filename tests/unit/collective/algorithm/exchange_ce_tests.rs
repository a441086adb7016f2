use super::*;

#[test]
fn pieces_are_whole_lines_and_cover_a_slice() {
    for members in 2..20 {
        for bytes in [0, 1, 127, 128, 1 << 19, (1 << 19) + 1, 5_000_000, 123_456_789, 1 << 30] {
            let cut = Cut::of(bytes, members, ROOM);
            let pieces = cut.pieces;
            let ranges: Vec<_> = (0..pieces.rounds).map(|j| pieces.range(j, bytes)).collect();
            assert!(ranges.windows(2).all(|two| two[0].end == two[1].start && two[0].len() == pieces.tile), "{cut:?}");
            assert_eq!(ranges.iter().map(std::ops::Range::len).sum::<usize>(), bytes);
            assert!(ranges.iter().all(|range| !range.is_empty()) && pieces.range(pieces.rounds, bytes).is_empty());
            assert!(pieces.tile.is_multiple_of(GRAIN) && cut.senders * pieces.tile <= ROOM, "{cut:?}");
            assert!(bytes == 0 || cut.slots() >= 1);
        }
    }
}

#[test]
fn the_number_of_pieces_is_bounded() {
    for members in [2, 3, 8, 64] {
        for bytes in [0, 1, 1 << 20, 1 << 30, 1 << 34, 1 << 41, 1 << 50, usize::MAX / 64] {
            for software in [true, false] {
                let cuts: Vec<_> = cuts_of(bytes, members, software).collect();
                assert!(!cuts.is_empty() && cuts[0].pieces.rounds <= 2 * MANY_PIECES.max(members), "{cuts:?}");
                assert!(cuts.iter().all(|cut| cut.pieces.rounds <= MOST_PIECES), "{cuts:?}");
            }
        }
    }
}

#[test]
fn rooms_are_each_senders_own() {
    for owner in 0..5 {
        let rooms: Vec<_> = (0..5).filter(|&sender| sender != owner).map(|sender| room(owner, sender)).collect();
        assert_eq!(rooms, [0, 1, 2, 3]);
    }
    let cut = Cut::of(100 << 20, 5, ROOM);
    let mut slots: Vec<_> = (0..cut.slots()).flat_map(|j| (0..4).map(move |room| cut.slot(j, room))).collect();
    slots.dedup();
    assert_eq!(slots.len(), 4 * cut.slots());
    assert_eq!(slots.last().unwrap() + cut.pieces.tile as u64, cut.scratch() as u64);
}
