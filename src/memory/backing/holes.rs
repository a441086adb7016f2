//! Where in a window to map or move memory: arithmetic on holes, without a driver.
//!
//! ```text
//!   ... | in use |  free: before |        hole        | free: after | in use | ...
//!                                ^ filled from the low end up, or from the high end down, or wholly
//! ```
//!
//! Called by [`vmm`](super::vmm) only.

use crate::driver::Address;
use std::ops::Range;

/// A hole, and the free bytes on both sides of it.
#[derive(Clone, Debug)]
pub(super) struct Hole {
    pub range: Range<Address>,
    pub before: u64,
    pub after: u64,
}

pub(super) type Unit = Range<Address>;

impl Hole {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The part of the hole to fill so that `bytes` free bytes lie together, if that is possible.
    fn fill(&self, bytes: u64, granularity: u64) -> Option<Range<Address>> {
        let Range { start, end } = self.range;
        let missing = |adjacent: u64| bytes.saturating_sub(adjacent).next_multiple_of(granularity);
        let (low, high) = (missing(self.before), missing(self.after));
        if low <= high.min(self.len()) {
            return Some(start..start + low);
        }
        if high <= self.len() {
            return Some(end - high..end);
        }
        (self.before + self.len() + self.after >= bytes).then_some(start..end)
    }

    /// The units to place from the hole's low end up so that `bytes` free bytes lie together, and their sum. The free
    /// memory beside the hole is counted, so it must not move.
    fn fill_with(&self, bytes: u64, from: &[Unit]) -> Option<(u64, Vec<Unit>)> {
        let Range { start, end } = self.range;
        // Units of `missing` bytes in all, from outside of the range that begins with the free memory before the hole.
        let choose = |missing: u64, end: Address| {
            let (mut sum, mut chosen) = (0, Vec::new());
            for unit in from.iter().filter(|unit| unit.end <= start - self.before || unit.start >= end) {
                let len = unit.end - unit.start;
                if sum < missing && sum + len <= self.len() {
                    sum += len;
                    chosen.push(unit.clone());
                }
            }
            (sum >= missing).then_some((sum, chosen))
        };
        choose(bytes.saturating_sub(self.before), end).or_else(|| {
            // The whole hole, between the free memory on both sides.
            let enough = self.before + self.len() + self.after >= bytes;
            choose(self.len(), end + self.after).filter(|_| enough)
        })
    }
}

/// The smallest range to fill (the lowest among equals) for `bytes` free bytes together; empty if nothing is missing.
pub(super) fn to_fill(holes: &[Hole], bytes: u64, granularity: u64) -> Option<Range<Address>> {
    let places = holes.iter().filter_map(|hole| hole.fill(bytes, granularity));
    places.min_by_key(|place| place.end - place.start)
}

/// The units to move, and their new address, so that `bytes` free bytes lie together: as few bytes as possible.
pub(super) fn to_move(holes: &[Hole], bytes: u64, from: &[Unit]) -> Option<(Address, Vec<Unit>)> {
    let places = holes.iter().filter_map(|hole| Some((hole.range.start, hole.fill_with(bytes, from)?)));
    let (at, (sum, units)) = places.min_by_key(|(_, (sum, _))| *sum)?;
    (sum > 0).then_some((at, units))
}

#[cfg(test)]
#[path = "../../../tests/unit/memory/backing/holes_tests.rs"]
mod tests;
