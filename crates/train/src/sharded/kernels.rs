//! `kernels/sharded.cu`: the whole step of a divided optimizer by one kernel of each member.
//!
//! [`step`](super::step) uses it where kernels can meet, and `data_parallel::together` for gradients in buckets.
//! Invariant: the bits are those of separate calls, and what the number of blocks depends on is equal on all members.

use crate::kernels::SHARDED;
use crate::runtime::{
    Addresses, CHUNK, DeviceBarrier, MeetingKernel, code, eights,
    segments::{Arguments, SEGMENTS, Segment, push_table, value},
};
use crate::update::{Moments, Parameter, Rule, memory};
use gpu_pool::{DeviceView, Module, ReduceOp};
use std::{marker::PhantomData, ops::Range};

/// Arguments of the fused kernel, besides the memory that members lend each other. `norm`: if gradients are clipped.
pub(crate) struct OneKernel<'a, T: Parameter> {
    pub reduce: ReduceOp,
    pub rule: Rule,
    /// The memory of a rule that counts in place of `rule`: for graphs.
    pub graph_rule: Option<DeviceView<'a, u32>>,
    pub moments: Moments<'a>,
    pub norm: Option<DeviceView<'a, f32>>,
    /// Packets for the member's own chunks, of 16 bytes each, with zeros at first. Without it, members meet for a norm.
    pub block_flags: Option<DeviceView<'a, u64>>,
    /// Elements of all members, and those of this one.
    pub len: usize,
    pub part: Range<usize>,
    pub largest: usize,
    /// The member's own parameters in its part.
    pub segments: &'a [Segment<'a, T>],
}

pub(crate) fn entry<T: Parameter>() -> (&'static Module, &'static str) {
    (&SHARDED, T::SHARDED)
}

impl<T: Parameter> MeetingKernel for OneKernel<'_, T> {
    fn about(&self) -> (&'static str, &'static str) {
        ("sharded", "one kernel adds up, updates and sends")
    }

    fn entry(&self) -> (&'static Module, &'static str) {
        entry::<T>()
    }

    /// A chunk for each, then for each of its warps.
    fn blocks(&self) -> usize {
        self.largest.div_ceil(CHUNK)
    }

    fn scratch(&self) -> (usize, bool) {
        let sums = if self.norm.is_some() { self.len.div_ceil(CHUNK) * size_of::<f64>() } else { 0 };
        (sums, true)
    }

    fn args(&self, meet: DeviceBarrier, addresses: &Addresses) -> Arguments {
        debug_assert!(self.segments.len() <= SEGMENTS);
        debug_assert!(self.part.start.is_multiple_of(CHUNK) || self.part.is_empty());
        let mut args = Arguments::new();
        args.extend([value(meet), value(code(self.reduce)), value(self.rule)]);
        args.push(memory(self.graph_rule.as_ref(), false));
        args.extend(self.moments.args());
        args.extend([memory(self.norm.as_ref(), true), memory(self.block_flags.as_ref(), true)]);
        args.extend([self.part.start, self.part.end, self.len.div_ceil(CHUNK)].map(|n| value(n as u64)));
        args.push(value(self.segments.len() as u32));
        addresses.iter().for_each(|column| args.extend(eights(column)));
        push_table(&mut args, self.segments, true);
        args
    }
}

/// The arguments of one member's kernel for buckets. The destination of the collective is the memory of all squares.
pub(crate) struct Buckets<'a, T: Parameter> {
    pub rule: Rule,
    /// In a graph: the memory of a rule that counts in place of `rule`. The gradients are not added up yet, and nothing
    /// changes after a norm that was not finite.
    pub graph_rule: Option<DeviceView<'a, u32>>,
    pub norm: DeviceView<'a, f32>,
    /// The table of pieces, and their number.
    pub pieces: DeviceView<'a, u64>,
    pub count: usize,
    pub own: usize,
    pub largest: usize,
    pub chunks: usize,
    pub of: PhantomData<T>,
}

pub(crate) fn entry_of_buckets<T: Parameter>() -> (&'static Module, &'static str) {
    (&SHARDED, T::SHARDED_BUCKETS)
}

/// Words of a piece of so many members: `Word` of the device code.
pub(crate) fn words(members: usize) -> usize {
    6 + 2 * members
}

impl<T: Parameter> MeetingKernel for Buckets<'_, T> {
    fn about(&self) -> (&'static str, &'static str) {
        ("sharded_buckets", "one kernel exchanges squares, updates and sends; in a graph it adds up, too")
    }

    fn entry(&self) -> (&'static Module, &'static str) {
        entry_of_buckets::<T>()
    }

    fn blocks(&self) -> usize {
        self.largest
    }

    fn scratch(&self) -> (usize, bool) {
        (0, false)
    }

    fn args(&self, meet: DeviceBarrier, [_, sums, _]: &Addresses) -> Arguments {
        let mut args = Arguments::new();
        args.extend([value(meet), value(self.rule), memory(self.graph_rule.as_ref(), false)]);
        args.push(value(u32::from(self.graph_rule.is_some())));
        args.extend([memory(Some(&self.norm), true), memory(Some(&self.pieces), false)]);
        args.extend([value(self.count as u32), value(self.own as u64), value(self.chunks as u64)]);
        args.extend(eights(sums));
        args
    }
}
