//! The heap's promises, one by one. [`model`] compares whole histories with a model.

mod model;
mod regions;

use super::{Heap, Payload, Span, Taken, bins, nodes::NONE};
use std::{collections::BTreeSet, ops::Range};

const G: u64 = Heap::<Tags>::GRAIN as u64;
const MIB: u64 = 1 << 20;

impl<P: Payload> Heap<P> {
    /// Allocates from a free range whose payload `accept` accepts.
    fn allocate(&mut self, bytes: usize, align: usize, mut accept: impl FnMut(&P) -> bool) -> Option<Taken<P>> {
        self.allocate_in(bytes, align, |payload, room, _| accept(payload).then_some(room.start))
    }

    /// Free bytes that end at `address`, if mapped memory of the region ends there.
    fn free_before(&self, region: u32, address: u64) -> u64 {
        self.free_around(region, address, |_| true).0
    }

    /// Free bytes that begin at `address`, if mapped memory of the region begins there.
    fn free_after(&self, region: u32, address: u64) -> u64 {
        self.free_around(region, address, |_| true).1
    }

    fn live_pieces(&self) -> usize {
        self.live
    }
}

/// A payload that records which bytes were freed with which tag.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tags(Vec<(Range<usize>, u32)>);

impl Tags {
    fn of(bytes: usize, tag: u32) -> Self {
        let mut tags = Tags::default();
        tags.push(0..bytes, tag);
        tags
    }

    fn push(&mut self, bytes: Range<usize>, tag: u32) {
        match self.0.last_mut() {
            Some((last, same)) if last.end == bytes.start && *same == tag => last.end = bytes.end,
            _ => self.0.push((bytes, tag)),
        }
    }
}

impl Payload for Tags {
    fn split_off(&mut self, at: usize) -> Self {
        let mut later = Tags::default();
        for (bytes, tag) in std::mem::take(&mut self.0) {
            if bytes.start < at {
                self.push(bytes.start..bytes.end.min(at), tag);
            }
            if bytes.end > at {
                later.push(bytes.start.max(at) - at..bytes.end - at, tag);
            }
        }
        later
    }

    fn join(&mut self, at: usize, later: Self) {
        assert!(self.0.last().is_none_or(|(bytes, _)| bytes.end <= at), "what is later lies after all of it");
        later.0.into_iter().for_each(|(bytes, tag)| self.push(bytes.start + at..bytes.end + at, tag));
    }
}

/// Checks what must hold of any heap at any time.
fn check(heap: &Heap<Tags>) {
    let mut free = BTreeSet::new();
    let (mut free_bytes, mut largest, mut live, mut known) = (0, 0, 0, 0);
    let mut end_before = None;
    for (&(region, start), run) in &heap.runs {
        assert!(end_before.is_none_or(|end| end < (region, start)), "runs that touch are one");
        let (mut at, mut was_free) = (start, false);
        for (id, node) in heap.nodes_of(run) {
            assert_eq!((node.region, node.address), (region, at), "the spans cover the run without overlap");
            assert!(node.grains > 0 && !(was_free && node.is_free()), "free neighbours are one");
            assert!(heap.nodes[node.before].after == id && heap.nodes[node.after].before == id);
            (at, was_free) = (at + node.bytes(), node.is_free());
            known += 1;
            let payload = &heap.payloads[id as usize];
            if was_free {
                assert!(payload.0.iter().all(|(bytes, _)| bytes.end as u64 <= node.bytes()));
                free.insert(id);
                free_bytes += node.bytes();
                largest = largest.max(node.bytes());
            } else {
                assert_eq!(*payload, Tags::default(), "what is live is in its owner's hands");
                live += 1;
            }
        }
        known += 2;
        end_before = Some((region, at));
    }
    assert_eq!((heap.free_bytes(), heap.largest_free(), heap.live_pieces()), (free_bytes, largest, live));
    assert_eq!(known, heap.nodes.iter().filter(|node| node.is_free() || node.is_live() || node.is_edge()).count());
    let mut listed = BTreeSet::new();
    let mut list = heap.bins.next(0);
    let with_head: Vec<usize> = (0..bins::LISTS).filter(|list| heap.bins.head(*list) != NONE).collect();
    let mut with_bit = Vec::new();
    while let Some(at) = list {
        with_bit.push(at);
        let mut before = NONE;
        for id in heap.list(at) {
            assert_eq!((bins::floor(heap.nodes[id].grains), heap.nodes[id].list_before), (at, before));
            assert!(listed.insert(id), "a range is in one list");
            before = id;
        }
        list = heap.bins.next(at + 1);
    }
    assert_eq!(with_bit, with_head, "the bits say which lists are empty");
    assert_eq!(listed, free, "what is free is listed");
}

fn heap(bytes: u64) -> Heap<Tags> {
    let mut heap = Heap::default();
    heap.insert(0, 1 << 40, bytes);
    heap
}

