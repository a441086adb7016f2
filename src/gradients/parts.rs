//! Buckets as a whole: flat views, the members' parts of them, and what an optimizer does with them.
//!
//! Users see where gradients lie; `parallel::data_parallel` updates parameters, one launch for each bucket. Uses the
//! layout, the collectives of the group, and [`update`]. Invariant: parts begin at whole chunks
//! of the sums of squares, so no bit of a sum depends on the number of members.

use super::{
    GradientExchange,
    access::exclusive,
    element::Gradient,
    kernels::{
        self, SEGMENTS, Segment,
        update::{self, CHUNK, Moments, Parameter, Rule},
    },
};
use crate::{
    Device, DeviceBuffer,
    error::{Error, Result, op_site::OpSite},
    memory::{AsView, DeviceView},
    shard::balanced,
};
use smallvec::SmallVec;
use std::ops::Range;

impl<T: Gradient> GradientExchange<T> {
    /// All gradients of a bucket as one piece of memory, in the order of [`bucket`](Self::bucket), each padded with
    /// zeros to a multiple of 16 bytes. After [`finish`](Self::finish) they are the results; in buckets that are
    /// [scattered](super::GradientExchangeBuilder::scatter) only [`part`](Self::part) of it is.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, GradientExchange};
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let sums = pool.run(|dev, _| {
    ///     let mut gradients = GradientExchange::builder().ready_order(false).build(dev, &[3, 1])?;
    ///     for i in [1, 0] {
    ///         dev.fill(&mut gradients.grad_mut(i)?, 2.0)?;
    ///         gradients.ready(dev, i)?;
    ///     }
    ///     gradients.finish(dev)?;
    ///     assert_eq!(gradients.bucket(0), [1, 0]);
    ///     dev.download(&gradients.grads_in_bucket(0)?)
    /// })?;
    /// assert_eq!(sums, [[2.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.0]; 2]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
            if self.lent[gradient].is_some() {
                return Err(Error::invalid(OP, format_args!("gradient {gradient} is in memory of the caller's")));
            }
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

    pub(super) fn part_of(&self, bucket: usize, rank: usize) -> Range<usize> {
        let len = self.layout.buckets[bucket].len;
        part_of(len, rank, self.members.len())
    }

    /// The lengths of all members' parts.
    pub(crate) fn counts(&self, bucket: usize) -> SmallVec<[usize; 8]> {
        (0..self.members.len()).map(|rank| self.part_of(bucket, rank).len()).collect()
    }
}

/// The part of `len` elements that belongs to one of the members.
pub(super) fn part_of(len: usize, rank: usize, members: usize) -> Range<usize> {
    let chunks = balanced(rank, members, len.div_ceil(CHUNK));
    (chunks.start * CHUNK).min(len)..(chunks.end * CHUNK).min(len)
}

/// What an optimizer does between [`finish`](GradientExchange::finish) and the next step.
impl<T: Parameter> GradientExchange<T> {
    /// Sums of squares of a bucket.
    pub(crate) fn chunks(&self, bucket: usize) -> usize {
        self.layout.buckets[bucket].len.div_ceil(CHUNK)
    }

    /// Writes the sums of the squares of this member's part to their places among those of the bucket.
    #[track_caller]
    pub(crate) fn sum_squares(&self, dev: &Device, bucket: usize, sums: &DeviceView<'_, f64>) -> Result<()> {
        let part = self.part(bucket);
        if part.is_empty() {
            return Ok(());
        }
        let sums = sums.slice(part.start / CHUNK..part.end.div_ceil(CHUNK));
        update::squares(dev, &self.memory[bucket].slice(part), &sums)
    }

    /// Writes the norm whose square is the sum of `sums`. If buckets are scattered, the other members' sums come first;
    /// all of them are then added in the same order as on one device.
    #[track_caller]
    pub(crate) fn norm_of(&self, dev: &Device, sums: &mut DeviceBuffer<f64>, norm: &DeviceBuffer<f32>) -> Result<()> {
        if self.settings.scatter {
            // Each number is zero on all members but one, and adding zeros is exact.
            self.group(dev, "all_reduce")?.all_reduce(sums, crate::ReduceOp::Sum)?;
        }
        kernels::norm::<T>(dev, &sums.view(), &norm.view())
    }

    /// Updates the parameters of a bucket, in this member's part of it. The caller has compared their lengths.
    #[track_caller]
    pub(crate) fn update(
        &mut self,
        dev: &Device,
        bucket: usize,
        moments: &Moments<'_>,
        norm: &DeviceView<'_, f32>,
        rule: Rule,
        parameters: &mut [&mut DeviceBuffer<T>],
    ) -> Result<()> {
        let segments = self.places(bucket, self.part(bucket), parameters);
        let rule = Rule { gather: self.settings.scatter.into(), ..rule };
        for some in segments.chunks(SEGMENTS) {
            update::update(dev, &self.memory[bucket].view(), moments, norm, some, (rule, None))?;
        }
        Ok(())
    }

    /// Where buckets are scattered: gives all members the parameters that each has written to its part of a bucket.
    #[track_caller]
    pub(crate) fn gather(
        &mut self,
        dev: &Device,
        bucket: usize,
        parameters: &mut [&mut DeviceBuffer<T>],
    ) -> Result<()> {
        let memory = self.memory[bucket].view();
        if !self.settings.scatter || memory.is_empty() {
            return Ok(());
        }
        let origin = self.origin().of_bucket(bucket);
        self.group(dev, "all_gather")?.all_gather_from(origin, exclusive(memory), &self.counts(bucket))?;
        for some in self.places(bucket, 0..memory.len(), parameters).chunks(SEGMENTS) {
            let (first, last) = (some[0].start, some[some.len() - 1]);
            kernels::unpack(dev, &memory, (first, last.start + last.len - first), some, None)?;
        }
        Ok(())
    }

    /// The parts of the parameters whose gradients are in this range of a bucket.
    fn places<'a>(
        &self,
        bucket: usize,
        range: Range<usize>,
        parameters: &'a mut [&mut DeviceBuffer<T>],
    ) -> SmallVec<[Segment<'a, T>; 8]> {
        let parameters: &'a [&mut DeviceBuffer<T>] = parameters;
        let place = |&gradient: &usize| {
            let extent = self.layout.extents[gradient];
            let (start, end) = (extent.start.max(range.start), extent.range().end.min(range.end));
            let memory = (start < end).then(|| parameters[gradient].slice(start - extent.start..end - extent.start))?;
            Some(Segment { start, len: end - start, memory: Some(memory) })
        };
        self.layout.buckets[bucket].gradients.iter().filter_map(place).collect()
    }

    /// Where the elements of a gradient lie: its bucket, and its first element there.
    pub(crate) fn place(&self, gradient: usize) -> (usize, Range<usize>) {
        let extent = self.layout.extents[gradient];
        (extent.bucket, extent.range())
    }
}
