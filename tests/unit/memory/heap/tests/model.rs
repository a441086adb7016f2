//! Whole histories, compared with a model that knows the state of every grain.
//!
//! `GPU_POOL_HEAP_STEPS=10000000 cargo test --release heap::tests::model` runs a longer fuzz than the usual one.

use super::{G, Tags, check};
use crate::memory::heap::{Heap, Taken};
use proptest::prelude::*;
use std::ops::Range;

const GRAINS: u64 = 2048;
const REGIONS: u32 = 2;
/// A region begins where the previous one ends, and none begins at a multiple of 2 MiB.
const BASE: u64 = (1 << 40) + G;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Cell {
    Unmapped,
    Live,
    /// Free; the tag of the piece that was freed, or 0 if unused since it was mapped.
    Free(u32),
}

#[derive(Clone, Debug)]
enum Step {
    /// Grains, logarithm of the alignment, and the refused tags: those whose first tag has this remainder modulo 3 (3:
    /// none).
    Allocate(u32, u32, u32),
    Free(usize),
    Insert(usize, u64),
    Remove(usize, u64),
}

struct World {
    heap: Heap<Tags>,
    cells: Vec<Vec<Cell>>,
    live: Vec<Taken<Tags>>,
    tag: u32,
}

impl World {
    /// Maps most of one region, and a little of the other.
    fn new() -> Self {
        let cells = vec![vec![Cell::Unmapped; GRAINS as usize]; REGIONS as usize];
        let mut world = World { heap: Heap::default(), cells, live: vec![], tag: 0 };
        world.map(0, 1500, true);
        world.map(GRAINS as usize + 100, 300, true);
        world
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Allocate(grains, log, refused) => self.allocate(grains, 1 << log, refused),
            Step::Free(pick) if !self.live.is_empty() => self.free(pick),
            Step::Free(_) => {}
            Step::Insert(pick, grains) => self.map(pick, grains, true),
            Step::Remove(pick, grains) => self.map(pick, grains, false),
        }
    }

    fn allocate(&mut self, grains: u32, align: u64, refused: u32) {
        let mut looks = 0;
        let accepts = |tags: &Tags| tags.0.first().is_none_or(|(_, tag)| tag % 3 != refused);
        let taken = self.heap.allocate(grains as usize * G as usize - 5, align as usize, |tags| {
            looks += 1;
            accepts(tags)
        });
        assert!(looks <= 16);
        let Some(taken) = taken else {
            return assert!(
                refused < 3 || !self.must_be_found(grains.into(), align),
                "{grains} grains, {align} aligned"
            );
        };
        assert_eq!((taken.bytes as u64, taken.address % align), (u64::from(grains) * G, 0));
        let cells = &mut self.cells[taken.region as usize][place(taken.region, taken.address, taken.bytes as u64)];
        assert_eq!(taken.payload, tags(cells), "the piece brings what is known of its bytes");
        cells.fill(Cell::Live);
        self.live.push(taken);
    }

    /// Whether the bounded search must succeed: some range is long enough for the next list, or there are few ranges.
    fn must_be_found(&self, grains: u64, align: u64) -> bool {
        let sure = grains + (align / G).saturating_sub(1);
        let step = if sure < 64 { 1 } else { 1 << (sure.ilog2() - 5) };
        let ranges = self.free_ranges();
        let fits = |(address, grains_free): &(u64, u64)| {
            address.next_multiple_of(align) + grains * G <= address + grains_free * G
        };
        ranges.iter().any(|(_, free)| *free >= sure.next_multiple_of(step))
            || ranges.len() <= 4 && ranges.iter().any(fits)
    }

    /// Address and grains of the model's free ranges.
    fn free_ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        for (region, cells) in (0u64..).zip(&self.cells) {
            let runs = cells.chunk_by(|a, b| matches!((a, b), (Cell::Free(_), Cell::Free(_))));
            let mut at = BASE + region * GRAINS * G;
            for run in runs {
                if matches!(run[0], Cell::Free(_)) {
                    ranges.push((at, run.len() as u64));
                }
                at += run.len() as u64 * G;
            }
        }
        ranges
    }

    fn free(&mut self, pick: usize) {
        let taken = self.live.swap_remove(pick % self.live.len());
        self.tag += 1;
        self.heap.free(taken.piece, Tags::of(taken.bytes, self.tag));
        let place = place(taken.region, taken.address, taken.bytes as u64);
        self.cells[taken.region as usize][place].fill(Cell::Free(self.tag));
    }

    /// Maps or unmaps as much as possible from a position on, up to `grains`.
    fn map(&mut self, pick: usize, grains: u64, map: bool) {
        let (region, start) = ((pick / GRAINS as usize) as u32 % REGIONS, pick % GRAINS as usize);
        let can = |cell: &Cell| if map { *cell == Cell::Unmapped } else { matches!(cell, Cell::Free(_)) };
        let cells = &mut self.cells[region as usize][start..];
        let count = cells.iter().take(grains as usize).take_while(|cell| can(cell)).count();
        let (address, bytes) = (BASE + (u64::from(region) * GRAINS + start as u64) * G, count as u64 * G);
        if count == 0 {
            return;
        }
        if map {
            self.heap.insert(region, address, bytes);
            cells[..count].fill(Cell::Free(0));
        } else {
            assert_eq!(self.heap.remove(region, address, bytes), tags(&cells[..count]));
            cells[..count].fill(Cell::Unmapped);
        }
    }

    /// Compares the whole state.
    fn compare(&self) {
        check(&self.heap);
        let mut seen = vec![vec![Cell::Unmapped; GRAINS as usize]; REGIONS as usize];
        for span in self.heap.walk().iter().filter(|span| span.piece.is_some()) {
            seen[span.region as usize][place(span.region, span.address, span.bytes)].fill(Cell::Live);
        }
        for range in self.heap.free_ranges() {
            let cells = &mut seen[range.region as usize][place(range.region, range.address, range.bytes)];
            cells.fill(Cell::Free(0));
            for (bytes, tag) in &range.payload.0 {
                cells[bytes.start / G as usize..bytes.end / G as usize].fill(Cell::Free(*tag));
            }
        }
        assert!(seen == self.cells, "mapped, free and live as in the model, with the same tags");
        for (region, cells) in (0..).zip(&self.cells) {
            for edge in
                (1..GRAINS as usize).filter(|i| (cells[*i - 1] == Cell::Unmapped) != (cells[*i] == Cell::Unmapped))
            {
                let free = |cell: &&Cell| matches!(cell, Cell::Free(_));
                let address = BASE + (u64::from(region) * GRAINS + edge as u64) * G;
                let before = cells[..edge].iter().rev().take_while(free).count() as u64;
                let after = cells[edge..].iter().take_while(free).count() as u64;
                assert_eq!(self.heap.free_before(region, address), before * G);
                assert_eq!(self.heap.free_after(region, address), after * G);
            }
        }
    }
}

