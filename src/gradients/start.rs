//! Starts a bucket: packs it if needed, reduces it, and unpacks it, on the stream of its priority. A bucket that a
//! thread carries between processes is only [begun](PendingReduce), and unpacked when it
//! [lands](GradientExchange::land). Invariant: bits do not depend on where a member has its gradients.

use super::kernels::{self, SEGMENTS};
use super::{GradientExchange, Segment, access::exclusive, element::Gradient, settings::Wire, zeros};
use crate::{
    DType, Device, DeviceBuffer, Element, Event, ReduceOp, Stream,
    collective::{PendingReduce, ops::all_reduce},
    error::Result,
    memory::{AsView, DeviceView, DeviceViewMut},
};
use half::{bf16, f16};
use smallvec::SmallVec;
use std::ops::Range;

/// Memory for buckets that travel in another type; as large as the largest bucket.
pub(super) enum Scratch {
    Same,
    F32(DeviceBuffer<f32>),
    F16(DeviceBuffer<f16>),
    Bf16(DeviceBuffer<bf16>),
}

impl Scratch {
    /// For gradients of type `own`. `apart`: in a chunk of its own.
    pub fn new(dev: &Device, wire: Wire, own: DType, len: usize, apart: bool) -> Result<Self> {
        Ok(match wire.dtype(own) {
            same if same == own => Scratch::Same,
            DType::F16 => Scratch::F16(zeros(dev, len, apart)?),
            DType::BF16 => Scratch::Bf16(zeros(dev, len, apart)?),
            _ => Scratch::F32(zeros(dev, len, apart)?),
        })
    }
}

pub(super) struct Sums<T: Gradient> {
    pub partial: DeviceBuffer<f64>,
    /// By bucket: the range of its partial sums.
    pub slots: Vec<Range<usize>>,
    pub norm: DeviceBuffer<T::Norm>,
}

impl<T: Gradient> GradientExchange<T> {
    /// Starts a bucket; gradients that are not ready count as zero. All members start the same buckets in one order.
    pub(super) fn start(&mut self, dev: &Device, bucket: usize) -> Result<()> {
        let written = std::mem::take(&mut self.written[bucket]);
        // The caller's stream may be unordered; buckets are always ordered by the library.
        let ordered = dev.in_order();
        let comm = ordered.on(self.stream(bucket));
        for written in &written {
            comm.wait(written)?;
        }
        let begun = match &self.scratch {
            Scratch::Same => self.start_in_place(&comm, bucket)?,
            Scratch::F32(wire) => self.start_through(&comm, bucket, wire)?,
            Scratch::F16(wire) => self.start_through(&comm, bucket, wire)?,
            Scratch::Bf16(wire) => self.start_through(&comm, bucket, wire)?,
        };
        if begun.is_some() {
            self.travelling[bucket] = begun;
            return Ok(());
        }
        let reduced = self.unpack(&comm, bucket)?;
        self.reduced[bucket] = Some(reduced);
        Ok(())
    }

    /// Waits for the buckets up to this one and unpacks them. All members of this process call it with the same `last`.
    pub(super) fn land(&mut self, dev: &Device, last: usize) -> Result<()> {
        for bucket in 0..self.buckets().min(last + 1) {
            let Some(begun) = self.travelling[bucket].take() else { continue };
            let ordered = dev.in_order();
            let comm = ordered.on(self.stream(bucket));
            begun.end(&self.group(&comm, "all_reduce")?)?;
            let reduced = self.unpack(&comm, bucket)?;
            self.reduced[bucket] = Some(reduced);
        }
        Ok(())
    }

    /// Returns the event behind it all.
    fn unpack(&self, comm: &Device, bucket: usize) -> Result<Event> {
        let len = self.layout.buckets[bucket].len;
        match &self.scratch {
            Scratch::Same => {
                let segments = self.segments(bucket, &|i| self.lent[i].is_some(), &|_| true);
                self.bring_back(comm, bucket, &self.memory[bucket].view(), &segments)?;
            }
            Scratch::F32(wire) => self.bring_all_back(comm, bucket, &wire.slice(..len))?,
            Scratch::F16(wire) => self.bring_all_back(comm, bucket, &wire.slice(..len))?,
            Scratch::Bf16(wire) => self.bring_all_back(comm, bucket, &wire.slice(..len))?,
        }
        comm.record()
    }

    fn bring_all_back<W: Element>(&self, comm: &Device, bucket: usize, wire: &DeviceView<'_, W>) -> Result<()> {
        let segments = self.segments(bucket, &|_| true, &|_| true);
        self.bring_back(comm, bucket, wire, &segments)
    }

    fn stream(&self, bucket: usize) -> &Stream {
        let priority = self.settings.priority(bucket);
        let found = self.streams.iter().find(|(at, _)| *at == priority);
        &found.expect("there is one for every priority").1
    }

    fn start_in_place(&self, comm: &Device, bucket: usize) -> Result<Option<Box<dyn PendingReduce>>> {
        // Gradients inside the bucket need no packing.
        let away = |i: usize| !self.readiness.is_used(i) || self.lent[i].is_some();
        let segments = self.segments(bucket, &away, &|i| self.readiness.is_used(i));
        let wire = self.memory[bucket].view();
        for some in segments.chunks(SEGMENTS) {
            kernels::pack(comm, some, 1.0, &wire)?;
        }
        self.bring_sum(comm, bucket)?;
        let op = match self.settings.reduce {
            ReduceOp::Scaled(_) => ReduceOp::Scaled(self.weight),
            other => other,
        };
        self.sum(comm, bucket, exclusive(wire), op)
    }

