//! Which algorithm carries a collective out, and why. All members must come to the same answer, so it depends only on what
//! they have in common: the call, the group, the pool.

use super::{
    Algorithm, DType, Group, ReduceOp, ReduceOrder, exchange, plan::Shape, push, run::Request, signals::Signals,
    tuner::Limits,
};
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
    /// Sums, in two such kernels: parts to their owners, and sums to all.
    PushTwice,
    /// As the first, but into rooms at the receivers, and then a flag.
    Eager,
    /// Through stages in the host's memory: one kernel each, which meets its peers' there; or by events, as a stepped one.
    Staged,
    Copies,
    /// All-reduce by copies around a ring, ordered by events.
    Ring,
    /// Copies to and from the host's memory, where the device threads add up.
    Hosted,
    /// The same around the same ring, by one kernel each, which writes to its successor alone and meets its peers'.
    RingKernel,
    /// Sums, by one kernel each, which sends parts to their owners and sums back, and meets its peers'.
    Exchange,
}

impl Way {
    /// Whether bits depend on where in its buffer a number stands.
    pub(super) fn is_ring(self) -> bool {
        matches!(self, Way::Ring | Way::RingKernel)
    }

    /// Kernels of each member, where they meet: each counts as a meeting.
    pub(super) fn launches(self) -> usize {
        if self == Way::PushTwice { 2 } else { 1 }
    }
}

/// Devices whose memory one kernel can name on a GPU.
const MOST: usize = 16;

/// Bytes that a device sends up to which packets go through the host's memory: who waits reads all that it waits for again
/// and again over the bus, so more than a microsecond's worth is slower than a flag.
const PUSHED_STAGED: usize = 64 << 10;
/// The same in two trips: four H200s add up 32 KB in 13.5 us so, by stages in 20.8; 128 KB in 24.0 and 25.6; 256 KB in 38.6 and 31.7.
const PUSHED_TWICE: usize = 112 << 10;

/// Work that keeps all links busy in both directions, but for broadcasts of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bulk {
    /// Parts of sums go to their owners and come back;
    Sums,
    /// they do not come back.
    Parts,
    Moves,
}

impl Bulk {
    fn of(shape: &Shape, n: usize) -> Option<Bulk> {
        match shape {
            // The root alone would send.
            Shape::Broadcast { .. } if n > 2 => None,
            Shape::AllReduce { .. } => Some(Bulk::Sums),
            Shape::ReduceScatter { .. } => Some(Bulk::Parts),
            Shape::AllGather { .. } | Shape::Broadcast { .. } | Shape::AllToAll { .. } => Some(Bulk::Moves),
            Shape::Reduce { .. } | Shape::Gather { .. } | Shape::Scatter { .. } => None,
        }
    }
}

/// What [`choose`] goes by.
pub(crate) struct Case {
    pub members: usize,
    /// Whether all have access to each other's memory.
    pub direct: bool,
    /// An all-reduce, in place or not, with what it is of and how.
    pub all_reduce: Option<(DType, ReduceOp)>,
    /// What copy engines may be the faster at, or kernels that only write.
    pub bulk: Option<Bulk>,
    /// Sums, which owners of parts of them can make.
    pub sums: bool,
    /// As packets: the bytes that one member sends another.
    pub packets: Option<usize>,
    /// Whether they carry more than is needed: everything to everyone.
    pub whole: bool,
    /// Of a sum that everybody gets, the bytes of each member's part, if all are alike.
    pub part: Option<usize>,
    pub bytes: usize,
    /// Whether a graph is to hold it: with a kernel it stays one launch, and one meeting. The bits are the same either way.
    pub captured: bool,
}