fn place(region: u32, address: u64, bytes: u64) -> Range<usize> {
    let start = (address - BASE - u64::from(region) * GRAINS * G) / G;
    start as usize..(start + bytes / G) as usize
}

fn tags(cells: &[Cell]) -> Tags {
    let mut tags = Tags::default();
    for (i, cell) in cells.iter().enumerate() {
        match cell {
            Cell::Free(0) => {}
            Cell::Free(tag) => tags.push(i * G as usize..(i + 1) * G as usize, *tag),
            other => panic!("{other:?} memory was handed out"),
        }
    }
    tags
}

fn step() -> impl Strategy<Value = Step> {
    let grains = prop_oneof![8 => 1..40u32, 4 => 1..300u32, 1 => 1..2048u32];
    let align = prop_oneof![4 => Just(8u32), 1 => 8..=21u32];
    prop_oneof![
        10 => (grains, align, 0..5u32)
            .prop_map(|(grains, align, refused)| Step::Allocate(grains, align, refused.min(3))),
        9 => any::<usize>().prop_map(Step::Free),
        2 => (any::<usize>(), 1..800u64).prop_map(|(pick, grains)| Step::Insert(pick, grains)),
        1 => (any::<usize>(), 1..200u64).prop_map(|(pick, grains)| Step::Remove(pick, grains)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn short_histories(steps in proptest::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
            world.compare();
        }
    }
}

#[test]
fn a_long_history() {
    let steps = std::env::var("GPU_POOL_HEAP_STEPS").ok().and_then(|n| n.parse().ok());
    let steps: u64 = steps.unwrap_or(if cfg!(debug_assertions) { 100_000 } else { 1_000_000 });
    let mut world = World::new();
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut draw = |below: u64| {
        // xorshift64*
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % below
    };
    let mut most = 0;
    for i in 0..steps {
        // Fills up and drains in turn, so that both crowded and empty heaps occur.
        let filling = i % 4000 < 2500;
        let step = match draw(100) {
            0..2 => Step::Insert(draw(1 << 20) as usize, draw(600)),
            2..3 => Step::Remove(draw(1 << 20) as usize, draw(200)),
            n if (n < 65) == filling => {
                let grains = 1 + [draw(8), draw(60), draw(60), draw(400)][draw(4) as usize] as u32;
                let align = if draw(5) == 0 { 8 + draw(14) } else { 8 };
                Step::Allocate(grains, align as u32, draw(5).min(3) as u32)
            }
            _ => Step::Free(draw(1 << 30) as usize),
        };
        world.step(&step);
        most = most.max(world.live.len());
        if i % 500 == 0 {
            world.compare();
        }
    }
    world.compare();
    assert!(most > 50, "the history was about something: {most} pieces at most");
    while !world.live.is_empty() {
        world.free(0);
    }
    world.compare();
}