    /// All buckets but the last overlap the backward pass. Two H200s, a perceptron 784-2048-2048-10 with 8192 rows, a
    /// bucket of 17 MB: a step's exposed time is 116 us with 64 blocks, 108 with 16, 34 with 8 or by copy engines.
    fn sum<W: Element>(
        &self,
        comm: &Device,
        bucket: usize,
        wire: DeviceViewMut<'_, W>,
        op: ReduceOp,
    ) -> Result<Option<Box<dyn PendingReduce>>> {
        let (group, origin) = (self.group(comm, "all_reduce")?, self.origin().of_bucket(bucket));
        let overlapped = bucket + 1 < self.buckets();
        if self.settings.scatter {
            return group.begin_reduce_scatter(origin, wire, &self.counts(bucket), op, overlapped);
        }
        group.begin(all_reduce(origin, wire, op), overlapped)
    }

    fn start_through<W: Element>(
        &self,
        comm: &Device,
        bucket: usize,
        scratch: &DeviceBuffer<W>,
    ) -> Result<Option<Box<dyn PendingReduce>>> {
        // Weights are applied before the type gets narrow; averages after the sum, in f32, where nothing overflows.
        let (factor, op) = match self.settings.reduce {
            ReduceOp::Scaled(_) => (self.weight, ReduceOp::Sum),
            other => (1.0, other),
        };
        let segments = self.segments(bucket, &|_| true, &|i| self.readiness.is_used(i));
        let wire = scratch.slice(..self.layout.buckets[bucket].len);
        for some in segments.chunks(SEGMENTS) {
            kernels::pack(comm, some, factor, &wire)?;
        }
        self.sum(comm, bucket, exclusive(wire), op)
    }

    fn bring_back<W: Element>(
        &self,
        comm: &Device,
        bucket: usize,
        wire: &DeviceView<'_, W>,
        segments: &[Segment<'_, T>],
    ) -> Result<()> {
        let all = (0, wire.len());
        let partial = self.sums.as_ref().map(|sums| sums.partial.slice(sums.slots[bucket].clone()));
        if wire.is_empty() {
            return Ok(());
        }
        // One launch may do both only if that does not depend on where a member has its gradients: else the bits of the
        // sums would differ between members.
        if partial.is_some() && self.layout.buckets[bucket].gradients.len() <= SEGMENTS {
            return kernels::unpack(comm, wire, all, segments, partial);
        }
        for some in segments.chunks(SEGMENTS) {
            let (first, last) = (some[0].start, some[some.len() - 1]);
            kernels::unpack(comm, wire, (first, last.start + last.len - first), some, None)?;
        }
        partial.map_or(Ok(()), |partial| kernels::unpack::<T, W>(comm, wire, all, &[], Some(partial)))
    }

    /// Segments of the `wanted` gradients of a bucket, with memory if `filled`. Neighbours in memory, too, share one.
    pub(super) fn segments(
        &self,
        bucket: usize,
        wanted: &dyn Fn(usize) -> bool,
        filled: &dyn Fn(usize) -> bool,
    ) -> SmallVec<[Segment<'_, T>; 8]> {
        let memory = &self.memory[bucket];
        let mut found: SmallVec<[Segment<'_, T>; 8]> = SmallVec::new();
        // Whether the last segment lies in the bucket, or nowhere: then the next gradient of that kind extends it.
        let mut open = None;
        for &gradient in &self.layout.buckets[bucket].gradients {
            let extent = self.layout.extents[gradient];
            if extent.len == 0 {
                continue;
            }
            if !wanted(gradient) {
                open = None;
                continue;
            }
            let kind = match &self.lent[gradient] {
                _ if !filled(gradient) => Some(false),
                None => Some(true),
                Some(_) => None,
            };
            if let (Some(in_bucket), Some(last)) = (kind.filter(|_| kind == open), found.last_mut()) {
                last.len += extent.padded;
                last.memory = in_bucket.then(|| memory.slice(last.start..last.start + last.len));
                continue;
            }
            let (start, padded) = (extent.start, extent.padded);
            let (len, memory) = match (kind, &self.lent[gradient]) {
                (None, Some(lent)) => (extent.len, Some(lent.view())),
                (Some(true), _) => (padded, Some(memory.slice(start..start + padded))),
                _ => (padded, None),
            };
            found.push(Segment { start, len, memory });
            open = kind;
        }
        found
    }

    /// Computes the norm behind the last bucket, once that has landed.
    pub(super) fn start_norm(&mut self, dev: &Device) -> Result<()> {
        let Some(sums) = self.sums.as_ref().filter(|_| self.normed.is_none()) else { return Ok(()) };
        if self.travelling.iter().any(Option::is_some) {
            return Ok(());
        }
        let last = self.layout.buckets.len().saturating_sub(1);
        let ordered = dev.in_order();
        let comm = ordered.on(self.stream(last));
        kernels::norm::<T>(&comm, &sums.partial.view(), &sums.norm.view())?;
        let normed = comm.record()?;
        self.normed = Some(normed);
        Ok(())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/gradients/start_tests.rs"]
mod tests;
