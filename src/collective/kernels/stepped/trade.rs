//! `slots_*` of `kernels/inbox.cu`: any size, piece by piece through slots.

use super::{
    At, Fold, Frame, Memory, Program, Step,
    inboxes::{Inboxes, Unit, guarded},
    units,
};
use crate::{
    collective::kernels::{Pieces, host_kernels::value, lane::Lane},
    driver::{Address, HostArg, observe::FailPoint},
    fabric::layout::{INBOX_SLOTS, MOST},
};
use smallvec::SmallVec;

pub(super) struct Trade<T: Lane> {
    memory: Memory,
    blocks: u64,
    fold: Fold<T>,
    pieces: Pieces,
    /// By rank, as in `Parcels`.
    from: [u64; MOST],
    bytes: [u64; MOST],
    to: [u64; MOST],
}

/// What a step of the kernel consists of: a wait for credits, a send, a fold, sums that are taken, credits.
const PARTS: u64 = 5;

impl<T: Lane> Trade<T> {
    pub(super) fn new(frame: &Frame<'_>) -> Self {
        let [op, low, high, pieces, eights @ ..] = frame.args else { unreachable!("packed by `Parcels`") };
        let all = |k: usize| spread([&eights[2 * k], &eights[2 * k + 1]]);
        Trade {
            memory: frame.memory,
            blocks: frame.blocks.into(),
            fold: Fold::new(op, low, high),
            pieces: value(pieces),
            from: all(0),
            bytes: all(1),
            to: all(2),
        }
    }

    fn returns(&self) -> bool {
        self.pieces.returns != 0
    }

    fn begin(&self, block: u32, p: u64) -> u64 {
        (p * self.blocks + u64::from(block)) * self.pieces.piece
    }

    /// Elements of piece `p` of a slice.
    fn elements(&self, owner: usize, block: u32, p: u64) -> u64 {
        self.bytes[owner].saturating_sub(self.begin(block, p)).min(self.pieces.piece) / size_of::<T>() as u64
    }

    fn piece_slot(&self, p: u64) -> usize {
        (if self.returns() { 2 * (p % 2) } else { p % INBOX_SLOTS as u64 }) as usize
    }

    fn sums_slot(p: u64) -> usize {
        (2 * (p % 2) + 1) as usize
    }

    /// Unit number `k` of the pieces `p` of all others' slices: the slice's owner, and its number there.
    fn nth(&self, inboxes: &Inboxes, block: u32, p: u64, mut k: u64) -> Option<(usize, u64)> {
        inboxes.others().find_map(|owner| {
            let count = units::<T>(self.elements(owner, block, p));
            if k < count {
                return Some((owner, k));
            }
            k -= count;
            None
        })
    }

    /// Where a slice's piece begins, from the slice's begin at `of`; and its elements.
    fn part(&self, of: &[Address; MOST], owner: usize, block: u32, p: u64) -> (Address, u64) {
        (of[owner] + self.begin(block, p), self.elements(owner, block, p))
    }

    fn send(&self, inboxes: &mut Inboxes, block: u32, p: u64, at: &mut At) -> Step {
        let found = if p < self.pieces.count.into() { self.nth(inboxes, block, p, at.unit) } else { None };
        let Some((owner, i)) = found else { return at.next_stage() };
        let (from, n) = self.part(&self.from, owner, block, p);
        let to = inboxes.slot(inboxes.me(), owner, block, self.piece_slot(p)) + i as usize * 16;
        inboxes.put(block, owner, to, guarded::<T>(self.memory.load::<T>(from, n, i)));
        at.next_unit()
    }

    /// Takes and folds piece `p` of the own slice, and sends the sums if they return.
    fn fold(&self, inboxes: &mut Inboxes, block: u32, p: u64, at: &mut At) -> Step {
        let (me, i) = (inboxes.me(), at.unit);
        let (from, n) = self.part(&self.from, me, block, p);
        if p >= self.pieces.count.into() || i >= units::<T>(n) {
            return at.next_stage();
        }
        let own = self.memory.load::<T>(from, n, i);
        let own = if inboxes.told.has(FailPoint::OwnNanKept) { own } else { guarded::<T>(own) };
        let mut all: SmallVec<[Unit; MOST]> = SmallVec::from_elem(own, inboxes.count());
        let place = |inboxes: &Inboxes, rank| inboxes.slot(rank, me, block, self.piece_slot(p)) + i as usize * 16;
        for rank in inboxes.others() {
            let Some(unit) = inboxes.look::<T>(place(inboxes, rank)) else { return Step::Waits(rank) };
            all[rank] = unit;
        }
        let result = self.fold.of(&all);
        for rank in inboxes.others() {
            inboxes.take(block, place(inboxes, rank));
            if self.returns() {
                let to = inboxes.slot(me, rank, block, Self::sums_slot(p)) + i as usize * 16;
                inboxes.put(block, rank, to, result);
            }
        }
        self.memory.store::<T>(self.part(&self.to, me, block, p).0, n, i, result);
        at.next_unit()
    }

    /// Takes the others' sums of their pieces `p`.
    fn take_sums(&self, inboxes: &mut Inboxes, block: u32, p: u64, at: &mut At) -> Step {
        let Some((owner, i)) = self.nth(inboxes, block, p, at.unit) else { return at.next_stage() };
        let place = inboxes.slot(owner, inboxes.me(), block, Self::sums_slot(p)) + i as usize * 16;
        let Some(unit) = inboxes.look::<T>(place) else { return Step::Waits(owner) };
        inboxes.take(block, place);
        let (to, n) = self.part(&self.to, owner, block, p);
        self.memory.store::<T>(to, n, i, unit);
        at.next_unit()
    }
}

impl<T: Lane> Program for Trade<T> {
    fn step(&self, inboxes: &mut Inboxes, block: u32, at: &mut At) -> Step {
        let (ahead, more) = if self.returns() { (1, 1) } else { (2, 0) };
        let steps = u64::from(self.pieces.count) + more;
        if at.stage < ahead {
            return self.send(inboxes, block, at.stage, at);
        }
        let (p, part) = ((at.stage - ahead) / PARTS, (at.stage - ahead) % PARTS);
        let last = p == steps;
        match part {
            0 => {
                let taken = if last { steps } else { (p + more).saturating_sub(1) };
                let skipped = if last { FailPoint::SlotsLeftFull } else { FailPoint::SlotWithoutCredit };
                let missing =
                    if taken == 0 || inboxes.told.has(skipped) { None } else { inboxes.hear_taken(block, taken) };
                match missing {
                    Some(missing) => Step::Waits(missing),
                    None if last => Step::Ended,
                    None => at.next_stage(),
                }
            }
            1 => self.send(inboxes, block, p + ahead, at),
            2 => self.fold(inboxes, block, p, at),
            3 if self.returns() && p > 0 => self.take_sums(inboxes, block, p - 1, at),
            3 => at.next_stage(),
            _ => {
                inboxes.tell_taken(block, p + 1);
                at.next_stage()
            }
        }
    }
}

fn spread(eights: [&HostArg; 2]) -> [u64; MOST] {
    let eights: [[u64; 8]; 2] = eights.map(value);
    std::array::from_fn(|k| eights[k / 8][k % 8])
}
