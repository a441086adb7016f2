use super::*;
use crate::memory::insight::snapshot::BlockInfo;
use proptest::prelude::*;
use std::{collections::BTreeMap, panic::Location};

fn here(op: &'static str) -> Option<OpSite> {
    Some(OpSite { op, site: Location::caller() })
}

/// The snapshot that the cache would make of the ledger's live blocks.
fn snapshot(ledger: &Ledger) -> MemorySnapshot {
    let blocks = ledger.live.iter().map(|(&address, live)| BlockInfo {
        address,
        bytes: live.bytes,
        state: BlockState::Live,
        ..BlockInfo::default()
    });
    let mut snapshot = MemorySnapshot { blocks: blocks.collect(), ..MemorySnapshot::default() };
    snapshot.blocks.sort_by_key(|block| block.address);
    ledger.complete(&mut snapshot);
    snapshot
}

fn live_bytes(ledger: &Ledger) -> u64 {
    ledger.live.values().map(|live| live.bytes).sum()
}

#[test]
fn a_free_names_who_had_asked() {
    let mut ledger = Ledger::new(3, 10);
    ledger.mapped(0x1000, 4096);
    ledger.allocated(0x1000, 100, 256, 7, here("zeros"));
    ledger.allocated(0x1100, 300, 512, 8, here("upload"));
    ledger.freed(0x1000, true);
    ledger.out_of_memory(1 << 40, here("upload"));
    ledger.unmapped(0x1000, 4096);
    ledger.trimmed(4096);

    let shown = snapshot(&ledger);
    use EventKind::*;
    let kinds: Vec<_> = shown.events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [Mapped, Allocated, Allocated, FreedRemotely, OutOfMemory, Unmapped, Trimmed]);
    let free = &shown.events[3];
    assert_eq!((free.address, free.bytes, free.requested, free.stream), (0x1000, 256, 100, 7));
    assert_eq!(free.site, shown.events[1].site);
    assert_eq!(free.site.as_ref().unwrap().op, "zeros");
    assert!(shown.events.windows(2).all(|pair| pair[0].micros <= pair[1].micros));

    let [left] = &shown.blocks[..] else { panic!("{:?}", shown.blocks) };
    assert_eq!((left.address, left.requested, left.stream), (0x1100, 300, Some(8)));
    let [leak] = &ledger.leaks()[..] else { panic!() };
    assert_eq!((leak.device, leak.blocks, leak.bytes), (3, 1, 512));
    assert_eq!(leak.site, left.site);
}

/// A ring that grew with the run would itself be the leak (burn#4792 is about memory that grows from epoch to epoch).
#[test]
fn the_past_is_bounded_and_the_present_is_not() {
    let mut ledger = Ledger::new(0, 16);
    for i in 0..100 {
        ledger.allocated(i * 256, 1, 256, 0, None);
    }
    for i in 0..10 {
        ledger.freed(i * 256, false);
    }
    let shown = snapshot(&ledger);
    assert_eq!((shown.events.len(), shown.dropped_events), (16, 94));
    assert_eq!((shown.blocks.len(), live_bytes(&ledger)), (90, 90 * 256));
    // The latest events are kept.
    assert_eq!(shown.events[15].address, 9 * 256);
    assert_eq!(shown.events[5].address, 99 * 256);
}

#[test]
fn without_room_events_are_only_counted() {
    let mut ledger = Ledger::new(0, 0);
    ledger.allocated(0, 1, 256, 0, None);
    ledger.freed(0, false);
    let shown = snapshot(&ledger);
    assert_eq!((shown.events.len(), shown.dropped_events, live_bytes(&ledger)), (0, 2, 0));
}

/// Recording may begin late: a free of an unknown block is no event.
#[test]
fn blocks_from_before_are_ignored() {
    let mut ledger = Ledger::new(0, 16);
    ledger.freed(0x5000, true);
    assert_eq!((live_bytes(&ledger), snapshot(&ledger).events.len()), (0, 0));
}

proptest! {
    #[test]
    fn the_live_set_is_that_of_a_model(
        steps in prop::collection::vec((0u64..24, 1usize..5000, any::<bool>(), 0usize..3), 0..400),
        capacity in 0usize..64,
    ) {
        let places = [here("zeros"), here("upload"), None];
        let mut ledger = Ledger::new(0, capacity);
        let mut model = BTreeMap::new();
        let mut noted = 0;
        for (slot, requested, remote, who) in steps {
            let at = slot * 8192;
            noted += 1;
            if model.remove(&at).is_some() {
                ledger.freed(at, remote);
            } else {
                let bytes = requested.next_multiple_of(256);
                ledger.allocated(at, requested, bytes, slot % 3, places[who]);
                model.insert(at, (requested as u64, bytes as u64, slot % 3, places[who].map(CallSite::from)));
            }
        }
        let shown = snapshot(&ledger);
        let live: BTreeMap<_, _> = shown
            .blocks
            .iter()
            .map(|b| (b.address, (b.requested, b.bytes, b.stream.unwrap(), b.site.clone())))
            .collect();
        prop_assert_eq!(&live, &model);
        prop_assert_eq!(live_bytes(&ledger), model.values().map(|live| live.1).sum::<u64>());
        let held = ledger.holders();
        prop_assert_eq!(held.iter().map(|h| h.bytes).sum::<u64>(), live_bytes(&ledger));
        prop_assert_eq!(held.iter().map(|h| h.blocks).sum::<usize>(), model.len());
        prop_assert_eq!(shown.events.len() as u64 + shown.dropped_events, noted);
        prop_assert!(shown.events.len() <= capacity);
    }
}
