//! A [`Case`]: one call of a collective. [`choose`](super::choose) and the algorithms decide by it. Invariant: it holds
//! plain data only, of what all members have in common: the call, the group, the pool.

use super::{Meeting, Request};
use crate::{
    fabric::{DType, GRAIN, Limits, MOST, PadLayout, ReduceOp, ReduceOrder, Shape, types::Algorithm as Wish},
    thread::worker::Shared,
};

/// Where the kernels of several devices can wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelBarrier {
    /// Nowhere: events order them.
    None,
    /// In the devices' memory, which all devices can access. The LL algorithm carries up to `ll` bytes to one peer, the
    /// eager algorithm up to `eager`, an inbox takes up to `inbox` of one trip, or pieces of up to `inbox_slot`.
    OnDevices { ll: usize, eager: usize, inbox: usize, inbox_slot: usize },
    /// In page-locked memory of the host. The LL algorithm carries up to `ll` bytes to one peer.
    InHost { ll: usize },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub software: bool,
    pub virtual_time: bool,
    pub barrier: KernelBarrier,
    /// Every device has a GPU of its own. False where kernels do not wait for each other in the host's memory.
    pub alone: bool,
    pub wish: Wish,
    pub rank_order: bool,
}

impl Machine {
    pub(crate) fn of(shared: &Shared) -> Machine {
        let handle = &shared.handles[0];
        let barrier = match shared.signals.get() {
            None => KernelBarrier::None,
            Some(pad) if pad.have_stages() => KernelBarrier::InHost { ll: pad.ll_bytes() },
            Some(pad) => {
                let (ll, eager, PadLayout { inbox, inbox_slot, .. }) =
                    (pad.ll_bytes(), pad.eager_bytes(), pad.layout());
                KernelBarrier::OnDevices { ll, eager, inbox, inbox_slot }
            }
        };
        Machine {
            software: handle.driver.info().compute_capability == (0, 0),
            virtual_time: handle.in_virtual_time(),
            barrier,
            alone: matches!(barrier, KernelBarrier::InHost { .. })
                && shared.handles.iter().all(|handle| handle.sharers == 1),
            wish: shared.algorithm,
            rank_order: shared.reduce_order == ReduceOrder::Rank,
        }
    }
}

/// Work that keeps all links busy in both directions. (A broadcast of two members is counted with it.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bulk {
    /// Parts of sums go to their owners, and the sums come back.
    Sums,
    /// Parts of sums go to their owners, and stay there.
    Parts,
    /// Nothing is added up.
    Moves,
}

impl Bulk {
    /// Bytes of a buffer from which on copy engines are the fastest between so many members, or are to leave the
    /// multiprocessors to the work that the call overlaps with. Four H200s add up 64 MB in 428 us by copies, and in 298
    /// by a ring of kernels. A reduce-scatter sends half as much as an all-reduce.
    pub(crate) fn engines(self, members: usize, overlapped: bool) -> usize {
        match (self, members) {
            (Bulk::Sums, 2) if overlapped => 8 << 20,
            (Bulk::Parts | Bulk::Moves, 2) if overlapped => 16 << 20,
            (Bulk::Sums, 2) => 64 << 20,
            (Bulk::Parts, 2) => 512 << 20,
            (Bulk::Moves, 2..=4) => 128 << 20,
            _ => usize::MAX,
        }
    }
}

pub(crate) struct Case<'a> {
    pub machine: Machine,
    pub limits: &'a Limits,
    pub members: usize,
    /// Whether all members have access to each other's memory.
    pub direct: bool,
    pub dtype: DType,
    pub reduce: ReduceOp,
    /// None for `all_to_all_v`: its shape is known when the members have met.
    pub shape: Option<&'a Shape>,
    /// Whether a graph captures it. By a kernel it stays one launch and one meeting. Bits do not depend on it.
    pub captured: bool,
    pub bytes: usize,
    /// The bytes that one member sends to another in packets; none if the parts are not all of one size.
    pub packets: Option<usize>,
    /// Whether packets carry whole buffers to all members, more than is needed.
    pub whole: bool,
}

