//! The request of one call of a collective: the call, its shape, and this member's memory.

use super::lone_pad::OwnKernel;
use crate::fabric::{Area, Call, Counts, DType, Exposed, GRAIN, Pair, ReduceOp, Shape, Side, Work, plan::Place};
use crate::{Event, driver::Address, memory::Access};
use smallvec::SmallVec;
use std::sync::Arc;

/// A member's request.
#[derive(Clone)]
pub struct Request {
    /// The call.
    pub call: Call,
    /// The type of the elements.
    pub dtype: DType,
    /// The operation, of a sum.
    pub reduce: ReduceOp,
    /// None for `all_to_all_v`: its shape depends on the other members' counts.
    pub shape: Option<Shape>,
    /// None when the collective is in place, or this member has no source.
    pub source: Option<Area>,
    /// None when this member has no destination.
    pub destination: Option<Area>,
    /// Elements that this member sends to each member, and receives from each.
    pub counts: Option<(Counts, Counts)>,
    /// Further buffers of this member that kernels access: its own, and its peers' by addresses of an earlier meeting.
    pub extra: Vec<(Area, Access)>,
    /// Sums are in the order of ranks, also if the pool's order is another.
    pub rank_order: bool,
    /// Between processes: the kernel that carries the call out.
    pub own: Option<Arc<OwnKernel>>,
}

/// An address in the memory of one of the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemotePtr {
    /// The owner's ordinal in the pool. Managed memory has no owner: then it is the device that asks.
    pub device: usize,
    pub address: Address,
}

impl RemotePtr {
    pub fn offset(self, bytes: usize) -> Self {
        RemotePtr { address: self.address + bytes as u64, ..self }
    }
}

pub(crate) enum Job {
    /// `factors` is empty unless the operation is `Scaled`.
    Combine {
        len: usize,
        sources: SmallVec<[RemotePtr; 8]>,
        destinations: SmallVec<[RemotePtr; 8]>,
        factors: SmallVec<[f64; 8]>,
    },
    /// `(from, to, bytes)`
    Pairs(SmallVec<[(RemotePtr, RemotePtr, usize); 8]>),
}

impl Request {
    pub(super) fn expose(&self, ready: Option<Event>) -> Exposed {
        Exposed {
            source: self.source.clone(),
            destination: self.destination.clone(),
            ready,
            factor: if let ReduceOp::Scaled(factor) = self.reduce { factor } else { 1.0 },
            counts: self.counts.clone(),
            stage: None,
            scratch: None,
        }
    }

    /// `at` says where a member's buffer begins; `factors` as in [`Job::Combine`].
    pub(super) fn job(&self, work: &Work, at: impl Fn(usize, Side) -> RemotePtr, factors: SmallVec<[f64; 8]>) -> Job {
        let size = self.dtype.size();
        let at = |place: &Place| at(place.member, place.side).offset(place.start * size);
        let all = |places: &[Place]| places.iter().map(at).collect();
        match work {
            Work::Combine { len, sources, destinations } => {
                Job::Combine { len: *len, sources: all(sources), destinations: all(destinations), factors }
            }
            Work::Pairs(pairs) => {
                let pair = |pair: &Pair| (at(&pair.from), at(&pair.to), pair.len * size);
                Job::Pairs(pairs.iter().map(pair).collect())
            }
        }
    }

    /// This member's buffer on a side; in place both sides are the same buffer.
    pub fn area(&self, side: Side) -> Option<&Area> {
        match side {
            Side::Source => self.source.as_ref().or(self.destination.as_ref()),
            Side::Destination => self.destination.as_ref(),
        }
    }

    pub(super) fn areas(&self) -> impl Iterator<Item = &Area> {
        self.source.iter().chain(&self.destination).chain(self.extra.iter().map(|(area, _)| area))
    }

    pub(super) fn grain(&self) -> usize {
        GRAIN / self.dtype.size()
    }
}
