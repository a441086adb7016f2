//! The protocol of `kernels/exchange.cu` on a model: what a block sends and folds in which step, and what it waits for
//! before. Members take their turns in random order; a slot that is filled while it is full, or folded while it is
//! empty, is a failure, and so is an order in which nobody can go on.

use super::{EXCHANGE_SLOTS, LEAST, PIECE, ROOM, blocks, cuttings};
use crate::fabric::{
    limits::Limits,
    tiling::{GRAIN, Tiling},
};
use proptest::prelude::*;

fn all(largest: usize, members: usize) -> impl Iterator<Item = (Tiling, usize)> {
    cuttings(largest, blocks(largest, &Limits::new(132)), members)
}

proptest! {
    #[test]
    fn pieces_cover_a_slice_once(largest in 1usize..300_000_000, members in 2usize..17) {
        for (cut, room) in all(largest, members) {
            let Tiling { abreast: blocks, tile: piece, rounds: pieces } = cut;
            prop_assert!(piece.is_multiple_of(GRAIN) && (GRAIN..=PIECE).contains(&piece), "{:?}", cut);
            prop_assert!(blocks * pieces * piece >= largest, "{:?}", cut);
            // None is empty everywhere, unless a line is more than there is to share.
            prop_assert!(blocks * (pieces - 1) * piece < largest, "{:?}", cut);
            // The last slot of the last sender and block ends where the recv_scratch does.
            let slots = pieces.min(EXCHANGE_SLOTS);
            prop_assert_eq!(((slots - 1) * blocks + blocks - 1) * (members - 1) * piece + (members - 1) * piece, room);
            prop_assert!(room <= ROOM, "{:?}", cut);
        }
    }

    #[test]
    fn short_of_memory_small_pieces_do(largest in 1usize..300_000_000, members in 2usize..17) {
        let rooms: Vec<usize> = all(largest, members).map(|(_, room)| room).collect();
        let least = EXCHANGE_SLOTS * blocks(largest, &Limits::new(132)) * (members - 1) * LEAST;
        prop_assert!(!rooms.is_empty() && *rooms.last().unwrap() <= least, "{:?}", rooms);
    }

    #[test]
    fn nobody_waits_in_a_circle(members in 2usize..7, pieces in 1usize..12, seed: u64) {
        prop_assert!(run(members, pieces, EXCHANGE_SLOTS, seed).is_ok());
    }
}

#[test]
fn with_one_slot_they_would() {
    assert_eq!(run(3, 5, 1, 1), Err("nobody can go on"));
}

/// What a member's block does next.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    step: usize,
    /// It has sent in this step.
    sent: bool,
    put: usize,
    taken: usize,
}

/// One block of each member.
fn run(members: usize, pieces: usize, slots: usize, mut seed: u64) -> Result<(), &'static str> {
    let mut next = move |most: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % most
    };
    let mut all = vec![Block::default(); members];
    // By owner and sender.
    let mut recv_scratch = vec![vec![vec![None::<usize>; slots]; members]; members];
    loop {
        let others = |me: usize| (0..members).filter(move |&k| k != me);
        let may = |me: usize| match all[me] {
            Block { step, .. } if step > pieces => false,
            Block { step: p, sent: false, .. } if p < pieces => {
                others(me).all(|owner| p < slots || all[owner].taken > p - slots)
            }
            Block { step: p, .. } => p == 0 || others(me).all(|sender| all[sender].put >= p),
        };
        let able: Vec<usize> = (0..members).filter(|&me| may(me)).collect();
        if able.is_empty() {
            return if all.iter().all(|block| block.step > pieces) { Ok(()) } else { Err("nobody can go on") };
        }
        let me = able[next(able.len())];
        let Block { step: p, sent, .. } = all[me];
        if !sent && p < pieces {
            for owner in others(me) {
                let slot = &mut recv_scratch[owner][me][p % slots];
                assert_eq!(slot.replace(p), None, "{me} fills a slot of {owner} that is full");
            }
            (all[me].put, all[me].sent) = (p + 1, true);
            continue;
        }
        if p > 0 {
            for sender in others(me) {
                assert_eq!(
                    recv_scratch[me][sender][(p - 1) % slots].take(),
                    Some(p - 1),
                    "{me} folds what is not there"
                );
            }
            all[me].taken = p;
        }
        (all[me].step, all[me].sent) = (p + 1, false);
    }
}
