//! Groups that span processes: how they are made. Their collectives are behind the door of [`across`](super::across).

use super::{Group, meeting};
use crate::{
    Device,
    error::{Error, Result},
    fabric::{Across, Membership, membership::HostMembers, processes::Place},
};
use smallvec::SmallVec;
use std::{cell::Cell, rc::Rc, sync::Arc};

/// The identity of a group in any later scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKey {
    /// Ordinals in the pool.
    Local(Box<[usize]>),
    /// Places in the cluster.
    World(Arc<[Place]>),
}

impl GroupKey {
    pub(crate) fn len(&self) -> usize {
        match self {
            GroupKey::Local(ordinals) => ordinals.len(),
            GroupKey::World(places) => places.len(),
        }
    }
}

display_as!(GroupKey, |self, f| match self {
    GroupKey::Local(ordinals) => write!(f, "{ordinals:?}"),
    GroupKey::World(places) => write!(f, "{places:?}"),
});

impl Device {
    /// The group of all devices of all processes of the cluster: those of the first process, then those of the second,
    /// and so on. Without a cluster it is the group of all devices of the scope, so a program runs unchanged.
    ///
    /// With the first call in a scope, the scope becomes one of all processes: the n-th such scope of this process
    /// belongs to the n-th of every other one. If a device of it fails, all of them fail, with
    /// [`Error::AbortedByHost`]; and they end together. (Scopes of several threads in parallel:
    /// [`GpuPool::named`](crate::GpuPool::named).)
    ///
    /// A scope that fails before its first call fails in the other processes, too, if they run the same one: the n-th
    /// that each process begins at that place of the program. Where the processes do not begin the same scopes at each
    /// place, it cannot be known which ones belong together after such a failure. Then they are
    /// [`Error::WorldMismatch`], until two that are the same meet; names do without this.
    ///
    /// The page "More than one host" of the guide has an example.
    ///
    /// # Errors
    /// With a cluster: [`Error::InvalidArgument`] in a scope of some devices of the pool only; [`Error::HostLost`],
    /// [`Error::AbortedByHost`].
    #[track_caller]
    pub fn world(&self) -> Result<Group<'_>> {
        let Some(world) = &self.worker.shared.world else { return Ok(self.everyone()) };
        let all = world.devices().iter().enumerate();
        let places: Vec<_> =
            all.flat_map(|(host, &count)| (0..count).map(move |device| Place { host, device })).collect();
        self.world_group("world", &places)
    }

    #[track_caller]
    fn world_group(&self, op: &'static str, places: &[Place]) -> Result<Group<'_>> {
        let (Some(world), Some(scope)) = (&self.worker.shared.world, &self.session.world) else {
            return Err(Error::invalid(op, "a group of several processes, in a pool without a cluster"));
        };
        let (gang, own) = (&self.session.gang, world.host());
        let devices = self.worker.shared.device_count();
        let (own_count, told) = (gang.count(), world.devices().get(own));
        invalid_if!(own_count != devices, op, "the scope has {own_count} of {devices} devices: a world needs all");
        invalid_if!(told != Some(&devices), op, "the cluster was told of another number of devices than {devices}");
        scope.join(gang)?;
        let me = Place { host: own, device: self.index() };
        let Some(rank) = places.iter().position(|&place| place == me) else {
            return Err(Error::invalid(
                op,
                format_args!("device {} of host {own}, which asks, is not in it", me.device),
            ));
        };
        let rank_here = |place: &Place| gang.members().iter().position(|&member| member == place.device);
        let here = places.iter().filter(|place| place.host == own);
        let ranks: SmallVec<[usize; 8]> = here.filter_map(rank_here).collect();
        let local = meeting::membership(self, &ranks);
        if ranks.len() == places.len() {
            return Ok(Group { dev: self, membership: local, rank, across: None, overlaps: false });
        }
        let across = self.session.groups.look_up_across(places, || across(places, rank, local.clone()));
        Ok(Group { dev: self, membership: local, rank, across: Some(across), overlaps: false })
    }

    #[track_caller]
    pub(crate) fn group_by(&self, key: &GroupKey) -> Result<Option<Group<'_>>> {
        match key {
            GroupKey::Local(ordinals) => Ok(self.group_of(ordinals)),
            GroupKey::World(places) => self.world_group("world", places).map(Some),
        }
    }
}

fn across(places: &[Place], rank: usize, local: Rc<Membership>) -> Across {
    let mut numbers: Vec<usize> = places.iter().map(|place| place.host).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let members = |host| HostMembers {
        host,
        ranks: places.iter().enumerate().filter(|(_, place)| place.host == host).map(|(rank, _)| rank).collect(),
    };
    let hosts: Box<[HostMembers]> = numbers.into_iter().map(members).collect();
    let me = hosts.iter().position(|host| host.host == places[rank].host).expect("its own");
    let here = hosts[me].ranks.iter().position(|&at| at == rank).expect("its own");
    Across { places: places.into(), hosts, me, here, local, calls: Cell::new(0) }
}

impl<'d> Group<'d> {
    /// The members with these ranks in this group, which from now on have the ranks 0, 1, .. in this order: as
    /// [`Device::group`], for any group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a rank is not in the group, is named twice, or this device is not among them.
    #[track_caller]
    pub fn group(&self, ranks: &[usize]) -> Result<Group<'d>> {
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= self.count()) {
            return Err(Error::invalid("group", format_args!("rank {rank} in a group of {}", self.count())));
        }
        match &self.across {
            None => self.dev.group(&ranks.iter().map(|&rank| self.ranks()[rank]).collect::<Vec<_>>()),
            Some(across) => {
                if let Some((at, rank)) = ranks.iter().enumerate().find(|(at, rank)| ranks[..*at].contains(rank)) {
                    return Err(Error::invalid("group", format_args!("rank {rank} is named twice, again at {at}")));
                }
                let places: Vec<_> = ranks.iter().map(|&rank| across.places[rank]).collect();
                self.dev.world_group("group", &places)
            }
        }
    }

    /// Where a member is: the number of its process in the cluster (0 without one), and its ordinal in the pool there.
    ///
    /// # Panics
    /// When there is no such member.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        match &self.across {
            Some(across) => (across.places[rank].host, across.places[rank].device),
            None => (self.dev.worker.shared.world.as_ref().map_or(0, |world| world.host()), self.ordinal(rank)),
        }
    }

    pub(crate) fn here(&self) -> Group<'d> {
        let (membership, rank) = match &self.across {
            None => (&self.membership, self.rank),
            Some(across) => (&across.local, across.here),
        };
        Group { dev: self.dev, membership: membership.clone(), rank, across: None, overlaps: false }
    }

    pub(crate) fn spans_processes(&self) -> bool {
        self.across.is_some()
    }

    pub(crate) fn key(&self) -> GroupKey {
        match &self.across {
            None => GroupKey::Local(self.ordinals().into()),
            Some(across) => GroupKey::World(across.places.clone()),
        }
    }
}
