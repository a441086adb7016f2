//! `inbox_*` of `kernels/inbox.cu`: everything to everyone, in one trip.

use super::{
    At, Fold, Frame, Memory, Program, Step,
    inboxes::{Inboxes, Unit, guarded},
    units,
};
use crate::{
    collective::kernels::{host_kernels::value, lane::Lane},
    driver::{Address, observe::FailPoint},
    fabric::layout::{MOST, Route},
};
use smallvec::SmallVec;

pub(super) struct Trip<T: Lane> {
    memory: Memory,
    blocks: u64,
    /// Elements for each member.
    n: u64,
    fold: Fold<T>,
    route: Route,
    source: Address,
    destination: Address,
}

impl<T: Lane> Trip<T> {
    pub(super) fn new(frame: &Frame<'_>) -> Self {
        let [n, op, route, low, high, source, destination] = frame.args else { unreachable!("packed by `Push`") };
        Trip {
            memory: frame.memory,
            blocks: frame.blocks.into(),
            n: value(n),
            fold: Fold::new(op, low, high),
            route: value(route),
            source: value(source),
            destination: value(destination),
        }
    }

    fn receives(&self, rank: usize) -> bool {
        self.route.receivers >> rank & 1 == 1
    }

    fn own(&self, rank: usize, i: u64) -> Unit {
        let at = self.source + rank as u64 * self.route.out * size_of::<T>() as u64;
        self.memory.load::<T>(at, self.n, i)
    }

    fn send(&self, inboxes: &mut Inboxes, block: u32, i: u64) {
        for rank in inboxes.others() {
            if self.receives(rank) || i == 0 {
                let at = inboxes.whole(inboxes.me(), rank) + i as usize * 16;
                inboxes.put(block, rank, at, guarded::<T>(self.own(rank, i)));
            }
        }
    }

    /// The member whose unit is missing, if one is.
    fn receive(&self, inboxes: &mut Inboxes, block: u32, i: u64) -> Option<usize> {
        let me = inboxes.me();
        let wanted = self.receives(me);
        if !wanted && i != 0 {
            return None;
        }
        let own = self.own(me, i);
        let own = if inboxes.told.has(FailPoint::OwnNanKept) { own } else { guarded::<T>(own) };
        let mut all: SmallVec<[Unit; MOST]> = SmallVec::from_elem(own, inboxes.count());
        let at = |inboxes: &Inboxes, rank| inboxes.whole(rank, me) + i as usize * 16;
        for rank in inboxes.others() {
            let Some(unit) = inboxes.look::<T>(at(inboxes, rank)) else { return Some(rank) };
            all[rank] = unit;
        }
        for rank in inboxes.others() {
            inboxes.take(block, at(inboxes, rank));
        }
        if wanted {
            self.memory.store::<T>(self.destination, self.n, i, self.fold.of(&all));
        }
        None
    }
}

impl<T: Lane> Program for Trip<T> {
    fn step(&self, inboxes: &mut Inboxes, block: u32, at: &mut At) -> Step {
        let i = u64::from(block) + at.unit * self.blocks;
        if i >= units::<T>(self.n) {
            return if at.stage == 0 { at.next_stage() } else { Step::Ended };
        }
        match at.stage {
            0 => self.send(inboxes, block, i),
            _ => {
                if let Some(missing) = self.receive(inboxes, block, i) {
                    return Step::Waits(missing);
                }
            }
        }
        at.next_unit()
    }
}
