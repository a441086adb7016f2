//! Buckets as a whole: flat views, and the members' parts of them. Invariant: parts begin at whole chunks of the sums
//! of squares, so no bit of a sum depends on the number of members.

use super::{GradientExchange, element::Gradient, layout::Layout};
use crate::{
    error::{Error, Result, op_site::OpSite},
    memory::{AsView, DeviceView},
    shard::balanced,
};
use smallvec::SmallVec;
use std::ops::Range;

/// Elements of a sum of squares. Parts of a bucket begin at multiples, so that the sums do not depend on the parts.
pub const CHUNK: usize = 2048;

impl<T: Gradient> GradientExchange<T> {
    /// All gradients of a bucket as one piece of memory, in the order of [`bucket`](Self::bucket), each padded with
    /// zeros to a multiple of 16 bytes. After [`finish`](Self::finish) they are the results; in buckets that are
    /// [scattered](super::GradientExchangeBuilder::scatter) only [`part`](Self::part) of it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such bucket, it is being exchanged, or one of its gradients is in
    /// memory that was [lent](Self::lend).
    #[track_caller]
    pub fn grads_in_bucket(&self, bucket: usize) -> Result<DeviceView<'_, T>> {
        let _here = OpSite::here("grads_in_bucket");
        const OP: &str = "grads_in_bucket";
        let Some(gradients) = self.layout.buckets.get(bucket).map(|bucket| &bucket.gradients) else {
            return Err(Error::invalid(OP, format_args!("bucket {bucket} of {}", self.buckets())));
        };
        for &gradient in gradients {
            self.grad(gradient)?;
            invalid_if!(self.lent[gradient].is_some(), OP, "gradient {gradient} is in memory of the caller's");
        }
        Ok(self.memory[bucket].view())
    }

    /// The elements of a bucket that are results on this member after [`finish`](Self::finish): all of them, unless
    /// buckets are [scattered](super::GradientExchangeBuilder::scatter). Parts begin at multiples of 2048 elements, and
    /// differ by at most that; the parts of all members, by rank, are the bucket without a gap.
    ///
    /// # Panics
    /// When there is no such bucket.
    #[track_caller]
    pub fn part(&self, bucket: usize) -> Range<usize> {
        match self.settings.scatter {
            true => self.part_of(bucket, self.rank),
            false => 0..self.layout.buckets[bucket].len,
        }
    }

    pub(crate) fn part_of(&self, bucket: usize, rank: usize) -> Range<usize> {
        let len = self.layout.buckets[bucket].len;
        part_of(len, rank, self.home.count())
    }

    pub(crate) fn memory(&self, bucket: usize) -> DeviceView<'_, T> {
        self.memory[bucket].view()
    }

    pub(crate) fn is_scattered(&self) -> bool {
        self.settings.scatter
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn counts(&self, bucket: usize) -> SmallVec<[usize; 8]> {
        (0..self.home.count()).map(|rank| self.part_of(bucket, rank).len()).collect()
    }
}

/// The part of `len` elements that belongs to one of the members.
pub fn part_of(len: usize, rank: usize, members: usize) -> Range<usize> {
    let chunks = balanced(rank, members, len.div_ceil(CHUNK));
    (chunks.start * CHUNK).min(len)..(chunks.end * CHUNK).min(len)
}
