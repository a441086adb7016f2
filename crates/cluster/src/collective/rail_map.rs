//! Which members are on which rail. Pure: all members of all processes come to the same answers.
//!
//! Over bytes of the hosts a rail joins the members with one local index. A transport between devices joins devices
//! with one ordinal: there the rails are the ordinals that all processes have members with, in one order, and what goes
//! beside them hops inside the process first. A group that has no such ordinal goes over devices that are no members,
//! through page-locked memory ([`relay`](super::relay)).

use crate::runtime::{collective::HostMembers, processes::Place};
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

    /// The rail from one member to another one of another process, each by its process and its local index: the
    /// receiver's own, if it has one. Then the data hops inside the sender's process only.
    pub fn between(&self, from: (usize, usize), to: (usize, usize)) -> usize {
        let own = self.of(to.0, to.1).or_else(|| self.of(from.0, from.1));
        own.unwrap_or_else(|| (from.1 + to.1) % self.all.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Members at these places, with ranks in this order.
    fn members(places: &[(usize, usize)]) -> (Vec<HostMembers>, Vec<Place>) {
        let places: Vec<Place> = places.iter().map(|&(host, device)| Place { host, device }).collect();
        let mut numbers: Vec<usize> = places.iter().map(|place| place.host).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let ranks = |host| (0..places.len()).filter(|&rank| places[rank].host == host).collect();
        (numbers.into_iter().map(|host| HostMembers { host, ranks: ranks(host) }).collect(), places)
    }

    fn found(places: &[(usize, usize)], devices: &[usize]) -> (Vec<(usize, Vec<usize>)>, bool) {
        let (hosts, places) = members(places);
        let rail_map = RailMap::by_ordinal(&hosts, &places, devices);
        (rail_map.all.iter().map(|rail| (rail.ordinal, rail.members.to_vec())).collect(), rail_map.direct)
    }

    #[test]
    fn rails_are_the_ordinals_of_all() {
        assert_eq!(found(&[(0, 0), (0, 1), (1, 0), (1, 1)], &[2, 2]), (vec![(0, vec![0, 0]), (1, vec![1, 1])], true));
        // Another order of ranks, and a process with more members.
        assert_eq!(
            found(&[(0, 1), (1, 1), (1, 2), (1, 0), (0, 0)], &[2, 3]),
            (vec![(1, vec![0, 0]), (0, vec![1, 2])], true)
        );
        // The processes' orders differ: one rail is left.
        assert_eq!(found(&[(1, 0), (0, 1), (1, 1), (0, 0)], &[2, 2]), (vec![(1, vec![0, 1])], true));
        assert_eq!(found(&[(0, 1), (0, 2), (1, 0), (1, 1)], &[3, 2]), (vec![(1, vec![0, 1])], true));
        assert_eq!(found(&[(0, 0), (1, 1)], &[2, 2]), (vec![(0, vec![0, 0])], false));
        assert_eq!(found(&[(0, 2), (0, 3), (1, 0), (1, 1)], &[4, 2]), (vec![(0, vec![0, 0]), (1, vec![1, 1])], false));
        assert_eq!(found(&[(0, 1), (0, 2), (1, 0)], &[3, 1]), (vec![(0, vec![0, 0])], false));
    }

    proptest! {
        /// Each rail has one member of each process, rails do not cross or meet, and their devices are there.
        #[test]
        fn rails_are_disjoint(
            take in prop::collection::vec(any::<bool>(), 12),
            keys in prop::collection::vec(any::<u8>(), 12),
        ) {
            let devices = [4, 3, 5];
            let all = (0..3).flat_map(|host| (0..devices[host]).map(move |device| (host, device)));
            let mut some: Vec<_> = all.zip(&take).filter(|(_, take)| **take).map(|(place, _)| place).collect();
            some.sort_by_key(|&(host, device)| keys[host * 4 + device.min(3)]);
            let (hosts, places) = members(&some);
            let rail_map = RailMap::by_ordinal(&hosts, &places, &devices);
            prop_assert_eq!(rail_map.all.is_empty(), some.is_empty());
            for (at, host) in hosts.iter().enumerate() {
                let own: Vec<usize> = rail_map.all.iter().map(|rail| rail.members[at]).collect();
                for rail in &rail_map.all {
                    let device = places[host.ranks[rail.members[at]]].device;
                    prop_assert!(rail.ordinal < devices[host.host] && (!rail_map.direct || device == rail.ordinal));
                }
                prop_assert!(own.windows(2).all(|two| two[0] < two[1]));
            }
        }
    }
}
