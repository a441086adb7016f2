//! Tests of the heap: chunks, blocks, and the freed ones that it remembers.

use super::*;

#[test]
fn a_chunk_is_a_buffer_until_it_is_cut() {
    let mut heap = Heap::default();
    heap.add(1000..2000, Source::Device(0));
    assert!(matches!(heap.find(&(1000..2000)), Found::Live(_)) && matches!(heap.find(&(1999..2001)), Found::Stray(_)));
    assert_eq!(heap.unwritten(&(1000..1100)), Some(1000..1100));
    heap.hand_out(1000..1100, Some(0), true);
    heap.hand_out(1100..1200, Some(0), false);
    assert!(matches!(heap.find(&(1050..1100)), Found::Live(_)) && matches!(heap.find(&(1050..1101)), Found::Stray(_)));
    assert!(matches!(heap.find(&(1500..1501)), Found::Stray(_)));
    assert_eq!((heap.unwritten(&(1000..1100)), heap.unwritten(&(1150..1200))), (None, Some(1150..1200)));
    heap.take_back(1000);
    heap.take_back(1100);
    assert!(matches!(heap.find(&(1000..1001)), Found::Freed(_)));
    heap.hand_out(1000..1200, Some(0), false);
    assert!(matches!(heap.find(&(1000..1200)), Found::Live(_)));
    assert!(heap.chunk(1000, Source::Pinned).is_none() && heap.chunk(1000, Source::Device(0)) == Some(1000..2000));
    let chunk = heap.remove(1000).unwrap();
    assert!(matches!(heap.find(&(1000..1200)), Found::Freed(_)) && heap.freed_before(1000).is_some());
    heap.restore(chunk);
    assert!(matches!(heap.find(&(1000..1200)), Found::Live(_)) && heap.freed_before(1000).is_none());
    assert!(matches!(heap.find(&(5..6)), Found::Unknown));
}

// Tensors of DLPack come back at their own addresses on GPUs.
#[test]
fn a_part_of_a_live_block_may_be_handed_out_again() {
    let mut heap = Heap::default();
    heap.add(1000..2000, Source::Device(0));
    heap.hand_out(1000..1100, Some(0), true);
    for guest in [1000..1100, 1000..1100, 1040..1060] {
        heap.hand_out(guest, Some(0), true);
    }
    let whole = |heap: &Heap| kind(heap.find(&(1000..1100)));
    for guest in [1040, 1000, 1000] {
        heap.take_back(guest);
        assert_eq!(whole(&heap), "live");
    }
    heap.take_back(1000);
    assert_eq!(whole(&heap), "freed");
    heap.hand_out(1040..1060, Some(0), true);
    assert_eq!([whole(&heap), kind(heap.find(&(1040..1060)))], ["stray", "live"]);
}

fn kind(found: Found) -> &'static str {
    match found {
        Found::Live(_) => "live",
        Found::Freed(_) => "freed",
        Found::Stray(_) => "stray",
        Found::Unknown => "unknown",
    }
}

#[test]
fn a_block_may_lie_in_chunks_side_by_side() {
    let mut heap = Heap::default();
    for start in [0, 100, 200, 400] {
        heap.add(start..start + 100, Source::Mapped(0));
    }
    let at = |heap: &Heap, range| kind(heap.find(&range));
    assert_eq!([at(&heap, 50..150), at(&heap, 0..300), at(&heap, 250..401)], ["live", "live", "stray"]);
    heap.write(50..150);
    assert_eq!(heap.unwritten(&(60..290)), Some(150..200));
    assert_eq!(heap.unwritten(&(60..140)), None);
    heap.hand_out(50..250, Some(0), false);
    assert_eq!(
        [at(&heap, 50..250), at(&heap, 120..201), at(&heap, 50..251), at(&heap, 0..1)],
        ["live", "live", "stray", "stray"]
    );
    assert_eq!(at(&heap, 400..500), "live", "a chunk by itself");
    heap.write(60..240);
    assert_eq!((heap.unwritten(&(60..240)), heap.unwritten(&(90..250))), (None, Some(240..250)));
    heap.hand_out(250..300, Some(0), true);
    heap.take_back(50);
    assert_eq!(
        [at(&heap, 60..70), at(&heap, 150..160), at(&heap, 210..220), at(&heap, 250..300)],
        ["freed", "freed", "freed", "live"]
    );
    // Parts are handed out again: only blocks that overlap them are forgotten.
    heap.hand_out(0..50, Some(0), true);
    assert_eq!(at(&heap, 60..70), "freed");
    heap.hand_out(90..110, Some(0), true);
    assert_eq!(
        [at(&heap, 90..110), at(&heap, 60..70), at(&heap, 0..50), at(&heap, 250..300)],
        ["live", "stray", "live", "live"]
    );
}

#[test]
fn a_chunk_goes_from_under_a_block_at_rest() {
    let mut heap = Heap::default();
    for start in [0, 100, 200] {
        heap.add(start..start + 100, Source::Mapped(0));
    }
    let at = |heap: &Heap, range| kind(heap.find(&range));
    heap.hand_out(50..250, Some(0), true);
    heap.hand_out(250..300, Some(0), true);
    heap.take_back(50);
    let gone = heap.remove(100).unwrap();
    assert_eq!([at(&heap, 60..70), at(&heap, 110..120), at(&heap, 210..220)], ["freed"; 3]);
    assert_eq!(at(&heap, 250..300), "live", "a neighbour's end harms nothing");
    heap.restore(gone);
    assert_eq!([at(&heap, 60..70), at(&heap, 110..120), at(&heap, 210..220)], ["freed"; 3]);
    heap.remove(100).unwrap();
    heap.add(100..200, Source::Mapped(0));
    assert_eq!([at(&heap, 100..200), at(&heap, 250..300)], ["live"; 2]);
    assert_eq!([at(&heap, 60..70), at(&heap, 210..220)], ["stray"; 2], "nobody's, as far as is still known");
    heap.hand_out(100..200, Some(0), true);
    let gone = heap.remove(100).unwrap();
    assert_eq!(at(&heap, 100..200), "freed");
    heap.restore(gone);
    assert_eq!(at(&heap, 100..200), "live");
}

#[test]
fn unseen_memory_may_end_in_a_chunk() {
    let mut heap = Heap::default();
    heap.add(100..200, Source::Pinned);
    heap.hand_out(50..150, None, true);
    assert_eq!(kind(heap.find(&(50..150))), "live");
    assert_eq!(kind(heap.find(&(150..160))), "stray");
    heap.take_back(50);
    assert_eq!((kind(heap.find(&(99..101))), heap.chunk(50, Source::Pinned)), ("freed", None));
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut heap = Heap::default();
    for i in 0..REMEMBERED as u64 + 100 {
        heap.add(i * 512..i * 512 + 256, Source::Pinned);
        heap.remove(i * 512);
    }
    assert_eq!((heap.freed.len(), heap.order.len()), (REMEMBERED, REMEMBERED));
    assert!(heap.freed_before(0).is_none() && heap.freed_before(100 * 512).is_some());
}
