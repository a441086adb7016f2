use super::*;
use proptest::prelude::*;

fn hosts(of: &[usize]) -> Vec<HostMembers> {
    let mut next = 0;
    let mut members = |count: &usize| {
        let ranks = (next..next + count).collect();
        next += count;
        ranks
    };
    of.iter().enumerate().map(|(host, count)| HostMembers { host, ranks: members(count) }).collect()
}

proptest! {
    /// Every element is on one rail and belongs to one process, whatever the shape.
    #[test]
    fn each_element_has_one_rail_and_one_owner(
        of in prop::collection::vec(1usize..5, 2..5),
        len in prop_oneof![Just(0usize), Just(1), 2usize..4000],
        counts in prop::collection::vec(0usize..500, 16),
        grain in prop_oneof![Just(1usize), Just(32)],
        most in prop_oneof![Just(usize::MAX >> 8), 1usize..400],
    ) {
        let hosts = hosts(&of);
        let members: usize = of.iter().sum();
        let parts = Counts::By(counts[..members].into());
        let rail_map = RailMap::by_index(&hosts);
        let all = Cut { start: 0, len: parts.total(members), rail_map: &rail_map, host: 0, grain };
        let pieces = all.pieces(most);
        let mut owner = vec![usize::MAX; all.len];
        for piece in &pieces {
            for here in 0..rail_map.all.len() {
                prop_assert!(piece.slice(here).len() <= most.next_multiple_of(grain));
                for (host, ranges) in piece.owned(here, &hosts, &parts).iter().enumerate() {
                    let of = hosts[host].ranks.iter();
                    prop_assert_eq!(of.map(|&rank| piece.shared(here, &parts, rank)).sum::<usize>(), total(ranges));
                    for at in ranges.iter().cloned().flatten() {
                        prop_assert_eq!(std::mem::replace(&mut owner[at], host), usize::MAX);
                    }
                }
            }
        }
        for (host, of) in hosts.iter().enumerate() {
            prop_assert!(of.ranks.iter().flat_map(|&rank| parts.part(rank)).all(|at| owner[at] == host));
        }
        // The pieces lie one behind the other, and so do their parts of each member's part.
        prop_assert_eq!(pieces.iter().flat_map(Cut::range).collect::<Vec<_>>(), (0..all.len).collect::<Vec<_>>());
        prop_assert!(pieces.len() == 1 || pieces.iter().all(|piece| piece.len > 0));
        for rank in 0..members {
            let within = pieces.iter().flat_map(|piece| piece.within(&parts, rank));
            prop_assert_eq!(within.collect::<Vec<_>>(), (0..parts.part(rank).len()).collect::<Vec<_>>());
        }
        let cut = Cut { len, ..all };
        let equal = (0..rail_map.all.len() + 1).flat_map(|here| cut.equal(here, hosts.len())).flatten().flatten();
        prop_assert_eq!(equal.collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
    }
}
