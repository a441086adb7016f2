//! A set of bytes, as ranges.

use gpu_pool::extend::driver::Address;
use std::{collections::BTreeMap, ops::Range};

/// Ranges by their start; they neither overlap nor touch.
#[derive(Clone, Default)]
pub(super) struct Ranges(BTreeMap<Address, Address>);

impl Ranges {
    pub fn full(range: Range<Address>) -> Self {
        Ranges(BTreeMap::from([(range.start, range.end)]))
    }

    pub fn add(&mut self, mut range: Range<Address>) {
        while let Some((&start, &end)) = self.0.range(..=range.end).next_back()
            && end >= range.start
        {
            if start <= range.start && end >= range.end {
                return;
            }
            range = start.min(range.start)..end.max(range.end);
            self.0.remove(&start);
        }
        self.0.insert(range.start, range.end);
    }

    pub fn first_gap(&self, range: &Range<Address>) -> Option<Range<Address>> {
        let before = self.0.range(..=range.start).next_back().map_or(0, |(_, &end)| end);
        let start = range.start.max(before);
        if start >= range.end {
            return None;
        }
        let end = self.0.range(start..range.end).next().map_or(range.end, |(&next, _)| next);
        Some(start..end)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check/ranges_tests.rs"]
mod tests;
