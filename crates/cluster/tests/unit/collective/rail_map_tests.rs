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