fn take(heap: &mut Heap<Tags>, bytes: u64) -> Taken<Tags> {
    let taken = heap.allocate(bytes as usize, 256, |_| true).expect("there is room");
    check(heap);
    taken
}

fn give(heap: &mut Heap<Tags>, taken: Taken<Tags>, tag: u32) {
    heap.free(taken.piece, Tags::of(taken.bytes, tag));
    check(heap);
}

fn free_spans(heap: &Heap<Tags>) -> Vec<(u64, u64)> {
    heap.walk().iter().filter(|span| span.piece.is_none()).map(|span| (span.address, span.bytes)).collect()
}

#[test]
fn lists_are_within_three_percent() {
    for grains in
        (1..5000u32).chain((12..32).flat_map(|log| [(1u32 << log) - 1, 1 << log, (1 << log) + 1, 3 << (log - 1)]))
    {
        let (own, sure) = (bins::floor(grains), bins::ceil(grains.into()));
        assert!(bins::floor(grains - 1) <= own && own <= sure && sure <= own + 1);
        assert!(sure == own || grains > 64, "small sizes have lists of their own");
        let more = grains.saturating_add(grains / 32 + 1);
        assert!(bins::floor(more) >= sure, "{grains}: what is 1/32 longer is certainly found");
    }
    assert!(bins::floor(u32::MAX) < bins::LISTS && bins::ceil(u64::from(u32::MAX)) == bins::LISTS);
}

/// TensorFlow's ExerciseCoalescing (gpu_bfc_allocator_test.cc): after frees in any order all memory is one range again.
#[test]
fn exercise_coalescing() {
    let mut heap = heap(64 * MIB);
    let first = take(&mut heap, 4096);
    let address = first.address;
    give(&mut heap, first, 0);
    for round in 0..1024u64 {
        let sizes = [4 * round, 4 * 1_048_576, 1024, 4 * 2_097_152, 4 * 1_048_576];
        let mut taken: Vec<_> = sizes.map(|bytes| heap.allocate(bytes as usize, 256, |_| true).unwrap()).into();
        assert_eq!(taken[0].address, address);
        while !taken.is_empty() {
            let one = taken.swap_remove(round as usize * 7 % taken.len());
            heap.free(one.piece, Tags::default());
        }
        assert_eq!(free_spans(&heap), [(1 << 40, 64 * MIB)]);
    }
    check(&heap);
    assert!(heap.nodes.iter().count() < 16, "nodes are used again");
}

/// RMM's superblock tests (arena): merge with the next, the previous, both, none.
#[test]
fn a_freed_piece_joins_its_free_neighbours() {
    for freed_first in [vec![], vec![0], vec![2], vec![0, 2], vec![2, 0]] {
        let mut heap = heap(4 * MIB);
        let mut pieces: Vec<_> = (0..4).map(|_| Some(take(&mut heap, MIB))).collect();
        for &i in &freed_first {
            give(&mut heap, pieces[i].take().unwrap(), i as u32);
        }
        give(&mut heap, pieces[1].take().unwrap(), 1);
        let from = if freed_first.contains(&0) { 0 } else { 1 };
        let to = if freed_first.contains(&2) { 3 } else { 2 };
        assert_eq!(free_spans(&heap), [((1 << 40) + from * MIB, (to - from) * MIB)]);
        let tags = heap.free_ranges().next().unwrap().payload.clone();
        let bytes = |i: u64| (i as usize) << 20..(i as usize + 1) << 20;
        assert_eq!(tags.0, (from..to).map(|i| (bytes(i - from), i as u32)).collect::<Vec<_>>());
    }
}

#[test]
fn a_piece_brings_what_is_known_of_its_own_bytes() {
    let mut heap = heap(3 * MIB);
    let (a, b, c) = (take(&mut heap, MIB), take(&mut heap, MIB), take(&mut heap, MIB));
    give(&mut heap, a, 1);
    give(&mut heap, c, 3);
    give(&mut heap, b, 2);
    let first = take(&mut heap, MIB + G);
    assert_eq!(first.payload.0, [(0..1 << 20, 1), (1 << 20..(1 << 20) + 4096, 2)]);
    let rest = take(&mut heap, 2 * MIB - G);
    assert_eq!(rest.payload.0, [(0..(1 << 20) - 4096, 2), ((1 << 20) - 4096..(2 << 20) - 4096, 3)]);
    heap.free(rest.piece, rest.payload);
    heap.free_payloads_mut().for_each(|tags| tags.0.retain(|(_, tag)| *tag != 2));
    let rest = take(&mut heap, 2 * MIB - G);
    assert_eq!(rest.payload.0, [((1 << 20) - 4096..(2 << 20) - 4096, 3)], "what its owner forgot stays forgotten");
}

