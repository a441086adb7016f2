//! `kernels/sharded.cu`: the whole step of a divided optimizer by one kernel of each member, as an [`Algorithm`].
//!
//! [`sharded`](super::super::sharded) uses it where kernels can meet, and [`together`](super::super::together) uses
//! [`Buckets`] for gradients that are added up already. They have no host kernels. Invariant: the bits are those of the
//! separate calls, and everything that the number of blocks depends on is equal on all members.

use super::{
    SEGMENTS, Segment, push_table, slice,
    update::{CHUNK, Moments, Parameter, Rule, push_later, push_moments},
    value,
};
use crate::{
    Element, ReduceOp,
    collective::{
        algorithm::{About, Algorithm, Matched, MeetBy, Member, Needs, Scratch},
        case::Case,
        kernels::{Entry, code, eights},
    },
    error::Result,
    fabric::{
        layout::{BLOCKS, DeviceBarrier, MOST},
        limits::Limits,
        plan::Side,
        types,
    },
    kernel::builtin::SHARDED,
    memory::DeviceView,
};
use std::{marker::PhantomData, ops::Range};

/// What one member's kernel is given besides the memory that the members lend each other. A norm is asked for where
/// gradients are clipped.
pub(in super::super) struct OneKernel<'a, T: Parameter> {
    pub reduce: ReduceOp,
    pub rule: Rule,
    /// The memory of a rule that counts in place of `rule`: for graphs.
    pub later: Option<DeviceView<'a, u32>>,
    pub moments: Moments<'a>,
    pub norm: Option<DeviceView<'a, f32>>,
    /// Packets for the member's own chunks, of 16 bytes each, with zeros at first. Without it, members meet for a norm.
    pub told: Option<DeviceView<'a, u64>>,
    /// Elements of all members, and those of this one.
    pub len: usize,
    pub part: Range<usize>,
    /// Elements of the largest part.
    pub largest: usize,
    /// The member's own parameters in its part.
    pub segments: &'a [Segment<'a, T>],
}

pub(in super::super) fn entry<T: Parameter>() -> Entry {
    Entry { module: &SHARDED, name: T::SHARDED, host: None }
}

/// Blocks of the kernel: a chunk for each, then for each of its warps. The second meeting waits for all of them, so all
/// are on the device at once: that is what the limits are for.
fn blocks(largest: usize, limits: &Limits) -> u32 {
    (largest.div_ceil(CHUNK).clamp(1, BLOCKS as usize) as u32).min(limits.exchange_blocks)
}

impl<T: Parameter> Algorithm for OneKernel<'_, T> {
    fn about(&self) -> About {
        About { name: "sharded", group: types::Algorithm::Direct, waits_by: "flags" }
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        case.meets_on_devices().then_some("one kernel adds up, updates and sends")
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        let sums = if self.norm.is_some() { self.len.div_ceil(CHUNK) * size_of::<f64>() } else { 0 };
        Needs {
            meeting: MeetBy::Kernels { launches: 1, in_full: true },
            scratch: Scratch::device(std::iter::once(sums)),
        }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        blocks(self.largest, case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let addresses = self.addresses(member, matched);
        let args = self.args(member.barrier, addresses);
        member.launch(&entry::<T>(), blocks(self.largest, member.limits), &args)
    }
}

/// By rank: gradients, destinations, sums of squares.
type Addresses = [[u64; MOST]; 3];

impl<T: Parameter> OneKernel<'_, T> {
    fn addresses(&self, member: &Member<'_>, matched: &Matched<'_>) -> Addresses {
        let n = member.count();
        [
            matched.addresses(n, Side::Source),
            matched.addresses(n, Side::Destination),
            std::array::from_fn(|rank| match &self.norm {
                Some(_) if rank < n => matched.recv_scratch(rank).address,
                _ => 0,
            }),
        ]
    }

    pub(super) fn args(&self, meet: DeviceBarrier, addresses: Addresses) -> super::Arguments {
        debug_assert!(self.segments.len() <= SEGMENTS);
        debug_assert!(self.part.start.is_multiple_of(CHUNK) || self.part.is_empty());
        let mut args = super::Arguments::new();
        args.push(value(meet));
        args.push(value(code(self.reduce)));
        args.push(value(self.rule));
        push_later(&mut args, self.later.as_ref());
        push_moments(&mut args, &self.moments);
        args.push(match &self.norm {
            Some(norm) => slice(norm.address(), size_of::<f32>(), true),
            None => value(0u64),
        });
        args.push(match &self.told {
            Some(told) => slice(told.address(), told.bytes().len(), true),
            None => value(0u64),
        });
        args.push(value(self.part.start as u64));
        args.push(value(self.part.end as u64));
        args.push(value(self.len.div_ceil(CHUNK) as u64));
        args.push(value(self.segments.len() as u32));
        addresses.iter().for_each(|column| args.extend(eights(column)));
        push_table(&mut args, self.segments, true);
        args
    }
}

/// What one member's kernel is given for buckets. The destination of the collective is the memory of all squares.
pub(in super::super) struct Buckets<'a, T: Parameter> {
    pub rule: Rule,
    pub norm: DeviceView<'a, f32>,
    /// The table of pieces, and their number.
    pub pieces: DeviceView<'a, u64>,
    pub count: usize,
    /// This member's chunks, those of the member that has most, and all.
    pub own: usize,
    pub largest: usize,
    pub chunks: usize,
    pub of: PhantomData<T>,
}

pub(in super::super) fn entry_of_buckets<T: Parameter>() -> Entry {
    Entry { module: &SHARDED, name: T::SHARDED_BUCKETS, host: None }
}

/// Words of a piece without the addresses of parameters, of which each member has one: `Word` of the device code.
pub(in super::super) const PIECE: usize = 7;

impl<T: Parameter> Algorithm for Buckets<'_, T> {
    fn about(&self) -> About {
        About { name: "sharded_buckets", group: types::Algorithm::Direct, waits_by: "flags" }
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        case.meets_on_devices().then_some("one kernel exchanges squares, updates and sends")
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::ONE_KERNEL
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        blocks(self.largest * CHUNK, case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let sums = matched.addresses(member.count(), Side::Destination);
        let args = self.args(member.barrier, &sums);
        member.launch(&entry_of_buckets::<T>(), blocks(self.largest * CHUNK, member.limits), &args)
    }
}

impl<T: Parameter> Buckets<'_, T> {
    pub(super) fn args(&self, meet: DeviceBarrier, sums: &[u64; MOST]) -> super::Arguments {
        let mut args = super::Arguments::new();
        args.push(value(meet));
        args.push(value(self.rule));
        args.push(slice(self.norm.address(), size_of::<f32>(), true));
        args.push(slice(self.pieces.address(), self.pieces.bytes().len(), false));
        args.push(value(self.count as u32));
        args.push(value(self.own as u64));
        args.push(value(self.chunks as u64));
        args.extend(eights(sums));
        args
    }
}

/// Whether the kernel can read and write this memory: by 16 bytes.
pub(in super::super) fn is_aligned<T: Element>(view: &DeviceView<'_, T>) -> bool {
    view.address().is_multiple_of(16)
}