impl<'a> Case<'a> {
    pub(super) fn of(meeting: &Meeting<'_>, request: &'a Request, limits: &'a Limits) -> Case<'a> {
        let machine = Machine::of(&meeting.dev.worker.shared);
        Case::new(
            (Machine { rank_order: machine.rank_order || request.rank_order, ..machine }, limits),
            (meeting.count(), meeting.membership.direct),
            (request.dtype, request.reduce),
            request.shape.as_ref(),
            meeting.dev.recording.is_some(),
        )
    }

    pub(crate) fn new(
        (machine, limits): (Machine, &'a Limits),
        (members, direct): (usize, bool),
        (dtype, reduce): (DType, ReduceOp),
        shape: Option<&'a Shape>,
        captured: bool,
    ) -> Case<'a> {
        let size = dtype.size();
        // Packets of two ranks differ only in where they begin, which nothing here depends on.
        let packets = shape.and_then(|shape| shape.packets(members, 0));
        Case {
            machine,
            limits,
            members,
            direct,
            dtype,
            reduce,
            shape,
            captured,
            bytes: shape.map_or(0, |shape| shape.len(members).saturating_mul(size)),
            packets: packets.map(|packets| packets.each * size),
            whole: packets.is_some_and(|packets| packets.are_whole()),
        }
    }

    /// The kind of work for which copy engines, or kernels that only write, may be the fastest.
    pub(crate) fn bulk(&self) -> Option<Bulk> {
        match self.shape? {
            // Only the root would send.
            Shape::Broadcast { .. } if self.members > 2 => None,
            Shape::AllReduce { .. } => Some(Bulk::Sums),
            Shape::ReduceScatter { .. } => Some(Bulk::Parts),
            Shape::AllGather { .. } | Shape::Broadcast { .. } | Shape::AllToAll { .. } => Some(Bulk::Moves),
            Shape::Reduce { .. } | Shape::Gather { .. } | Shape::Scatter { .. } => None,
        }
    }

    /// Whether it adds up elements of several members, so that each member can own a part of the sum.
    pub(crate) fn sums(&self) -> bool {
        self.members > 1 && self.shape.is_some_and(Shape::sums)
    }

    pub(crate) fn rings(&self) -> bool {
        matches!(self.shape, Some(Shape::AllReduce { .. }))
            && matches!((self.dtype, self.reduce), (DType::F32 | DType::F64, ReduceOp::Sum | ReduceOp::Avg))
            && self.members > 1
            && !self.machine.rank_order
    }

    pub(crate) fn auto(&self) -> bool {
        !self.machine.software && self.members > 1 && self.machine.wish != Wish::Direct
    }

    /// Whether a kernel can name all members. Software GPUs name any number.
    pub(crate) fn nameable(&self) -> bool {
        self.machine.software || self.members <= MOST
    }

    /// In the devices' memory. (A group with peer access in a pool without has flags in the host's memory: too slow.)
    pub(crate) fn meets_on_devices(&self) -> bool {
        let meets = matches!(self.machine.barrier, KernelBarrier::OnDevices { .. });
        self.direct && (2..=MOST).contains(&self.members) && meets
    }

    /// The inboxes by which the members' kernels wait for each other: most bytes in one trip, and of a slot.
    pub(crate) fn inboxes(&self) -> Option<(usize, usize)> {
        let among = self.direct && (2..=MOST).contains(&self.members);
        match self.machine.barrier {
            KernelBarrier::OnDevices { inbox, inbox_slot, .. } => among.then_some((inbox, inbox_slot)),
            _ => None,
        }
    }

    /// Whether the members' kernels wait for each other in the host's memory: some have no access to a peer's.
    pub(crate) fn meets_in_host(&self) -> bool {
        !self.direct && self.members > 1 && matches!(self.machine.barrier, KernelBarrier::InHost { .. })
    }

    /// Whether it is captured, and kernels can carry it out in the graph.
    pub(crate) fn held(&self) -> bool {
        self.captured && self.meets_on_devices()
    }

    pub(crate) fn engines(&self) -> bool {
        let least = |bulk: Bulk| bulk.engines(self.members, self.limits.overlapped);
        self.auto() && self.bulk().is_some_and(|bulk| self.bytes >= least(bulk))
    }

    pub(crate) fn largest(&self) -> usize {
        let size = self.dtype.size();
        self.shape.map_or(0, |shape| shape.largest(self.members, GRAIN / size).saturating_mul(size))
    }

    pub(crate) fn wants(&self, wish: Wish) -> bool {
        self.machine.wish == wish
    }
}
