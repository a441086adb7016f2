//! Groups: some members of a gang, which run collectives together.

use super::{Machine, Meeting, Request, algorithm::Algorithm, case::Case, execute::execute, meeting, replay};
use crate::{
    Device,
    error::{Error, Result, op_site::OpSite},
    fabric::{Across, DType, Membership, Origin, ReduceOp, types::Algorithm as Wish},
    shard::Shard,
};
use smallvec::SmallVec;
use std::{rc::Rc, sync::Arc};

/// Some of a gang's members, in an order that gives them their ranks among themselves. Made by
/// [`Device::group`](crate::Device::group); has the collectives of [`Device`].
///
/// Each member of the group makes it, with the same ranks in the same order; others need not know of it. A device may
/// be in several groups and use them by turns. Collectives of one device are matched in the order of its calls: members
/// that call two groups that they share in different orders get [`Error::Mismatch`].
///
/// The members may be devices of several processes: [`Device::world`](crate::Device::world) is the group of all.
///
/// The page "Collectives" of the guide has an example.
pub struct Group<'d> {
    pub(super) dev: &'d Device,
    pub(super) membership: Rc<Membership>,
    pub(super) rank: usize,
    pub(super) across: Option<Rc<Across>>,
    /// Its collectives overlap with other work of the devices, to which they leave most of the multiprocessors.
    pub(super) overlaps: bool,
}

crate::sync::device_thread_only! { ['d] Group<'d> }

impl std::fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.across {
            None => write!(f, "Group {:?}, rank {}", self.ranks(), self.rank),
            Some(across) => write!(f, "Group {:?}, rank {}", across.places, self.rank),
        }
    }
}

impl Device {
    /// The members with these ranks in the gang, which from now on have the ranks 0, 1, .. in this order. Costs nothing
    /// on the other members and needs no meeting.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a rank is not in the gang, is named twice, or this device is not among them.
    #[track_caller]
    pub fn group(&self, ranks: &[usize]) -> Result<Group<'_>> {
        let (count, me) = (self.count(), self.rank());
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= count) {
            return Err(Error::invalid("group", format_args!("rank {rank} in a gang of {count}")));
        }
        if let Some((at, rank)) = ranks.iter().enumerate().find(|(at, rank)| ranks[..*at].contains(rank)) {
            return Err(Error::invalid("group", format_args!("rank {rank} is named twice, again at {at}")));
        }
        let Some(rank) = ranks.iter().position(|&rank| rank == me) else {
            return Err(Error::invalid("group", format_args!("rank {me}, which asks, is not in {ranks:?}")));
        };
        let membership = meeting::membership(self, ranks);
        Ok(Group { dev: self, membership, rank, across: None, overlaps: false })
    }

    /// The group of these ordinals, ranked in this order, this device among them; none unless all are in the gang.
    pub(crate) fn group_of(&self, ordinals: &[usize]) -> Option<Group<'_>> {
        let members = self.session.gang.members();
        let rank_of = |ordinal: &usize| members.iter().position(|member| member == ordinal);
        let ranks: SmallVec<[usize; 8]> = ordinals.iter().map(rank_of).collect::<Option<_>>()?;
        let rank = ranks.iter().position(|&rank| rank == self.rank())?;
        let membership = meeting::membership(self, &ranks);
        Some(Group { dev: self, membership, rank, across: None, overlaps: false })
    }

    pub(crate) fn everyone(&self) -> Group<'_> {
        let membership = meeting::everyone(self);
        Group { dev: self, membership, rank: self.rank(), across: None, overlaps: false }
    }
}

impl<'d> Group<'d> {
    /// This device's rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many members the group has.
    pub fn count(&self) -> usize {
        self.across.as_ref().map_or(self.membership.ranks.len(), |across| across.places.len())
    }

    /// This member's even share of the group's data: that of [`Device::world`] divides among all processes.
    pub fn shard(&self) -> Shard {
        Shard::new(self.rank, self.count(), None)
    }

    /// The device, on the stream that the group's collectives run on.
    pub fn device(&self) -> &'d Device {
        self.dev
    }

    pub(crate) fn ordinal(&self, member: usize) -> usize {
        match &self.across {
            None => self.membership.ordinals[member],
            Some(across) => across.places[member].device,
        }
    }

    pub(crate) fn ordinals(&self) -> &[usize] {
        &self.membership.ordinals
    }

    pub(super) fn ranks(&self) -> &Arc<[usize]> {
        &self.membership.ranks
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.membership.direct
    }

    /// This member's side of meetings; in a group of several processes, with the members of its process.
    pub(crate) fn meeting(&self) -> Meeting<'_> {
        let rank = self.across.as_ref().map_or(self.rank, |across| across.here);
        Meeting { dev: self.dev, membership: &self.membership, rank }
    }

    pub(crate) fn new_exchange(&self) -> Origin {
        Origin::exchange(self.dev.session.gang.place(), self.meeting().next_number())
    }
}

impl Group<'_> {
    #[track_caller]
    pub(crate) fn run(&self, request: Request) -> Result<()> {
        self.run_by(request, None)
    }

    /// [`run`](Self::run) by a `given` algorithm, which can, and whose kernels wait for each other. Across processes
    /// that is the request's own kernel.
    #[track_caller]
    pub(super) fn run_by(&self, request: Request, given: Option<&dyn Algorithm>) -> Result<()> {
        if let Some(door) = self.door() {
            let own = given.is_none() || request.own.is_some();
            debug_assert!(own, "each step there has an algorithm of its own");
            let _here = OpSite { op: request.call.op, site: request.call.site }.enter();
            return door.run(self, &request, self.overlaps);
        }
        let meeting = self.meeting();
        match &self.dev.recording {
            Some(recording) => replay::capture(meeting, recording, request, given),
            None if self.overlaps => execute(meeting, &request, &meeting.limits().overlapping(), given),
            None => execute(meeting, &request, meeting.limits(), given),
        }
    }

    pub(crate) fn kernels_meet(&self) -> bool {
        let (meeting, machine) = (self.meeting(), Machine::of(&self.dev.worker.shared));
        let (members, any) = ((self.count(), self.membership.direct), (DType::U8, ReduceOp::Sum));
        self.across.is_none()
            && !machine.software
            && machine.wish == Wish::Auto
            && Case::new((machine, meeting.limits()), members, any, None, false).meets_on_devices()
    }
}
