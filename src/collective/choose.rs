//! Which algorithm carries a collective out, and why. All members must come to the same answer, so it depends only on what
//! they have in common: the call, the group, the pool.

use super::{Algorithm, DType, Group, ReduceOp, ReduceOrder, kernels::signals::PUSHED, plan::Shape, run::Request};
use crate::runtime::worker::Shared;

/// How a collective is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// One kernel each, in an order made by events.
    Direct,
    /// One kernel each, which meets its peers' on the devices.
    Spin,
    /// The same, with the flags in the data.
    Push,
    /// Through stages in the host's memory: one kernel each, which meets its peers' there; or by events, as a stepped one.
    Staged,
    Copies,
    Ring,
}

/// Devices whose memory one kernel can name on a GPU.
const MOST: usize = 16;
/// Bytes from which on an all-reduce on GPUs goes round the ring of copy engines: on 8 H200s it was the fastest at 1 GB
/// (`prototypes/README.md`), and below it is bound by the time that submitting it takes.
const RING_FROM: usize = 512 << 20;

/// Bytes that a device sends up to which an all-reduce is pushed through the host's memory: who waits reads all that it waits for again
/// and again over the bus, so more than a microsecond's worth is slower than a flag.
const PUSHED_STAGED: usize = 32 << 10;

/// What [`choose`] goes by.
pub(crate) struct Case {
    pub members: usize,
    /// Whether all have access to each other's memory.
    pub direct: bool,
    /// An all-reduce, with what it is of and how,
    pub all_reduce: Option<(DType, ReduceOp)>,
    /// and whether it is in place.
    pub in_place: bool,
    pub bytes: usize,
}

/// The way, and the reason.
pub(crate) fn choose(shared: &Shared, case: &Case) -> (Way, &'static str) {
    let (n, direct) = (case.members, case.direct);
    let link = &shared.links[0];
    let software = link.driver.info().compute_capability == (0, 0);
    let sums = matches!(case.all_reduce, Some((DType::F32 | DType::F64, ReduceOp::Sum | ReduceOp::Avg)));
    let rings = sums && case.in_place && n > 1 && shared.reduce_order != ReduceOrder::Rank;
    let most = if software { usize::MAX } else { MOST };
    match shared.algorithm {
        Algorithm::Ring if rings => return (Way::Ring, "asked for"),
        Algorithm::Copies => return (Way::Copies, "asked for"),
        Algorithm::Staged if (2..=most).contains(&n) && !link.in_virtual_time() => return (Way::Staged, "asked for"),
        _ => {}
    }
    if rings && link.in_virtual_time() {
        return (Way::Ring, "virtual time is for copies; what kernels do with peers' memory is not modelled");
    }
    if link.in_virtual_time() {
        return (Way::Copies, "virtual time is for copies; what kernels do with peers' memory is not modelled");
    }
    if let (false, true, Some(signals)) = (direct, n > 1, shared.signals.get())
        && signals.have_stages()
    {
        return match case.all_reduce {
            Some(_) if case.bytes <= signals.push_bytes() && case.bytes * (n - 1) <= PUSHED_STAGED => {
                (Way::Push, "small, without peer access: data that carries its flags, through the host's memory")
            }
            _ => (
                Way::Staged,
                "not all members have peer access, but their kernels can meet in the host's memory: one launch each",
            ),
        };
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
    if rings && !software && case.bytes >= RING_FROM && shared.algorithm != Algorithm::Direct {
        return (Way::Ring, "at this size copy engines are faster than kernels, and leave the processors free");
    }
    // Of a group with peer access in a pool without, kernels do not meet: flags in the host's memory are slow.
    let (Some(signals), true) = (shared.signals.get().filter(|signals| !signals.have_stages()), n > 1) else {
        return (Way::Direct, "all members have peer access: one kernel each, which carries the least over every link");
    };
    match case.all_reduce {
        Some(_) if case.bytes <= signals.push_bytes() && case.bytes * (n - 1) <= PUSHED => {
            (Way::Push, "small: data that carries its flags needs one trip and no barrier")
        }
        _ => (Way::Spin, "all members have peer access, and their kernels can meet: one launch each"),
    }
}

impl Group<'_> {
    pub(super) fn way(&self, request: &Request) -> Way {
        let shape = request.shape.as_ref();
        let bytes = shape.map_or(0, |shape| shape.len(self.count()) * request.dtype.size());
        let all_reduce = matches!(shape, Some(Shape::AllReduce { .. })).then_some((request.dtype, request.reduce));
        let in_place = request.source.is_none();
        choose(
            &self.dev.worker.shared,
            &Case { members: self.count(), direct: self.known.direct, all_reduce, in_place, bytes },
        )
        .0
    }
}
