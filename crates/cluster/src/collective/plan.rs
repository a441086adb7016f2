//! The steps of the members in a collective of several processes, for both kinds of rails:
//!
//! ```text
//!                  inside, before    rail: each process                                    inside, after
//! all_reduce       reduce_scatter    sums up its share of the slice, and sends it to all   all_gather
//! reduce_scatter   reduce_scatter    sums up what its members own of the slice             all_to_all
//! all_gather       all_to_all        sends what its members own of the slice to all        all_gather
//! ```
//!
//! Local index `r` has slice `r` between the steps inside. A reduce is a reduce_scatter of which one member gets all, a
//! broadcast an all_gather of which one member has all. [`rail`](super::rail) carries a plan out, piece by piece.

use super::cut::{Cut, Share};
use super::hierarchical::{HierarchicalCall, bytes, part};
use crate::runtime::{Area, Counts, Request, Shape, Side};
use gpu_pool::{DType, ReduceOp};

#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    /// Sums for their owners.
    Sum(ReduceOp),
    /// Each process's own elements for all.
    Fill,
    SumAndFill(ReduceOp),
}

impl Job {
    pub fn sum(self) -> Option<ReduceOp> {
        match self {
            Job::Sum(op) | Job::SumAndFill(op) => Some(op),
            Job::Fill => None,
        }
    }

    pub fn fills(self) -> bool {
        !matches!(self, Job::Sum(_))
    }
}

pub(super) struct Plan<'t, 'g, 'd> {
    pub hier: &'t HierarchicalCall<'g, 'd>,
    pub dtype: DType,
    pub job: Job,
    pub inner: Option<ReduceOp>,
    len: usize,
    /// Of each member. None: all have all.
    parts: Option<Counts>,
    /// A member's own part lies at its place in its memory.
    in_place: bool,
}

/// The operations inside a process and between processes, for so many members of all processes.
fn levels(op: ReduceOp, dtype: DType, members: usize) -> (ReduceOp, ReduceOp) {
    match op {
        // The sums of the processes are rounded, and may be out of range where the mean is not.
        ReduceOp::Avg if dtype == DType::F16 => (ReduceOp::Scaled(1.0 / members as f64), ReduceOp::Sum),
        // The mean is taken once, over all members.
        ReduceOp::Avg => (ReduceOp::Sum, ReduceOp::Avg),
        // Each member's factor is its own.
        ReduceOp::Scaled(factor) => (ReduceOp::Scaled(factor), ReduceOp::Sum),
        op => (op, op),
    }
}

impl<'t, 'g, 'd> Plan<'t, 'g, 'd> {
    /// None: the shape sends other elements to each member.
    pub fn new(hier: &'t HierarchicalCall<'g, 'd>, (dtype, op): (DType, ReduceOp), shape: &Shape) -> Option<Self> {
        let members = hier.members();
        let all_at =
            |root: usize, len: usize| Counts::By((0..members).map(|rank| if rank == root { len } else { 0 }).collect());
        let (parts, in_place) = match shape {
            Shape::AllReduce { .. } => (None, false),
            Shape::Reduce { len, root } | Shape::Broadcast { len, root } => (Some(all_at(*root, *len)), true),
            Shape::ReduceScatter { counts, in_place } | Shape::AllGather { counts, in_place } => {
                (Some(counts.clone()), *in_place)
            }
            Shape::Gather { .. } | Shape::Scatter { .. } | Shape::AllToAll { .. } => return None,
        };
        let (inner, outer) = levels(op, dtype, members);
        let (inner, job) = match shape {
            Shape::AllReduce { .. } => (Some(inner), Job::SumAndFill(outer)),
            Shape::Reduce { .. } | Shape::ReduceScatter { .. } => (Some(inner), Job::Sum(outer)),
            _ => (None, Job::Fill),
        };
        let len = match (shape, &parts) {
            (_, Some(parts)) => parts.total(members),
            (shape, None) => shape.len(members),
        };
        Some(Plan { hier, dtype, job, inner, len, parts, in_place })
    }

    /// The buffer, which may be cut into pieces.
    pub fn whole(&self) -> Cut<'t> {
        self.hier.cut(self.len, self.dtype)
    }

    /// Elements of each member, if all have as many.
    pub fn even(&self) -> Option<usize> {
        match self.parts.clone()?.even() {
            Counts::Each(len) => Some(len),
            Counts::By(_) => None,
        }
    }

    pub fn root(&self) -> Option<usize> {
        let parts = self.parts.as_ref()?;
        (0..self.hier.members()).find(|&rank| parts.part(rank).len() == self.len)
    }

    /// This member's slice, and each process's share of it.
    pub fn share(&self, cut: &Cut<'_>) -> Share {
        let (here, hosts) = (self.hier.across.here, &self.hier.across.hosts);
        let owned = match &self.parts {
            None => cut.equal(here, hosts.len()),
            Some(parts) => cut.owned(here, hosts, parts),
        };
        Share { slice: cut.slice(here), owned, me: self.hier.across.me, size: self.dtype.size() }
    }

    pub fn before(&self, cut: &Cut<'_>) -> Shape {
        match (&self.parts, self.job) {
            (Some(parts), Job::Fill) => self.between_rails(cut, parts, true),
            _ => Shape::ReduceScatter { counts: cut.counts(self.hier.here.count()), in_place: false },
        }
    }

    pub fn after(&self, cut: &Cut<'_>) -> Shape {
        match (&self.parts, self.job) {
            (Some(parts), Job::Sum(_)) => self.between_rails(cut, parts, false),
            _ => Shape::AllGather { counts: cut.counts(self.hier.here.count()), in_place: false },
        }
    }

    /// From the members that own the parts to the rails, or back.
    fn between_rails(&self, cut: &Cut<'_>, parts: &Counts, to_rails: bool) -> Shape {
        let (ranks, n) = (&self.hier.across.hosts[self.hier.across.me].ranks, self.hier.here.count());
        let shared = |rail: usize, member: usize| cut.shared(rail, parts, ranks[member]);
        let by_rail = (0..n).map(|rail| Counts::By((0..n).map(|member| shared(rail, member)).collect())).collect();
        let by_member = (0..n).map(|member| Counts::By((0..n).map(|rail| shared(rail, member)).collect())).collect();
        match to_rails {
            true => Shape::AllToAll { send: by_member, receive: by_rail },
            false => Shape::AllToAll { send: by_rail, receive: by_member },
        }
    }

    pub fn from(&self, request: &Request, cut: &Cut<'_>) -> Area {
        self.area(request, Side::Source, cut, self.job.sum().is_some())
    }

    pub fn to(&self, request: &Request, cut: &Cut<'_>) -> Area {
        self.area(request, Side::Destination, cut, self.job.fills())
    }

    fn area(&self, request: &Request, side: Side, cut: &Cut<'_>, all: bool) -> Area {
        let (area, size) = (request.area(side).expect("a member gives memory"), self.dtype.size());
        match &self.parts {
            Some(parts) if !all => {
                let rank = self.hier.group.rank();
                let mine = bytes(&parts.part(rank), size);
                let own = part(area, if self.in_place { mine } else { 0..mine.len() });
                part(&own, bytes(&cut.within(parts, rank), size))
            }
            _ => part(area, bytes(&cut.range(), size)),
        }
    }
}
