//! The buckets of an exchange, for an optimizer. [`replica`](super::replica) calls it between the exchange and the next
//! step, each for one bucket.

use crate::runtime::{CHUNK, ExchangeInternals, GroupInternals, exclusive, norm, segments::Segment};
use crate::update::{self, Moments, Parameter, Rule};
use gpu_pool::{AsView, Device, DeviceBuffer, DeviceView, ReduceOp, Result, gradients::GradientExchange};
use smallvec::SmallVec;
use std::ops::Range;

pub(super) fn chunks<T: Parameter>(exchange: &GradientExchange<T>, bucket: usize) -> usize {
    exchange.memory(bucket).len().div_ceil(CHUNK)
}

/// Where the elements of a gradient lie: its bucket, and elements of it.
#[cfg(feature = "checkpoints")]
pub(super) fn place<T: Parameter>(exchange: &GradientExchange<T>, gradient: usize) -> (usize, Range<usize>) {
    let extent = exchange.layout().extents[gradient];
    (extent.bucket, extent.range())
}

/// Adds up a bucket over all members, in a capture: there it has the bits that the exchange gives. Where buckets are
/// scattered, each member gets its part.
pub(super) fn sum<T: Parameter>(exchange: &GradientExchange<T>, dev: &Device, bucket: usize) -> Result<()> {
    let (memory, origin) = (exclusive(exchange.memory(bucket)), exchange.origin().of_bucket(bucket));
    if memory.is_empty() {
        return Ok(());
    }
    let group = exchange.group(dev, "all_reduce")?;
    if !exchange.is_scattered() {
        return group.all_reduce(&mut { memory }, ReduceOp::Sum);
    }
    let begun = group.begin_reduce_scatter(origin, memory, &exchange.counts(bucket), ReduceOp::Sum, false)?;
    begun.map_or(Ok(()), |begun| begun.end(&group))
}

/// Writes the sums of the squares of this member's part to their places among those of the bucket.
pub(super) fn sum_squares<T: Parameter>(
    exchange: &GradientExchange<T>,
    dev: &Device,
    bucket: usize,
    sums: &DeviceView<'_, f64>,
) -> Result<()> {
    let part = exchange.part(bucket);
    if part.is_empty() {
        return Ok(());
    }
    let sums = sums.slice(part.start / CHUNK..part.end.div_ceil(CHUNK));
    update::squares(dev, &exchange.memory(bucket).slice(part), &sums)
}

/// The norm's square is the sum of `sums`. If scattered, other members' sums come first; all are added in one order.
pub(super) fn norm_of<T: Parameter>(
    exchange: &GradientExchange<T>,
    dev: &Device,
    sums: &mut DeviceBuffer<f64>,
    out: &DeviceBuffer<f32>,
) -> Result<()> {
    if exchange.is_scattered() {
        // Each number is zero on all members but one, and adding zeros is exact.
        exchange.group(dev, "all_reduce")?.all_reduce(sums, ReduceOp::Sum)?;
    }
    norm::<T>(dev, &sums.view(), &out.view())
}

/// Updates the parameters of a bucket, in this member's part of it. The caller has compared their lengths.
pub(super) fn update<T: Parameter>(
    exchange: &mut GradientExchange<T>,
    dev: &Device,
    bucket: usize,
    (moments, norm): (&Moments<'_>, &DeviceView<'_, f32>),
    (rule, graph_rule): (Rule, Option<&DeviceView<'_, u32>>),
    parameters: &mut [&mut DeviceBuffer<T>],
) -> Result<()> {
    let segments = places(exchange, bucket, exchange.part(bucket), parameters);
    update::update(dev, &exchange.memory(bucket), moments, norm, &segments, (rule, graph_rule))
}

/// Where buckets are scattered: gives all members the parameters that each has written to its part of a bucket.
pub(super) fn gather<T: Parameter>(
    exchange: &mut GradientExchange<T>,
    dev: &Device,
    bucket: usize,
    parameters: &mut [&mut DeviceBuffer<T>],
) -> Result<()> {
    let memory = exchange.memory(bucket);
    if !exchange.is_scattered() || memory.is_empty() {
        return Ok(());
    }
    let origin = exchange.origin().of_bucket(bucket);
    exchange.group(dev, "all_gather")?.all_gather_from(origin, exclusive(memory), &exchange.counts(bucket))?;
    update::bring_back(dev, &memory, &places(exchange, bucket, 0..memory.len(), parameters))
}

/// The parts of the parameters whose gradients are in this range of a bucket.
fn places<'a, T: Parameter>(
    exchange: &GradientExchange<T>,
    bucket: usize,
    range: Range<usize>,
    parameters: &'a mut [&mut DeviceBuffer<T>],
) -> SmallVec<[Segment<'a, T>; 8]> {
    let parameters: &'a [&mut DeviceBuffer<T>] = parameters;
    let layout = exchange.layout();
    let place = |&gradient: &usize| {
        let extent = layout.extents[gradient];
        let (start, end) = (extent.start.max(range.start), extent.range().end.min(range.end));
        let memory = (start < end).then(|| parameters[gradient].slice(start - extent.start..end - extent.start))?;
        Some(Segment { start, len: end - start, memory: Some(memory) })
    };
    layout.buckets[bucket].gradients.iter().filter_map(place).collect()
}
