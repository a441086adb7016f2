//! Which members are on which rail. Pure: all members of all processes come to the same answers.
//!
//! Over bytes of the hosts a rail joins the members with one local index. A transport between devices joins devices
//! with one ordinal: there the rails are the ordinals that all processes have members with, in one order, and other
//! data hops inside the process first. A group that has no such ordinal goes over devices that are no members, through
//! page-locked memory ([`relay`](super::relay)).

use crate::runtime::{HostMembers, Place};
use smallvec::SmallVec;

type Few = SmallVec<[usize; 8]>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RailMembers {
    /// By process of the group: the local index of its member.
    pub members: Few,
    /// Of the devices that a transport between devices joins.
    pub ordinal: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RailMap {
    pub all: SmallVec<[RailMembers; 8]>,
    /// Whether the members are the devices that their rails join.
    pub direct: bool,
}

impl RailMap {
    /// For bytes of the hosts: as many rails as every process has members.
    pub fn by_index(hosts: &[HostMembers]) -> RailMap {
        let count = hosts.iter().map(|host| host.ranks.len()).min().unwrap_or(0);
        let rail = |index| RailMembers { members: hosts.iter().map(|_| index).collect(), ordinal: index };
        RailMap { all: (0..count).map(rail).collect(), direct: true }
    }

    /// For a transport between devices. `places`: of the members. `devices`: of each process of the cluster.
    pub fn by_ordinal(hosts: &[HostMembers], places: &[Place], devices: &[usize]) -> RailMap {
        let Some(first) = hosts.first() else { return RailMap { all: SmallVec::new(), direct: true } };
        let with = |ordinal: usize| {
            let index = |host: &HostMembers| host.ranks.iter().position(|&rank| places[rank].device == ordinal);
            Some(RailMembers { members: hosts.iter().map(index).collect::<Option<Few>>()?, ordinal })
        };
        // Slices lie one behind the other in the order of each process's members, so rails do not cross.
        let mut all: SmallVec<[RailMembers; 8]> = SmallVec::new();
        for rail in first.ranks.iter().filter_map(|&rank| with(places[rank].device)) {
            if all.last().is_none_or(|last| last.members.iter().zip(&rail.members).all(|(last, here)| last < here)) {
                all.push(rail);
            }
        }
        if !all.is_empty() {
            return RailMap { all, direct: true };
        }
        // Devices that every one of these processes has.
        let common = hosts.iter().map(|host| devices[host.host]).min().unwrap_or(0).max(1);
        let mut rail_map = RailMap { direct: false, ..RailMap::by_index(hosts) };
        rail_map.all.iter_mut().for_each(|rail| rail.ordinal %= common);
        rail_map
    }

    /// The rail of a member, by its process and its local index.
    pub fn of(&self, host: usize, here: usize) -> Option<usize> {
        self.all.iter().position(|rail| rail.members[host] == here)
    }

    /// The rail between two members: the receiver's own, if any. Then data hops inside the sender's process only.
    pub fn between(&self, from: (usize, usize), to: (usize, usize)) -> usize {
        let own = self.of(to.0, to.1).or_else(|| self.of(from.0, from.1));
        own.unwrap_or_else(|| (from.1 + to.1) % self.all.len())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/collective/rail_map_tests.rs"]
mod tests;
