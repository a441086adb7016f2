use super::{
    super::{
        site::site,
        snapshot::{BlockInfo, ChunkInfo, tests as snapshots},
    },
    *,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

#[test]
fn a_short_life() {
    let snapshot = snapshots::example();
    let history = History::of(&snapshot);
    assert_eq!(history.end, 9, "eight events and the present");

    let chunks: Vec<_> = history.chunks.iter().map(|c| (c.address / MIB, c.bytes / MIB, c.during.clone())).collect();
    assert_eq!(chunks, [(64, 8, 0..9), (256, 32, 0..4)]);

    let shown = |b: &Block| (b.address / MIB, b.bytes / MIB, b.during.clone(), b.born, b.died, b.remote);
    let expected = [
        (64, 1, 0..9, None, None, false),
        (69, 2, 0..7, None, Some(1400), false),
        (256, 16, 1..3, Some(200), Some(1000), true),
        (65, 4, 2..9, Some(900), None, false),
    ];
    assert_eq!(history.blocks.iter().map(shown).collect::<Vec<_>>(), expected);
    assert_eq!(history.pending, [Chunk { address: 69 * MIB, bytes: 2 * MIB, during: 7..9 }]);
    assert_eq!(history.refusals, [6]);

    let [first, second, third] = &history.sites[..] else { panic!("{:?}", history.sites) };
    assert_eq!((first.site.unwrap().line, first.peak / MIB, first.live_bytes, first.remote_frees), (10, 18, 0, 1));
    assert_eq!((second.site.unwrap().line, second.peak / MIB, second.live_bytes / MIB), (20, 4, 4));
    assert_eq!((third.site, third.live_blocks, third.live_bytes / MIB, third.allocations), (None, 1, 1, 0));
    assert!(history.blocks.iter().all(|b| history.sites[b.site].peak >= b.bytes), "renumbered with the rows");

    let live = history.level(history.blocks.iter().map(|b| (&b.during, b.bytes / MIB)));
    assert_eq!(live, [3.0, 19.0, 23.0, 7.0, 7.0, 7.0, 7.0, 5.0, 5.0]);
    let reserved = history.level(history.chunks.iter().map(|c| (&c.during, c.bytes / MIB)));
    assert_eq!(reserved, [40.0, 40.0, 40.0, 40.0, 8.0, 8.0, 8.0, 8.0, 8.0]);
}

/// A pool maps in one size and may give back in another, and map again elsewhere.
#[test]
fn chunks_go_back_in_pieces() {
    let event =
        |kind, address, bytes| MemoryEvent { micros: 0, kind, address, bytes, requested: 0, stream: 0, site: None };
    let (mapped, unmapped) = (EventKind::Mapped, EventKind::Unmapped);
    let snapshot = MemorySnapshot {
        events: vec![
            event(mapped, 100, 40),
            event(mapped, 140, 20),
            event(unmapped, 110, 10),
            event(unmapped, 130, 30),
            event(mapped, 130, 10),
            event(unmapped, 500, 5),
        ],
        chunks: vec![ChunkInfo { address: 100, bytes: 10 }, ChunkInfo { address: 900, bytes: 1 }],
        ..Default::default()
    };
    let history = History::of(&snapshot);
    let chunks: Vec<_> = history.chunks.iter().map(|c| (c.address, c.bytes, c.during.clone())).collect();
    let expected = [
        (100, 10, 0..7),
        (110, 10, 0..2),
        (120, 10, 0..7),
        (130, 10, 0..3),
        (130, 10, 4..7),
        (140, 20, 1..3),
        (500, 5, 0..5),
        (900, 1, 0..7),
    ];
    assert_eq!(chunks, expected);
}

/// Without recording the present is all there is.
#[test]
fn the_present_alone() {
    let block = BlockInfo { address: 256, bytes: 256, state: BlockState::Live, ..Default::default() };
    let pending = BlockInfo { address: 512, bytes: 64, state: BlockState::Pending, ..Default::default() };
    let snapshot = MemorySnapshot { blocks: vec![block, pending], ..Default::default() };
    let history = History::of(&snapshot);
    assert_eq!((history.end, history.blocks.len(), history.blocks[0].during.clone()), (1, 1, 0..1));
    assert_eq!(history.pending, [Chunk { address: 512, bytes: 64, during: 0..1 }]);
}

/// An address that is handed out twice without a free in between: the free was missed, not the allocation.
#[test]
fn a_missed_free_ends_with_the_next_owner() {
    let event = |micros, address| MemoryEvent {
        micros,
        kind: EventKind::Allocated,
        address,
        bytes: 8,
        requested: 8,
        stream: 0,
        site: Some(site("zeros", 1)),
    };
    let snapshot = MemorySnapshot { events: vec![event(5, 0), event(6, 8), event(7, 0)], ..Default::default() };
    let history = History::of(&snapshot);
    let shown: Vec<_> = history.blocks.iter().map(|b| (b.address, b.during.clone(), b.died)).collect();
    assert_eq!(shown, [(0, 0..2, None), (8, 1..4, None), (0, 2..4, None)]);
    assert_eq!((history.sites[0].peak, history.sites[0].live_blocks), (16, 2));
}

proptest! {
    /// Rectangles of one kind never overlap, and the curves are their sums.
    #[test]
    fn nothing_is_in_two_places(snapshot in snapshots::any_snapshot()) {
        let history = History::of(&snapshot);
        for (i, a) in history.chunks.iter().enumerate() {
            prop_assert!(a.bytes > 0 && a.during.start < a.during.end && a.during.end <= history.end);
            // Events are consistent among themselves; the list of present chunks is taken at its word.
            for b in history.chunks[i + 1..].iter().filter(|_| snapshot.chunks.is_empty()) {
                let apart = a.address.saturating_add(a.bytes) <= b.address || b.address.saturating_add(b.bytes) <= a.address;
                let unseen = a.during.start == 0 || b.during.start == 0;
                prop_assert!(apart || unseen || a.during.end <= b.during.start || b.during.end <= a.during.start);
            }
        }
        for block in &history.blocks {
            prop_assert!(block.during.start <= block.during.end && block.during.end <= history.end);
            prop_assert!(block.site < history.sites.len());
        }
        let live = history.level(history.blocks.iter().map(|b| (&b.during, 1)));
        for (at, level) in live.iter().enumerate() {
            prop_assert_eq!(*level, history.blocks.iter().filter(|b| b.during.contains(&at)).count() as f64);
        }
    }
}
