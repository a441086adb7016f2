//! Which algorithm carries a collective out, and why. All members must come to the same answer, so it depends only on what
//! they have in common: the call, the group, the pool.

use super::{Algorithm, DType, Group, ReduceOp, ReduceOrder, plan::Shape, run::Request};
use crate::runtime::worker::Shared;

/// How a collective is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Direct,
    Copies,
    Ring,
}

/// Devices whose memory one kernel can name on a GPU.
const MOST: usize = 16;
/// Bytes from which on an all-reduce on GPUs goes round the ring of copy engines: on 8 H200s it was the fastest at 1 GB
/// (`prototypes/README.md`), and below it is bound by the time that submitting it takes.
const RING_FROM: usize = 512 << 20;

/// What [`choose`] goes by.
pub(crate) struct Case<'a> {
    /// Ordinals of the members.
    pub members: &'a [usize],
    /// An all-reduce in place, with what it is of and how.
    pub all_reduce: Option<(DType, ReduceOp)>,
    pub bytes: usize,
}

/// The way, and the reason.
pub(crate) fn choose(shared: &Shared, case: &Case<'_>) -> (Way, &'static str) {
    let n = case.members.len();
    let direct = case.members.iter().all(|&a| case.members.iter().all(|&b| shared.is_direct(a, b)));
    let link = &shared.links[case.members[0]];
    let software = link.driver.info().compute_capability == (0, 0);
    let sums = matches!(case.all_reduce, Some((DType::F32 | DType::F64, ReduceOp::Sum | ReduceOp::Avg)));
    let rings = sums && n > 1 && shared.reduce_order != ReduceOrder::Rank;
    match shared.algorithm {
        Algorithm::Ring if rings => return (Way::Ring, "asked for"),
        Algorithm::Copies => return (Way::Copies, "asked for"),
        Algorithm::Direct if direct && (software || n <= MOST) => return (Way::Direct, "asked for"),
        _ => {}
    }
    if rings && link.in_virtual_time() {
        return (Way::Ring, "virtual time is for copies; what kernels do with peers' memory is not modelled");
    }
    if link.in_virtual_time() {
        return (Way::Copies, "virtual time is for copies; what kernels do with peers' memory is not modelled");
    }
    if rings && !direct {
        return (Way::Ring, "not all members have peer access: a ring keeps every link of the host busy in turn");
    }
    if !direct {
        return (Way::Copies, "not all members have peer access");
    }
    if !software && n > MOST {
        return (Way::Copies, "more members than a kernel can name");
    }
    if rings && !software && case.bytes >= RING_FROM {
        return (Way::Ring, "at this size copy engines are faster than kernels, and leave the processors free");
    }
    (Way::Direct, "all members have peer access: one kernel each, which carries the least over every link")
}

impl Group<'_> {
    pub(super) fn way(&self, request: &Request) -> Way {
        let members: Vec<usize> = (0..self.count()).map(|member| self.ordinal(member)).collect();
        let shape = request.shape.as_ref();
        let bytes = shape.map_or(0, |shape| shape.len(self.count()) * request.dtype.size());
        let in_place = matches!(shape, Some(Shape::AllReduce { .. })) && request.source.is_none();
        let all_reduce = in_place.then_some((request.dtype, request.reduce));
        choose(&self.dev.worker.shared, &Case { members: &members, all_reduce, bytes }).0
    }
}
