//! How a buffer is cut over rails and processes. Pure: all members of all processes come to the same answers.
//!
//! A large buffer may be cut into pieces first, which go one behind the other ([`pieces`](super::pieces)). Rail `r`
//! carries slice `r` of the buffer, or of the piece. Of a slice, each process owns some ranges: an equal cut for
//! all_reduce, and else those of the parts of its members that lie in the slice.

use super::rail_map::RailMap;
use crate::runtime::collective::{Counts, HostMembers, slice as slice_of};
use smallvec::SmallVec;
use std::ops::Range;

/// Ranges of elements, ascending, none of them empty.
pub(super) type Ranges = SmallVec<[Range<usize>; 2]>;

/// A range of the buffer and its split over rails, for one process. Slices begin at multiples of
/// `grain` elements behind `start`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut<'t> {
    pub start: usize,
    pub len: usize,
    pub rail_map: &'t RailMap,
    /// Which of the group's processes.
    pub host: usize,
    pub grain: usize,
}

impl Cut<'_> {
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// The same elements in equal pieces, whose slices have up to `most` elements; none is empty, but for the one piece
    /// of no elements.
    pub fn pieces(&self, most: usize) -> Vec<Self> {
        let rails = self.rail_map.all.len();
        let count = self.len.div_ceil(rails * most.next_multiple_of(self.grain)).max(1);
        let piece = |k| {
            let at = slice_of(k, count, self.len, rails * self.grain);
            Cut { start: self.start + at.start, len: at.len(), ..*self }
        };
        (0..count).map(piece).filter(|piece| piece.len > 0 || count == 1).collect()
    }

    /// The slice of the member with the local index `here`: empty if it has no rail.
    pub fn slice(&self, here: usize) -> Range<usize> {
        let Range { start, end } = match self.rail_map.of(self.host, here) {
            Some(rail) => slice_of(rail, self.rail_map.all.len(), self.len, self.grain),
            None => self.len..self.len,
        };
        self.start + start..self.start + end
    }

    /// The lengths of the slices of `members` members.
    pub fn counts(&self, members: usize) -> Counts {
        Counts::By((0..members).map(|here| self.slice(here).len()).collect()).even()
    }

    /// An equal cut of a slice: one range for each of `hosts` processes.
    pub fn equal(&self, here: usize, hosts: usize) -> Vec<Ranges> {
        let slice = self.slice(here);
        let part = |host| {
            let part = slice_of(host, hosts, slice.len(), self.grain);
            Some(slice.start + part.start..slice.start + part.end).filter(|part| !part.is_empty())
        };
        (0..hosts).map(|host| part(host).into_iter().collect()).collect()
    }

    /// Each process's share of the slice: the parts of its members.
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

    /// The range of member `rank`'s part that is here, in elements of that part.
    pub fn within(&self, parts: &Counts, rank: usize) -> Range<usize> {
        let part = parts.part(rank);
        let here = common(&self.range(), &part);
        // Nothing in common: any place in the part will do.
        if here.is_empty() { 0..0 } else { here.start - part.start..here.end - part.start }
    }
}

/// The intersection of two ranges.
fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

pub(super) fn total(ranges: &Ranges) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// How many elements member `.0` sends to member `.1`.
pub(super) type Amount<'a> = &'a dyn Fn(usize, usize) -> usize;

/// Where in the memory of `from` the elements for `to` are, in bytes.
pub(super) fn place(amount: Amount<'_>, from: usize, to: usize, size: usize) -> Range<usize> {
    let start: usize = (0..to).map(|member| amount(from, member)).sum();
    start * size..(start + amount(from, to)) * size
}

#[cfg(test)]
#[path = "../../tests/unit/collective/cut_tests.rs"]
mod tests;
