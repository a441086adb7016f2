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
    /// Each message has two ends of one length, and what comes covers the memory for it without overlap.
    #[test]
    fn messages_have_two_ends(
        of in prop::collection::vec(1usize..4, 2..5),
        counts in prop::collection::vec(0usize..300, 12),
        packed in any::<bool>(),
        equal in any::<bool>(),
    ) {
        let hosts = hosts(&of);
        let parts = Counts::By(counts[..of.iter().sum()].into());
        let rail_map = RailMap::by_index(&hosts);
        for here in 0..rail_map.all.len() {
            let share = |me: usize| {
                let len = parts.total(of.iter().sum());
                let cut = Cut { start: 0, len, rail_map: &rail_map, host: me, grain: 32 };
                let owned = if equal { cut.equal(here, hosts.len()) } else { cut.owned(here, &hosts, &parts) };
                Share { slice: cut.slice(here), owned, me, size: 4 }
            };
            let shares: Vec<Share> = (0..hosts.len()).map(share).collect();
            for ends in [Share::to_owners, |share: &Share| share.to_all(false), |share: &Share| share.to_all(true)] {
                let lens = |at: usize, is: &dyn Fn(&End) -> Option<usize>| -> Vec<usize> {
                    ends(&shares[at]).iter().filter_map(is).collect()
                };
                let sent = |from: usize, to: usize| lens(from, &|end| match end {
                    End::Send(host, at) if *host == to => Some(at.len()),
                    _ => None,
                });
                let come = |at: usize, from: usize| lens(at, &|end| match end {
                    End::Receive(host, at) if *host == from => Some(at.len()),
                    _ => None,
                });
                for (a, b) in (0..hosts.len()).flat_map(|a| (0..hosts.len()).map(move |b| (a, b))) {
                    prop_assert_eq!(sent(a, b), come(b, a));
                }
            }
            let me = &shares[0];
            let of = |ends: Vec<End>| ends.into_iter().filter_map(|end| match end {
                End::Receive(_, at) => Some(at),
                End::Send(..) => None,
            });
            let arrived: Vec<usize> = of(me.to_owners()).flatten().collect();
            prop_assert_eq!(arrived, (0..me.own_bytes() * (hosts.len() - 1)).collect::<Vec<_>>());
            let own = me.own().iter().map(|range| me.at(range));
            let mut all: Vec<usize> = of(me.to_all(packed)).chain(own).flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..me.bytes()).collect::<Vec<_>>());
        }
    }
}