/// XLA #40979: a requested alignment is kept. The memory in front of the piece stays free.
#[test]
fn alignment_from_256_bytes_to_2_mib() {
    for log in 8..=21 {
        let mut heap = heap(16 * MIB);
        let odd = take(&mut heap, G);
        let align = 1u64 << log;
        let taken = heap.allocate(3 << 20, align as usize, |_| true).unwrap();
        check(&heap);
        assert!(taken.address.is_multiple_of(align));
        assert_eq!(taken.address, (odd.address + G).next_multiple_of(align), "as low as it may be");
        assert_eq!(heap.free_bytes(), 13 * MIB - G);
        give(&mut heap, taken, 1);
        give(&mut heap, odd, 2);
        assert_eq!(free_spans(&heap).len(), 1);
    }
}

#[test]
fn an_aligned_piece_is_found_behind_ranges_that_only_look_long_enough() {
    let mut heap = Heap::<Tags>::default();
    // 40 ranges of 2 MiB that begin 4 KiB after a boundary, and one in which 2 MiB fit.
    for i in 1..=40 {
        heap.insert(i, (u64::from(i) << 30) + G, 2 * MIB);
    }
    heap.insert(41, (41 << 30) + G, 4 * MIB);
    let taken = heap.allocate(2 << 20, 2 << 20, |_| true).unwrap();
    assert_eq!((taken.region, taken.address), (41, (41 << 30) + 2 * MIB));
    check(&heap);
}

#[test]
fn sizes_that_cannot_be_had_change_nothing() {
    let mut heap = heap(4 * MIB);
    let zero = take(&mut heap, 0);
    assert_eq!(zero.bytes as u64, G);
    let before: Vec<Span> = heap.walk();
    for bytes in [4 << 20, (4 << 20) + 1, 1 << 50, usize::MAX] {
        assert!(heap.allocate(bytes, 2 << 20, |_| true).is_none());
        assert!(heap.allocate(bytes, 256, |_| true).is_none());
    }
    assert!(heap.allocate(1, 1, |_| false).is_none());
    assert_eq!(heap.walk(), before);
    check(&heap);
    assert!(heap.allocate((4 << 20) - 4096, 256, |_| true).is_some(), "all that is left can be had");
    check(&heap);
    assert_eq!((heap.free_bytes(), heap.largest_free()), (0, 0));
}

/// RMM's pool looks through a list of all its blocks (rmm#543: 10.9 us an operation at 10,000).
#[test]
fn a_search_that_is_refused_is_bounded() {
    let mut heap = heap(0);
    for i in 0..5000 {
        heap.insert(0, (1 << 40) + i * 4 * MIB, MIB + (i % 300) * G);
    }
    let before = heap.walk();
    let mut looks = 0;
    let refuse = |_: &Tags| {
        looks += 1;
        false
    };
    assert!(heap.allocate(1 << 20, 256, refuse).is_none());
    assert!((8..=16).contains(&looks), "{looks}");
    assert_eq!(heap.walk(), before);
    check(&heap);
}

#[test]
fn what_is_accepted_is_found_next_to_what_is_refused() {
    let mut heap = heap(8 * MIB);
    let mut pieces: Vec<_> = (0..8).map(|_| Some(take(&mut heap, MIB))).collect();
    for i in [1, 3, 5] {
        give(&mut heap, pieces[i].take().unwrap(), i as u32);
    }
    for wanted in [3, 1, 5] {
        let taken = heap.allocate(1 << 20, 256, |tags| tags.0[0].1 == wanted).unwrap();
        assert_eq!(taken.payload, Tags::of(1 << 20, wanted));
    }
    check(&heap);
}

#[test]
fn of_nearby_sizes_the_one_that_fits_best_is_taken() {
    let mut heap = heap(0);
    let sizes = [64, 2, 16, 4, 8].map(|mib| mib * MIB);
    for (i, bytes) in sizes.into_iter().enumerate() {
        heap.insert(i as u32, 1 << 40, bytes);
    }
    for (want, from) in [(7, 8), (3, 4), (2, 2), (9, 16), (17, 64)] {
        let taken = take(&mut heap, want * MIB);
        assert_eq!(sizes[taken.region as usize], from * MIB);
    }
}

#[test]
#[should_panic(expected = "a piece is freed once")]
fn a_piece_that_is_freed_twice_is_noticed() {
    let mut heap = heap(MIB);
    let taken = take(&mut heap, MIB);
    heap.free(taken.piece, Tags::default());
    heap.free(taken.piece, Tags::default());
}

/// cub#329: a stale handle must not free memory that has another owner by now.
#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "a piece is freed once")]
fn a_stale_piece_does_not_free_its_successor() {
    let mut heap = heap(MIB);
    let stale = take(&mut heap, MIB);
    heap.free(stale.piece, Tags::default());
    let _successor = take(&mut heap, MIB);
    heap.free(stale.piece, Tags::default());
}
