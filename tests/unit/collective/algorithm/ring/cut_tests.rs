//! The protocol of `kernels/ring.cu` on a model: who sends which range at which hop into which slot, and what it waits
//! for before. Blocks take their turns in random order; a slot that is filled while it is full, or emptied while it is
//! empty, is a failure, and so is an order in which nobody can go on.

use super::{Cutting, blocks, chunk, cutting, scratch_sizes};
use crate::fabric::limits::Limits;
use proptest::prelude::*;
use std::ops::Range;

const LINE: usize = 128;
const SIZE: usize = 4;

/// A sum of `len` elements of [`SIZE`] bytes.
#[derive(Clone, Copy, Debug)]
struct Model {
    n: usize,
    len: usize,
    cut: Cutting,
    /// What sums are multiplied by.
    factor: f32,
}

/// What a block passes on, and when it may.
struct Sending {
    hop: usize,
    range: Range<usize>,
    /// Sendings of the predecessor, and slots that the successor has emptied, that it waits for.
    put: usize,
    taken: usize,
}

impl Model {
    fn new(n: usize, len: usize, cut: Cutting) -> Self {
        Model { n, len, cut, factor: 1.0 / n as f32 }
    }

    fn chunk(&self, c: usize) -> Range<usize> {
        chunk(c, self.n, self.len, SIZE)
    }

    fn sends(&self) -> usize {
        self.cut.rounds * 2 * (self.n - 1) * self.cut.abreast
    }

    /// Sending `i` of a block of member `me`.
    fn sending(&self, me: usize, block: usize, i: usize) -> Sending {
        let Cutting { blocks, piece, abreast, slots, .. } = self.cut;
        let (n, hops) = (self.n, 2 * (self.n - 1));
        let (round, hop, place) = (i / abreast / hops, i / abreast % hops, i % abreast);
        let chunk = self.chunk((me + 2 * n - hop) % n);
        let at = |x: usize| (chunk.start + x * piece / SIZE).min(chunk.end);
        let part = (round * abreast + place) * blocks + block;
        let filled = (round * (n - 1) + hop) * abreast + place;
        Sending {
            hop,
            range: at(part)..at(part + 1),
            put: if hop == 0 { 0 } else { i + 1 - abreast },
            taken: if hop < n - 1 { (filled + 1).saturating_sub(slots) } else { 0 },
        }
    }

    /// By the documented order: chunk `c` from rank `c` onwards, own plus arrived, times the factor.
    fn expected(&self, own: &[Vec<f32>]) -> Vec<f32> {
        let of = |c: usize, i: usize| {
            let terms = (1..self.n).map(|k| own[(c + k) % self.n][i]);
            terms.fold(own[c][i], |arrived, own| own + arrived) * self.factor
        };
        (0..self.n).flat_map(|c| self.chunk(c).map(move |i| (c, i))).map(|(c, i)| of(c, i)).collect()
    }

    /// All members' results. `None` when they wait for each other.
    fn run(&self, own: &[Vec<f32>], in_place: bool, mut seed: u64) -> Option<Vec<Vec<f32>>> {
        let Cutting { blocks, slots, .. } = self.cut;
        let mut next = move |most: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % most
        };
        let mut results = if in_place { own.to_vec() } else { vec![vec![f32::NAN; self.len]; self.n] };
        let mut slots_of = vec![vec![vec![None::<Vec<f32>>; slots]; blocks]; self.n];
        // Of each member and block: what it has sent, put into slots and taken out of them.
        let mut done = vec![vec![(0, 0, 0); blocks]; self.n];
        let mut left = self.n * blocks * self.sends();
        while left > 0 {
            let ready = |me: usize, block: usize| {
                let (before, after) = ((me + self.n - 1) % self.n, (me + 1) % self.n);
                let i = done[me][block].0;
                let sending = (i < self.sends()).then(|| self.sending(me, block, i))?;
                (done[before][block].0 >= sending.put && done[after][block].2 >= sending.taken).then_some(sending)
            };
            let all: Vec<_> = (0..self.n * blocks).map(|at| (at / blocks, at % blocks)).collect();
            let first = next(all.len());
            let mut turns = (0..all.len()).map(|k| all[(first + k) % all.len()]);
            let (me, block, sending) = turns.find_map(|(me, block)| Some((me, block, ready(me, block)?)))?;
            let (after, n) = ((me + 1) % self.n, self.n);
            let Sending { hop, range, .. } = sending;
            let (sent, filled, taken) = &mut done[me][block];
            let mut piece = if in_place || hop >= n { &results[me] } else { &own[me] }[range.clone()].to_vec();
            if (1..n).contains(&hop) {
                let arrived = slots_of[me][block][*taken % slots].take().expect("a slot is emptied that is full");
                let factor = if hop == n - 1 { self.factor } else { 1.0 };
                piece.iter_mut().zip(arrived).for_each(|(own, arrived)| *own = (*own + arrived) * factor);
                *taken += 1;
            }
            if hop < n - 1 {
                let before = slots_of[after][block][*filled % slots].replace(piece);
                assert!(before.is_none(), "a slot is filled that is not empty");
                *filled += 1;
            } else {
                results[after][range.clone()].copy_from_slice(&piece);
                if hop == n - 1 {
                    results[me][range].copy_from_slice(&piece);
                }
            }
            *sent += 1;
            left -= 1;
        }
        assert!(slots_of.iter().flatten().flatten().all(Option::is_none), "something is left in a slot");
        Some(results)
    }
}

