//! The last accesses of all bytes: a map from byte ranges of the whole address space to the accesses that still matter.
//!
//! For each range the map keeps the last write, the reads since, and flag accesses. A new access replaces an old one if
//! it is ordered after the old one and conflicts with everything that the old one conflicts with. If the new access's
//! stream waits for a flag, it replaces only accesses that wait for the same flag.

use super::{clock::Component, heap::Owned, note::Note};
use gpu_pool::extend::driver::Address;
use smallvec::SmallVec;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

#[derive(Clone)]
pub(super) struct Access {
    pub component: Component,
    pub count: u64,
    pub manner: Manner,
    pub note: Arc<Note>,
    pub owner: Option<Arc<Owned>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Manner {
    pub write: bool,
    /// An access by a stream memory operation. Such accesses do not race with each other.
    pub flag: bool,
}

impl Manner {
    pub const READ: Manner = Manner { write: false, flag: false };
    pub const WRITE: Manner = Manner { write: true, flag: false };
    pub const RAISE: Manner = Manner { write: true, flag: true };
    pub const AWAIT: Manner = Manner { write: false, flag: true };

    pub fn conflicts(self, other: Manner) -> bool {
        (self.write || other.write) && !(self.flag && other.flag)
    }

    fn dominates(self, other: Manner) -> bool {
        self == Manner::WRITE || self == other || other == Manner::AWAIT
    }
}

impl Access {
    pub fn same(&self, other: &Access) -> bool {
        (self.component, self.count) == (other.component, other.count)
    }

    /// Whether this access replaces `old`, which is ordered before it. An operation that a flag may later order before
    /// this access must come before the old one, too.
    fn replaces(&self, old: &Access) -> bool {
        let waits = self.note.pending.as_ref();
        self.manner.dominates(old.manner)
            && waits.is_none_or(|new| old.note.pending.as_ref().is_some_and(|old| old.has_waits_of(new)))
    }

    fn equals(&self, other: &Access) -> bool {
        let owners = match (&self.owner, &other.owner) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        self.same(other) && self.manner == other.manner && owners
    }
}

pub(super) struct Segment {
    end: Address,
    accesses: SmallVec<[Access; 2]>,
}

impl Segment {
    fn equals(&self, other: &Segment) -> bool {
        self.accesses.len() == other.accesses.len()
            && self.accesses.iter().zip(&other.accesses).all(|(a, b)| a.equals(b))
    }
}

#[derive(Default)]
pub(super) struct Shadow {
    segments: BTreeMap<Address, Segment>,
}

impl Shadow {
    /// Calls `each` with the accesses of `range` that conflict with one in this manner, and where, in order of address.
    pub fn conflicts(&self, range: &Range<Address>, manner: Manner, mut each: impl FnMut(&Access, Range<Address>)) {
        for (start, segment) in self.overlapping(range) {
            for access in segment.accesses.iter().filter(|access| access.manner.conflicts(manner)) {
                each(access, start.max(range.start)..segment.end.min(range.end));
            }
        }
    }

    fn overlapping(&self, range: &Range<Address>) -> impl Iterator<Item = (Address, &Segment)> {
        let before = self.segments.range(..range.start).next_back().filter(|(_, segment)| segment.end > range.start);
        before.into_iter().chain(self.segments.range(range.start..range.end)).map(|(start, segment)| (*start, segment))
    }

    /// Adds an access. `ordered` tells which earlier accesses are known to be complete before it.
    pub fn note(&mut self, range: &Range<Address>, new: &Access, ordered: impl Fn(&Access) -> bool) {
        let update = |segment: &mut Segment| {
            segment.accesses.retain(|old| !(new.replaces(old) && ordered(old)));
            segment.accesses.push(new.clone());
        };
        if let Some(segment) = self.segments.get_mut(&range.start).filter(|segment| segment.end == range.end) {
            return update(segment);
        }
        let fresh = |end| Segment { end, accesses: SmallVec::from_iter([new.clone()]) };
        let mut at = range.start;
        let mut result: Vec<(Address, Segment)> = Vec::new();
        for (start, mut segment) in self.take(range) {
            if at < start {
                append(&mut result, at, fresh(start));
            }
            at = segment.end;
            update(&mut segment);
            append(&mut result, start, segment);
        }
        if at < range.end {
            append(&mut result, at, fresh(range.end));
        }
        self.restore(result);
    }

    pub fn take(&mut self, range: &Range<Address>) -> Vec<(Address, Segment)> {
        self.split(range.start);
        self.split(range.end);
        let starts: SmallVec<[Address; 8]> =
            self.segments.range(range.start..range.end).map(|(start, _)| *start).collect();
        starts.iter().filter_map(|start| self.segments.remove_entry(start)).collect()
    }

    /// Puts back the entries of [`take`](Self::take), or other entries for the same range.
    pub fn restore(&mut self, segments: Vec<(Address, Segment)>) {
        let edges = segments.first().map(|(start, _)| *start).zip(segments.last().map(|(_, segment)| segment.end));
        self.segments.extend(segments);
        if let Some((start, end)) = edges {
            self.merge_at(start);
            self.merge_at(end);
        }
    }

    fn split(&mut self, at: Address) {
        if let Some((_, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let (end, accesses) = (segment.end, segment.accesses.clone());
            segment.end = at;
            self.segments.insert(at, Segment { end, accesses });
        }
    }

    fn merge_at(&mut self, at: Address) {
        let Some(right) = self.segments.get(&at) else { return };
        let Some((left, _)) =
            self.segments.range(..at).next_back().filter(|(_, left)| left.end == at && left.equals(right))
        else {
            return;
        };
        let (left, end) = (*left, right.end);
        self.segments.remove(&at);
        if let Some(left) = self.segments.get_mut(&left) {
            left.end = end;
        }
    }

    pub fn each(&self, mut each: impl FnMut(&Access)) {
        self.segments.values().flat_map(|segment| &segment.accesses).for_each(&mut each);
    }
}

fn append(result: &mut Vec<(Address, Segment)>, start: Address, segment: Segment) {
    match result.last_mut() {
        Some((_, last)) if last.end == start && last.equals(&segment) => last.end = segment.end,
        _ => result.push((start, segment)),
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check/shadow_tests.rs"]
mod tests;
