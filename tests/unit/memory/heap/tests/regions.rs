//! Tests of memory that is mapped and unmapped.

use super::{G, MIB, check, free_spans, give, heap, take};
use crate::memory::heap::Heap;

const BASE: u64 = 1 << 40;

#[test]
fn memory_mapped_in_any_order_is_one_run() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut heap = heap(0);
        for i in order {
            heap.insert(7, BASE + i * 2 * MIB, 2 * MIB);
            check(&heap);
        }
        assert_eq!((free_spans(&heap), heap.runs.len()), (vec![(BASE, 6 * MIB)], 1));
    }
}

#[test]
fn memory_mapped_next_to_live_pieces_joins_the_free_ones_only() {
    let mut heap = heap(4 * MIB);
    let low = take(&mut heap, MIB);
    heap.insert(0, BASE - 2 * MIB, 2 * MIB);
    check(&heap);
    heap.insert(0, BASE + 4 * MIB, 2 * MIB);
    check(&heap);
    assert_eq!(free_spans(&heap), [(BASE - 2 * MIB, 2 * MIB), (BASE + MIB, 5 * MIB)]);
    give(&mut heap, low, 1);
    assert_eq!(free_spans(&heap), [(BASE - 2 * MIB, 8 * MIB)]);
}

/// Two allocations of the driver are not one, even if their addresses touch.
#[test]
fn regions_are_never_joined() {
    let mut heap = heap(2 * MIB);
    heap.insert(1, BASE + 2 * MIB, 2 * MIB);
    check(&heap);
    assert!(heap.allocate(3 << 20, 256, |_| true).is_none());
    let (a, b) = (take(&mut heap, 2 * MIB), take(&mut heap, 2 * MIB));
    assert_ne!(a.region, b.region);
    give(&mut heap, a, 1);
    give(&mut heap, b, 2);
    assert_eq!(free_spans(&heap), [(BASE, 2 * MIB), (BASE + 2 * MIB, 2 * MIB)]);
    assert_eq!((heap.free_before(0, BASE + 2 * MIB), heap.free_after(0, BASE + 2 * MIB)), (2 * MIB, 0));
    assert_eq!((heap.free_before(1, BASE + 2 * MIB), heap.free_after(1, BASE + 2 * MIB)), (0, 2 * MIB));
}

/// Every position of a hole in a free range, between live pieces or at the edges of mapped memory.
#[test]
fn what_is_left_and_right_of_what_is_removed_stays() {
    for live_before in [false, true] {
        for live_after in [false, true] {
            for (from, to) in [(0, 4), (0, 1), (1, 3), (3, 4)] {
                let mut heap = heap(6 * MIB);
                let before = take(&mut heap, MIB);
                let middle = take(&mut heap, 4 * MIB);
                let after = take(&mut heap, MIB);
                give(&mut heap, middle, 5);
                let mut left = vec![];
                for (piece, live) in [(before, live_before), (after, live_after)] {
                    if live {
                        left.push(piece);
                    } else {
                        // Removed, not only free, so that mapped memory ends right here.
                        let (address, bytes) = (piece.address, piece.bytes as u64);
                        give(&mut heap, piece, 9);
                        heap.remove(0, address, bytes);
                        check(&heap);
                    }
                }
                let start = BASE + MIB;
                let tags = heap.remove(0, start + from * MIB, (to - from) * MIB);
                check(&heap);
                assert_eq!(tags.0, [(0..((to - from) * MIB) as usize, 5)]);
                let spans = [(start, from * MIB), (start + to * MIB, (4 - to) * MIB)];
                assert_eq!(free_spans(&heap), spans.into_iter().filter(|span| span.1 > 0).collect::<Vec<_>>());
                assert_eq!(heap.free_before(0, start + from * MIB), from * MIB);
                assert_eq!(heap.free_after(0, start + to * MIB), (4 - to) * MIB);
                heap.insert(0, start + from * MIB, (to - from) * MIB);
                check(&heap);
                assert_eq!(free_spans(&heap), [(start, 4 * MIB)], "mapped again, it is as before");
                left.into_iter().for_each(|piece| give(&mut heap, piece, 0));
                assert_eq!(free_spans(&heap).len(), 1);
            }
        }
    }
}

#[test]
fn pieces_lie_low_so_that_high_memory_can_go() {
    let mut heap = heap(0);
    (0..8).for_each(|i| heap.insert(0, BASE + i * 64 * MIB, 64 * MIB));
    let pieces: Vec<_> = (0..20).map(|_| take(&mut heap, 3 * MIB)).collect();
    assert!(pieces.iter().all(|piece| piece.address < BASE + 64 * MIB));
    (1..8).rev().for_each(|i| {
        heap.remove(0, BASE + i * 64 * MIB, 64 * MIB);
        check(&heap);
    });
    pieces.into_iter().for_each(|piece| give(&mut heap, piece, 1));
    heap.remove(0, BASE, 64 * MIB);
    check(&heap);
    assert!(heap.walk().is_empty() && heap.runs.is_empty() && heap.free_bytes() == 0);
    assert!(heap.allocate(1, 1, |_| true).is_none());
}

/// Growth next to free memory needs only the missing bytes: PyTorch's expandable segments, here for any hole.
#[test]
fn free_memory_at_the_edges_of_a_hole() {
    let mut heap = heap(0);
    heap.insert(3, BASE, 4 * MIB);
    heap.insert(3, BASE + 8 * MIB, 4 * MIB);
    let (low, high) = (take(&mut heap, 4 * MIB), take(&mut heap, 3 * MIB));
    let hole = |heap: &Heap<_>| (heap.free_before(3, BASE + 4 * MIB), heap.free_after(3, BASE + 8 * MIB));
    let (first, second) = if low.address < high.address { (low, high) } else { (high, low) };
    let after_first = BASE + 4 * MIB - first.address - first.bytes as u64;
    assert_eq!(hole(&heap), (after_first, 0));
    give(&mut heap, first, 1);
    give(&mut heap, second, 1);
    assert_eq!(hole(&heap), (4 * MIB, 4 * MIB));
    assert_eq!((heap.free_before(3, BASE), heap.free_after(3, BASE + 4 * MIB), heap.free_before(2, BASE)), (0, 0, 0));
    heap.insert(3, BASE + 4 * MIB, 4 * MIB);
    check(&heap);
    assert_eq!(heap.largest_free(), 12 * MIB);
}

#[test]
#[should_panic(expected = "what is taken out of the heap is free")]
fn live_memory_is_not_removed() {
    let mut heap = heap(4 * MIB);
    let _live = take(&mut heap, 2 * MIB);
    heap.remove(0, BASE + MIB, 2 * MIB);
}

#[test]
#[should_panic(expected = "memory is mapped once")]
fn memory_is_not_inserted_twice() {
    let mut heap = heap(4 * MIB);
    heap.insert(0, BASE + 4 * MIB - G, 2 * G);
}
