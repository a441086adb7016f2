//! How a buffer is cut over rails and processes. Pure: all members of all processes come to the same answers.
//!
//! Rail `r` carries slice `r` of the buffer. Of a slice, each process owns some ranges: an equal cut for all_reduce,
//! and else those of the parts of its members that lie in the slice.

use super::lanes::Lanes;
use crate::fabric::{
    membership::HostMembers,
    plan::{self, Counts},
};
use smallvec::SmallVec;
use std::ops::Range;

/// Ranges of elements, ascending, none of them empty.
pub(super) type Ranges = SmallVec<[Range<usize>; 2]>;

/// A buffer of `len` elements on rails, as one process sees it. Slices begin at multiples of `grain` elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut<'t> {
    pub len: usize,
    pub lanes: &'t Lanes,
    /// Which of the group's processes.
    pub host: usize,
    pub grain: usize,
}

impl Cut<'_> {
    /// The slice of the member with the local index `here`: empty if it has no rail.
    pub fn slice(&self, here: usize) -> Range<usize> {
        match self.lanes.of(self.host, here) {
            Some(rail) => plan::slice(rail, self.lanes.all.len(), self.len, self.grain),
            None => self.len..self.len,
        }
    }

    /// The lengths of the slices of `members` members.
    pub fn counts(&self, members: usize) -> Counts {
        Counts::By((0..members).map(|here| self.slice(here).len()).collect()).even()
    }

    /// An equal cut of a slice: one range for each of `hosts` processes.
    pub fn equal(&self, here: usize, hosts: usize) -> Vec<Ranges> {
        let slice = self.slice(here);
        let part = |host| {
            let part = plan::slice(host, hosts, slice.len(), self.grain);
            Some(slice.start + part.start..slice.start + part.end).filter(|part| !part.is_empty())
        };
        (0..hosts).map(|host| part(host).into_iter().collect()).collect()
    }

    /// What of the slice belongs to each process: the parts of its members.
    pub fn owned(&self, here: usize, hosts: &[HostMembers], parts: &Counts) -> Vec<Ranges> {
        let slice = self.slice(here);
        let of = |host: &HostMembers| {
            let parts = host.ranks.iter().map(|&rank| common(&slice, &parts.part(rank)));
            parts.filter(|part| !part.is_empty()).collect()
        };
        hosts.iter().map(of).collect()
    }

    /// Elements that member `rank`'s part and the slice of the local index `here` have in common.
    pub fn shared(&self, here: usize, parts: &Counts, rank: usize) -> usize {
        common(&self.slice(here), &parts.part(rank)).len()
    }
}

/// What two ranges have in common.
fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Elements of all ranges.
pub(super) fn total(ranges: &Ranges) -> usize {
    ranges.iter().map(Range::len).sum()
}

#[cfg(test)]
mod tests {
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
        ) {
            let hosts = hosts(&of);
            let members: usize = of.iter().sum();
            let parts = Counts::By(counts[..members].into());
            let lanes = Lanes::by_index(&hosts);
            let all = Cut { len: parts.total(members), lanes: &lanes, host: 0, grain };
            let mut owner = vec![usize::MAX; all.len];
            for here in 0..lanes.all.len() {
                for (host, ranges) in all.owned(here, &hosts, &parts).iter().enumerate() {
                    let shared: usize = hosts[host].ranks.iter().map(|&rank| all.shared(here, &parts, rank)).sum();
                    prop_assert_eq!(shared, total(ranges));
                    for at in ranges.iter().cloned().flatten() {
                        prop_assert_eq!(std::mem::replace(&mut owner[at], host), usize::MAX);
                    }
                }
            }
            for (host, of) in hosts.iter().enumerate() {
                prop_assert!(of.ranks.iter().flat_map(|&rank| parts.part(rank)).all(|at| owner[at] == host));
            }
            let cut = Cut { len, ..all };
            let equal = (0..lanes.all.len() + 1).flat_map(|here| cut.equal(here, hosts.len())).flatten().flatten();
            prop_assert_eq!(equal.collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
        }
    }
}
