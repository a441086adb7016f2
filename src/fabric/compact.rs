//! The compact descriptor: all that a peer needs to know of a collective whose kernels meet on the devices, in one
//! message of a ring or one [broadcast](super::broadcast). A [`Descriptor`](super::descriptor::Descriptor) is shared
//! memory, whose lines a peer fetches one by one: the main cost of a meeting.
//!
//! Invariant: it need not keep the peers' memory alive. A member's stream passes the collective only after the peers'
//! kernels (the exit rule), and the member's own hazards keep its memory until then.

use super::{Call, DType, Origin, ReduceOp, Side, ThenNorm, broadcast::Words};
use crate::{
    driver::Address,
    error::{OpId, SiteId, site_id},
};

/// Marks an empty byte of a broadcast.
const NONE: u64 = 0xff;
/// Reductions by their number in a broadcast. The one with a factor has the number after them.
const REDUCTIONS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CompactDescriptor {
    origin: Origin,
    op: OpId,
    site: SiteId,
    count: usize,
    reduce: Option<ReduceOp>,
    /// Ordinals of the group's members, 4 bits each, by rank; and their number.
    members: (u64, u8),
    dtype: Option<DType>,
    root: Option<u32>,
    norm: ThenNorm,
    source: Address,
    destination: Address,
}

impl CompactDescriptor {
    /// Of a call on buffers at these addresses; 0: the member has none. None if the call has more parts than fit.
    pub(crate) fn of(call: &Call, members: (u64, u8), [source, destination]: [Address; 2]) -> Option<Self> {
        let &Call { origin, op, site, count, reduce, .. } = call;
        let dtype = call.dtype.filter(|_| call.counts.is_none() && call.of.is_none());
        dtype?;
        let root = call.root.map(|root| root as u32);
        let (op, site) = site_id::ids(op, site);
        let norm = call.norm;
        Some(CompactDescriptor { origin, op, site, count, reduce, members, dtype, root, norm, source, destination })
    }

    /// Of a call without elements.
    pub(crate) fn of_barrier(call: &Call, members: (u64, u8)) -> Self {
        let (reduce, dtype, root, norm, source, destination) = Default::default();
        let Call { origin, op, site, count, .. } = *call;
        let (op, site) = site_id::ids(op, site);
        CompactDescriptor { origin, op, site, count, reduce, members, dtype, root, norm, source, destination }
    }

    pub(crate) fn address(&self, side: Side) -> Address {
        match side {
            Side::Source => self.source,
            Side::Destination => self.destination,
        }
    }

    pub(crate) fn factor(&self) -> f64 {
        if let Some(ReduceOp::Scaled(factor)) = self.reduce { factor } else { 1.0 }
    }

    pub(crate) fn members(&self) -> (u64, u8) {
        self.members
    }

    pub(crate) fn call(&self) -> Call {
        let plain = Call::at(self.op.text(), self.site.site());
        let call = Call { origin: self.origin, count: self.count, dtype: self.dtype, norm: self.norm, ..plain };
        call.with(self.reduce, self.root)
    }

    pub(crate) fn words(&self) -> Option<Words> {
        let byte = |x: u64| (x < NONE).then_some(x);
        let op = byte(self.op.bits())?;
        let root = self.root.map_or(Some(NONE), |root| byte(root.into()))?;
        let dtype = self.dtype.map_or(NONE, |dtype| dtype as u64);
        // A sum with factors is followed by no norm, so the two share a word.
        let (reduce, more) = match self.reduce {
            None => (NONE, 0),
            Some(ReduceOp::Scaled(factor)) => (REDUCTIONS.len() as u64, factor.to_bits()),
            Some(op) => (REDUCTIONS.iter().position(|known| *known == op)? as u64, self.norm.bits()),
        };
        let what = op | dtype << 8 | reduce << 16 | root << 24 | self.site.bits() << 32;
        Some([what, self.count as u64, self.origin.bits(), more, self.source, self.destination])
    }

    pub(crate) fn of_words(words: Words, members: (u64, u8)) -> Self {
        let [what, count, origin, more, source, destination] = words;
        let byte = |at: u32| Some(what >> at & NONE).filter(|byte| *byte < NONE);
        let reduce = byte(16).map(|code| match REDUCTIONS.get(code as usize) {
            Some(op) => (*op, ThenNorm::of_bits(more)),
            None => (ReduceOp::Scaled(f64::from_bits(more)), ThenNorm::default()),
        });
        CompactDescriptor {
            origin: Origin::of_bits(origin),
            op: OpId::of_bits(what & NONE),
            site: SiteId::of_bits(what >> 32),
            count: count as usize,
            reduce: reduce.map(|(op, _)| op),
            members,
            dtype: byte(8).map(|code| DType::ALL[code as usize]),
            root: byte(24).map(|root| root as u32),
            norm: reduce.map_or(ThenNorm::default(), |(_, norm)| norm),
            source,
            destination,
        }
    }

    pub(crate) fn matches(&self, other: &Self) -> bool {
        let reduces = self.reduce.map(ReduceOp::kind) == other.reduce.map(ReduceOp::kind);
        let same =
            (self.count, self.members, self.dtype, self.root) == (other.count, other.members, other.dtype, other.root);
        same && reduces && (self.op, self.origin, self.norm) == (other.op, other.origin, other.norm)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/fabric/compact_tests.rs"]
mod tests;
