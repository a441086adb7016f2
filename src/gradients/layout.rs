//! The layout: which gradient lies where, in which bucket. Pure arithmetic.
//!
//! Invariant: the gradients of a bucket tile it without gaps, each at a multiple of the grain.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use crate::error::{Error, Result};
use std::{ops::Range, panic::Location};

#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Bytes of an element.
    bytes: usize,
    /// Gradients begin at multiples of this many elements: at least 16 bytes, so that matrix products write them at
    /// full speed. The kernels use the same number.
    grain: usize,
}

impl Unit {
    pub const fn of<T>() -> Self {
        Unit { bytes: size_of::<T>(), grain: if size_of::<T>() == 2 { 8 } else { 4 } }
    }

    /// `len`, rounded up to whole grains.
    pub fn padded(self, len: usize) -> usize {
        len.next_multiple_of(self.grain)
    }
}

/// Where a gradient lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub bucket: usize,
    pub start: usize,
    pub len: usize,
    pub padded: usize,
}

impl Extent {
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    pub len: usize,
    /// In memory order.
    pub gradients: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// By gradient.
    pub extents: Vec<Extent>,
    /// In the order in which they are exchanged.
    pub buckets: Vec<Bucket>,
}

impl Layout {
    /// Fills buckets in the given order, as DDP does. A bucket is full when it has reached its size: so a gradient
    /// larger than that shares its bucket only with the gradients before it. The first bucket has a size of its own, so
    /// that the exchange begins early.
    #[track_caller]
    pub fn new(unit: Unit, sizes: &[usize], order: &[usize], (first_bytes, bytes): (usize, usize)) -> Result<Self> {
        let site = Location::caller();
        let too_many = || Error::invalid_at(site, "GradientExchange", "more elements than there are addresses");
        let mut extents = vec![Extent { bucket: 0, start: 0, len: 0, padded: 0 }; sizes.len()];
        let mut buckets: Vec<Bucket> = Vec::new();
        let (mut total, mut full) = (0usize, true);
        for &gradient in order {
            if full {
                buckets.push(Bucket { len: 0, gradients: Vec::new() });
            }
            let (bucket, len) = (buckets.len() - 1, sizes[gradient]);
            let open = &mut buckets[bucket];
            let padded = len.checked_next_multiple_of(unit.grain).ok_or_else(too_many)?;
            extents[gradient] = Extent { bucket, start: open.len, len, padded };
            total = total.checked_add(padded).filter(|total| *total <= isize::MAX as usize / 8).ok_or_else(too_many)?;
            open.len += padded;
            open.gradients.push(gradient);
            full = open.len * unit.bytes >= if bucket == 0 { first_bytes } else { bytes };
        }
        Ok(Layout { extents, buckets })
    }

    pub fn largest(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.len).max().unwrap_or(0)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/gradients/layout_tests.rs"]
mod tests;
