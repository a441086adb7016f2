//! The groups that a device is in during one scope, with the state of each. Invariant: all members of a group count its
//! committed calls alike. A call that did not match is not counted.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use super::{DeviceBarrier, MOST, processes::Place};
use crate::{gang::Gang, sync::CommitWord};
use std::{
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

pub(crate) struct Membership {
    /// Ranks in the gang, by rank in the group.
    pub(crate) ranks: Arc<[usize]>,
    /// Ordinals in the pool, by rank in the group.
    pub(crate) ordinals: Box<[usize]>,
    /// The ordinals packed ([`DeviceBarrier::members`]), and their number, if a compact descriptor has room for them.
    pub(crate) packed: Option<(u64, u8)>,
    /// Whether all members have access to each other's memory.
    pub(crate) direct: bool,
    /// Where the group's collectives are committed. None: on the gang's own word.
    pub(crate) word: Option<Arc<CommitWord>>,
    pub(crate) calls: Cell<u64>,
}

/// A group of devices of several processes, as one member knows it.
pub struct Across {
    pub places: Arc<[Place]>,
    pub hosts: Box<[HostMembers]>,
    pub me: usize,
    pub here: usize,
    pub(crate) local: Rc<Membership>,
    pub calls: Cell<u64>,
}

impl Across {
    /// The rank of a member among those of this process, if it is one.
    pub fn here_of(&self, rank: usize) -> Option<usize> {
        self.hosts[self.me].ranks.iter().position(|&at| at == rank)
    }
}

pub struct HostMembers {
    pub host: usize,
    pub ranks: Box<[usize]>,
}

#[derive(Default)]
pub(crate) struct Groups {
    everyone: OnceCell<Rc<Membership>>,
    others: RefCell<Vec<Rc<Membership>>>,
    across: RefCell<Vec<Rc<Across>>>,
}

impl Groups {
    pub(crate) fn everyone(&self) -> Option<Rc<Membership>> {
        self.everyone.get().cloned()
    }

    /// The group of these devices of several processes, made when it is first asked for.
    pub(crate) fn look_up_across(&self, places: &[Place], make: impl FnOnce() -> Across) -> Rc<Across> {
        if let Some(known) = self.across.borrow().iter().find(|known| *known.places == *places) {
            return known.clone();
        }
        let new = Rc::new(make());
        self.across.borrow_mut().push(new.clone());
        new
    }

    /// The group of these ranks of the gang. `are_direct`: whether these ordinals access each other's memory.
    pub(crate) fn look_up(
        &self,
        gang: &Gang,
        ranks: &[usize],
        are_direct: impl FnOnce(&[usize]) -> bool,
    ) -> Rc<Membership> {
        let new = |word| {
            let ordinals: Box<[usize]> = ranks.iter().map(|&rank| gang.device(rank)).collect();
            let direct = are_direct(&ordinals);
            let packed = (ordinals.len() <= MOST && ordinals.iter().all(|&ordinal| ordinal < MOST))
                .then(|| (DeviceBarrier::members(ordinals.iter().copied()), ranks.len() as u8));
            Rc::new(Membership { ranks: ranks.into(), ordinals, packed, direct, word, calls: Cell::new(0) })
        };
        if ranks.len() == gang.count() && ranks.iter().enumerate().all(|(at, &rank)| at == rank) {
            return self.everyone.get_or_init(|| new(None)).clone();
        }
        let mut others = self.others.borrow_mut();
        if let Some(known) = others.iter().find(|known| *known.ranks == *ranks) {
            return known.clone();
        }
        others.push(new(Some(gang.group(ranks))));
        others.last().expect("just added").clone()
    }
}
