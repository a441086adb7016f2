//! How a buffer is cut over rails and processes. Pure: all members of all processes come to the same answers.
//!
//! A large buffer may be cut into pieces first, which go one behind the other ([`rail`](super::rail)). Rail `r`
//! carries slice `r` of the buffer, or of the piece. Of a slice, each process owns some ranges: an equal cut for
//! all_reduce, and else those of the parts of its members that lie in the slice. A [`Share`] says what goes where.

use super::rail_map::RailMap;
use crate::runtime::{Counts, HostMembers, slice as slice_of};
use smallvec::SmallVec;
use std::ops::Range;

/// Ranges of elements, ascending, apart from each other, none of them empty.
pub(super) type Ranges = SmallVec<[Range<usize>; 2]>;

/// A range of the buffer, cut over rails. Slices begin at multiples of `grain` elements behind `start`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut<'t> {
    pub start: usize,
    pub len: usize,
    pub rail_map: &'t RailMap,
    pub host: usize,
    pub grain: usize,
}

impl Cut<'_> {
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Equal pieces, with slices of at most `most` elements. Only the one piece of no elements is empty.
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
            let mut ranges = Ranges::new();
            for part in host.ranks.iter().map(|&rank| common(&slice, &parts.part(rank))).filter(|part| !part.is_empty())
            {
                match ranges.last_mut().filter(|last| last.end == part.start) {
                    Some(last) => last.end = part.end,
                    None => ranges.push(part),
                }
            }
            ranges
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

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

fn total(ranges: &Ranges) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// A member's slice of a piece, and what of it each process owns. Answers are in bytes.
pub(super) struct Share {
    pub slice: Range<usize>,
    pub owned: Vec<Ranges>,
    pub me: usize,
    pub size: usize,
}

/// One end of a message on a rail: the other process, by its index in the group, and where the bytes are here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Send(usize, Range<usize>),
    Receive(usize, Range<usize>),
}

impl Share {
    pub fn own(&self) -> &Ranges {
        &self.owned[self.me]
    }

    pub fn own_bytes(&self) -> usize {
        total(self.own()) * self.size
    }

    pub fn bytes(&self) -> usize {
        self.slice.len() * self.size
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.owned.len(), self.me);
        (1..n).map(move |k| (me + k) % n)
    }

    pub fn at(&self, range: &Range<usize>) -> Range<usize> {
        (range.start - self.slice.start) * self.size..(range.end - self.slice.start) * self.size
    }

    /// A range of a process, where its own ones lie one behind the other.
    pub fn packed(&self, host: usize, range: &Range<usize>) -> Range<usize> {
        let before = self.owned[host].iter().take_while(|own| own.start < range.start).map(Range::len).sum::<usize>();
        before * self.size..(before + range.len()) * self.size
    }

    /// Another process's part for an own range, in memory for the parts of all others.
    pub fn arrived(&self, host: usize, range: &Range<usize>) -> Range<usize> {
        let hosts = self.owned.len();
        let (before, at) = (((host + hosts - self.me) % hosts - 1) * self.own_bytes(), self.packed(self.me, range));
        before + at.start..before + at.end
    }

    /// Sends the others their ranges, from the slice, and receives [`arrived`](Self::arrived) parts.
    pub fn to_owners(&self) -> Vec<End> {
        let with = |host: usize| {
            let sends = self.owned[host].iter().map(move |range| End::Send(host, self.at(range)));
            sends.chain(self.own().iter().map(move |range| End::Receive(host, self.arrived(host, range))))
        };
        self.others().flat_map(with).collect()
    }

    /// Sends all others the own ranges, and receives theirs in the slice. `packed`: where the own ones come from.
    pub fn to_all(&self, packed: bool) -> Vec<End> {
        let from = move |range| if packed { self.packed(self.me, range) } else { self.at(range) };
        let with = |host: usize| {
            let sends = self.own().iter().map(move |range| End::Send(host, from(range)));
            sends.chain(self.owned[host].iter().map(move |range| End::Receive(host, self.at(range))))
        };
        self.others().flat_map(with).collect()
    }
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