/// The way, and the reason. `limits` are those of so many members.
pub(crate) fn choose(shared: &Shared, case: &Case, limits: &Limits) -> (Way, &'static str) {
    let (n, direct) = (case.members, case.direct);
    let link = &shared.links[0];
    let software = link.driver.info().compute_capability == (0, 0);
    let sums = matches!(case.all_reduce, Some((DType::F32 | DType::F64, ReduceOp::Sum | ReduceOp::Avg)));
    let rings = sums && n > 1 && shared.reduce_order != ReduceOrder::Rank;
    let most = if software { usize::MAX } else { MOST };
    // Of a group with peer access in a pool without, kernels do not meet: flags in the host's memory are slow.
    let signals = shared.signals.get().filter(|signals| direct && n > 1 && !signals.have_stages());
    let held = case.captured && signals.is_some();
    // The bits of a ring are the same in either form, so what decides between the two may be anything.
    let ring = match signals {
        Some(_) if n <= MOST && (held || case.bytes < limits.ring) => Way::RingKernel,
        _ => Way::Ring,
    };
    match shared.algorithm {
        Algorithm::Ring if rings => return (ring, "asked for"),
        Algorithm::Exchange if case.sums && signals.is_some() && n <= MOST => return (Way::Exchange, "asked for"),
        Algorithm::Exchange if case.sums && (software || n <= MOST) => {
            return (Way::Copies, "asked for; kernels cannot meet here, so by copies: the bits are the same");
        }
        Algorithm::Copies if software || n <= MOST => return (Way::Copies, "asked for"),
        Algorithm::Host if n > 1 && !link.in_virtual_time() => return (Way::Hosted, "asked for"),
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
        let fits = |each: usize, most: usize| each > 0 && each <= signals.push_bytes() && each * (n - 1) <= most;
        // Devices that share a GPU may share a queue, too: the second kernel of one would be in front of the first of another.
        let alone = shared.links.iter().all(|link| link.sharers == 1);
        return match (case.packets, case.part) {
            (Some(each), _) if fits(each, PUSHED_STAGED) => {
                (Way::Push, "small, without peer access: data that carries its flags, through the host's memory")
            }
            (_, Some(part)) if n > 2 && alone && fits(part, PUSHED_TWICE) => (
                Way::PushTwice,
                "not large, without peer access: parts to their owners and sums to all, as data that carries its flags, through the host's memory",
            ),
            _ => (
                Way::Staged,
                "not all members have peer access, but their kernels can meet in the host's memory: one launch each",
            ),
        };
    }
    if rings && !direct {
        return (Way::Ring, "not all members have peer access: a ring keeps every link of the host busy in turn");
    }
    if !software && n > MOST {
        return (Way::Hosted, "more members than a kernel can name, or add up");
    }
    if !direct {
        return (Way::Copies, "not all members have peer access");
    }
    let auto = !software && n > 1 && shared.algorithm != Algorithm::Direct;
    let engines = match case.bulk {
        Some(Bulk::Sums) => limits.exchange,
        Some(Bulk::Parts) => limits.exchange_parts,
        Some(Bulk::Moves) => limits.copies,
        None => usize::MAX,
    };
    // They add up in the order of ranks, so where they would, kernels in a graph do not go round a ring.
    let engines = auto && case.bytes >= engines;
    if engines && !held {
        return (
            Way::Copies,
            "at this size copy engines that only write are faster than kernels, and leave the processors free",
        );
    }
    let rings = rings && auto && !engines;
    if rings && case.bytes >= limits.ring {
        return match ring {
            Way::RingKernel => (ring, "large, and in a graph: a kernel that writes to its neighbour alone is fastest"),
            _ => (ring, "at this size copy engines are faster than kernels, and leave the processors free"),
        };
    }
    if rings && case.bytes >= limits.ring_kernel {
        return match ring {
            Way::RingKernel => (ring, "at this size a kernel that writes to its neighbour alone is fastest"),
            _ => (ring, "large enough for a ring; kernels cannot meet here, so by copies: the bits are the same"),
        };
    }
    let Some(signals) = signals else {
        return (Way::Direct, "all members have peer access: one kernel each, which carries the least over every link");
    };
    if auto && n <= MOST && case.bulk == Some(Bulk::Sums) && case.bytes >= limits.exchange_kernel {
        return (Way::Exchange, "at this size kernels that only write to each other are fastest");
    }
    let eager = if case.whole { limits.eager_whole } else { limits.eager }.min(signals.eager_bytes());
    match case.packets {
        // A push of nothing would wait for nobody, and so not be counted.
        Some(each) if each > 0 && each <= limits.push.min(signals.push_bytes()) => {
            (Way::Push, "small: data that carries its flags needs one trip and no barrier")
        }
        Some(each) if each > 0 && each <= eager => (
            Way::Eager,
            "not large: written to where the receivers have room for it, it needs no barrier before and none after",
        ),
        _ => (Way::Spin, "all members have peer access, and their kernels can meet: one launch each"),
    }
}

impl Group<'_> {
    /// Where the kernels meet on the devices, if they do that way.
    pub(super) fn signals(&self, way: Way) -> Option<&Signals> {
        let signals = self.dev.worker.shared.signals.get()?;
        match way {
            Way::Spin | Way::Push | Way::PushTwice | Way::Eager | Way::RingKernel | Way::Exchange => Some(signals),
            Way::Staged if signals.have_stages() => Some(signals),
            _ => None,
        }
    }

    /// How big and how many what this group does is worth being.
    pub(super) fn limits(&self) -> &Limits {
        self.dev.worker.shared.limits().of(self.count())
    }

    pub(super) fn way(&self, request: &Request) -> Way {
        self.way_by(request, self.limits())
    }

    pub(super) fn way_by(&self, request: &Request, limits: &Limits) -> Way {
        let shape = request.shape.as_ref();
        let bytes = shape.map_or(0, |shape| shape.len(self.count()).saturating_mul(request.dtype.size()));
        let all_reduce = matches!(shape, Some(Shape::AllReduce { .. })).then_some((request.dtype, request.reduce));
        let size = request.dtype.size();
        let packets = shape.and_then(|shape| shape.packets(self.count(), self.rank));
        let whole = packets.is_some_and(|packets| packets.are_whole());
        let packets = packets.map(|packets| packets.each * size);
        let bulk = shape.and_then(|shape| Bulk::of(shape, self.count()));
        let captured = self.dev.recording.is_some();
        let (members, direct) = (self.count(), self.known.direct);
        let sums = shape.is_some_and(|shape| exchange::sums(shape, members));
        let part = shape.and_then(|shape| push::part(shape, members)).map(|part| part * size);
        let case = Case { members, direct, all_reduce, bulk, sums, packets, whole, part, bytes, captured };
        choose(&self.dev.worker.shared, &case, limits).0
    }
}