fn numbers(n: usize, len: usize) -> Vec<Vec<f32>> {
    let one = |k: usize, i: usize| ((k * 7919 + i * 104_729) % 10_007) as f32 / 3.0 - 1700.0;
    (0..n).map(|k| (0..len).map(|i| one(k, i)).collect()).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn largest(n: usize, len: usize) -> usize {
    chunk(0, n, len, SIZE).len() * SIZE
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever is cut how, and whoever is when at work: all members have the sums, in the documented order, and none
    /// waits for ever.
    #[test]
    fn sums_arrive_in_every_order_of_events(
        n in 2usize..=8,
        len in prop_oneof![0usize..4, 0usize..700, 1000usize..5000],
        (blocks, piece) in (1usize..4, 1usize..5),
        (abreast, more) in (1usize..4, 1usize..3),
        in_place: bool,
        seed: u64,
    ) {
        let piece = piece * LINE;
        let rounds = largest(n, len).div_ceil(blocks * abreast * piece);
        let model = Model::new(n, len, Cutting { blocks, piece, rounds, abreast, slots: abreast + more });
        let own = numbers(n, len);
        let expected = bits(&model.expected(&own));
        let found = model.run(&own, in_place, seed);
        prop_assert!(found.is_some(), "they wait for each other");
        prop_assert!(found.unwrap().iter().all(|found| bits(found) == expected));
    }

    /// As the kernels are launched: with scratch of any size that is lent.
    #[test]
    fn what_is_cut_for_real_is_all_there_is(
        n in 2usize..=8,
        len in prop_oneof![1usize..300, 1usize..40_000],
        room in 0usize..12,
        most in 1u32..200,
        seed: u64,
    ) {
        let chunk = largest(n, len);
        let blocks = blocks(chunk, &Limits::new(most));
        prop_assert!(blocks >= 1 && blocks <= (most as usize).min(64));
        let rooms: Vec<usize> = scratch_sizes(chunk, blocks).collect();
        let room = rooms[room.min(rooms.len() - 1)];
        let cut = cutting(chunk, blocks, room);
        let whole = cut.rounds * cut.abreast * cut.blocks * cut.piece;
        prop_assert!(whole >= chunk && cut.slots > cut.abreast && cut.piece.is_multiple_of(LINE), "{cut:?}");
        prop_assert!(cut.blocks * cut.slots * cut.piece <= room, "{cut:?} in {room}");
        let model = Model::new(n, len, cut);
        let own = numbers(n, len);
        let expected = bits(&model.expected(&own));
        prop_assert!(model.run(&own, true, seed).unwrap().iter().all(|found| bits(found) == expected));
    }

    /// The sizes to fall back to: ever smaller, down to a line for each slot, and never more than there is to send.
    #[test]
    fn inboxes_shrink_to_a_line_for_each_slot(chunk in 1usize..(4 << 30), blocks in 1usize..=64) {
        let all: Vec<usize> = scratch_sizes(chunk, blocks).collect();
        prop_assert!(all.is_sorted_by(|a, b| a > b) && all.len() <= 8, "{all:?}");
        let least = cutting(chunk, blocks, *all.last().unwrap());
        prop_assert_eq!(least.piece, LINE);
        prop_assert!(all[0] <= 48 << 20);
        // With the best, one round does as long as a piece is not as large as it may be.
        let best = cutting(chunk, blocks, all[0]);
        prop_assert!(best.rounds == 1 || all[0] == blocks * best.slots * (256 << 10), "{best:?}");
    }
}

/// With no more slots than pieces that go abreast all fill them, and nobody gets to empty one: the model can fail.
#[test]
fn too_few_slots_are_a_circle() {
    for n in [2, 3, 8] {
        for abreast in [1, 2] {
            let cut = |slots| Cutting { blocks: 1, piece: LINE, rounds: 3, abreast, slots };
            let len = n * 3 * abreast * LINE / SIZE;
            let run = |slots| Model::new(n, len, cut(slots)).run(&numbers(n, len), true, 1);
            // Between two, there is one hop with a slot, and the next is for emptying it.
            assert_eq!(run(abreast).is_some(), n == 2, "{n} members, {abreast} abreast");
            assert!(run(abreast + 1).is_some());
        }
    }
}

/// Chunks begin with lines, and the last ones may be short or empty.
#[test]
fn chunks_begin_with_lines() {
    let all = |n: usize, len, size| (0..n).map(|k| chunk(k, n, len, size)).collect::<Vec<_>>();
    assert_eq!(all(3, 100, 4), [0..64, 64..100, 100..100]);
    assert_eq!(all(3, 100, 8), [0..48, 48..96, 96..100]);
    assert_eq!(all(2, 1, 4), [0..1, 1..1]);
    assert_eq!(all(4, 4096, 4), [0..1024, 1024..2048, 2048..3072, 3072..4096]);
}

/// The sizes that were in mind: 64 MB on 8, and more than pieces can be.
#[test]
fn sixty_four_blocks_go_round_once_for_64_mb_on_8() {
    let limits = Limits::new(132);
    let of = |bytes: usize| {
        let (chunk, room) = (bytes / 8, scratch_sizes(bytes / 8, 64).next().unwrap());
        assert_eq!(blocks(chunk, &limits), 64);
        (room, cutting(chunk, 64, room))
    };
    let cut = Cutting { blocks: 64, piece: 128 << 10, rounds: 1, abreast: 1, slots: 3 };
    assert_eq!(of(64 << 20), (24 << 20, cut));
    assert_eq!(of(256 << 20), (48 << 20, Cutting { piece: 256 << 10, rounds: 2, ..cut }));
}
