//! Which algorithm carries a collective out, and why.
//!
//! Calls, graphs, [`all_reduce_many`](crate::Device::all_reduce_many), [`GpuPool::explain`](crate::GpuPool::explain)
//! and the tuner ask here. Everything is pure: all members must come to the same answer, so it depends only on what
//! they have in common: the call, the group, the pool.

use super::{
    DType, ReduceOp, ReduceOrder,
    algorithm::{Algorithm, TABLE},
    kernels::MOST,
    plan::Shape,
    request::GRAIN,
    tuner::Limits,
};
use crate::thread::worker::Shared;

/// Where the kernels of several devices can wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelBarrier {
    /// Nowhere: events order them.
    None,
    /// In the devices' memory, which all devices of the pool can access. Packets carry up to `ll` bytes to one peer,
    /// eager sends up to `eager`.
    OnDevices { ll: usize, eager: usize },
    /// In page-locked memory of the host. Packets carry up to `ll` bytes to one peer.
    InHost { ll: usize },
}

/// What a pool's devices can do, and what its builder asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// Software GPUs: they gain nothing from kernels that wait for each other.
    pub software: bool,
    pub virtual_time: bool,
    pub barrier: KernelBarrier,
    /// Every device has a GPU of its own. Only told where kernels meet in the host's memory.
    pub alone: bool,
    /// [`Builder::algorithm`](crate::Builder::algorithm).
    pub wish: super::types::Algorithm,
    /// Sums are in rank order, whatever the algorithm.
    pub rank_order: bool,
}

impl Machine {
    pub(crate) fn of(shared: &Shared) -> Machine {
        let handle = &shared.handles[0];
        let barrier = match shared.signals.get() {
            None => KernelBarrier::None,
            Some(signals) if signals.have_stages() => KernelBarrier::InHost { ll: signals.push_bytes() },
            Some(signals) => KernelBarrier::OnDevices { ll: signals.push_bytes(), eager: signals.eager_bytes() },
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

/// Work that keeps all links busy in both directions, but for a broadcast of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bulk {
    /// Parts of sums go to their owners, and the sums come back.
    Sums,
    /// Parts of sums go to their owners, and stay there.
    Parts,
    /// Nothing is added up.
    Moves,
}

/// One call, as all its members see it alike: what [`Algorithm::fits`] and its siblings go by.
pub(crate) struct Case<'a> {
    pub machine: Machine,
    /// Of so many members. See [`beside`](Limits::beside) for work beside other work.
    pub limits: &'a Limits,
    pub members: usize,
    /// Whether all members have access to each other's memory.
    pub direct: bool,
    pub dtype: DType,
    pub reduce: ReduceOp,
    /// None for `all_to_all_v`, whose shape is known when the members have met.
    pub shape: Option<&'a Shape>,
    /// Whether a graph is to hold it: with a kernel it stays one launch, and one meeting. The bits are the same either
    /// way.
    pub captured: bool,
    /// Bytes of the largest buffer.
    pub bytes: usize,
    /// As packets: the bytes that one member sends another; none if parts are not all of one size.
    pub packets: Option<usize>,
    /// Whether packets carry more than is needed: everything to everyone.
    pub whole: bool,
}

impl<'a> Case<'a> {
    pub(crate) fn new(
        (machine, limits): (Machine, &'a Limits),
        (members, direct): (usize, bool),
        (dtype, reduce): (DType, ReduceOp),
        shape: Option<&'a Shape>,
        captured: bool,
    ) -> Case<'a> {
        let size = dtype.size();
        // Ranks differ in where packets begin only, which is not looked at.
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

    /// What copy engines, or kernels that only write, may be the fastest at.
    pub(crate) fn bulk(&self) -> Option<Bulk> {
        match self.shape? {
            // The root alone would send.
            Shape::Broadcast { .. } if self.members > 2 => None,
            Shape::AllReduce { .. } => Some(Bulk::Sums),
            Shape::ReduceScatter { .. } => Some(Bulk::Parts),
            Shape::AllGather { .. } | Shape::Broadcast { .. } | Shape::AllToAll { .. } => Some(Bulk::Moves),
            Shape::Reduce { .. } | Shape::Gather { .. } | Shape::Scatter { .. } => None,
        }
    }

    /// Whether it is a sum of several members, which the owners of its parts can make.
    pub(crate) fn sums(&self) -> bool {
        self.members > 1 && self.shape.is_some_and(Shape::sums)
    }

    /// Whether a ring can carry it out.
    pub(crate) fn rings(&self) -> bool {
        matches!(self.shape, Some(Shape::AllReduce { .. }))
            && matches!((self.dtype, self.reduce), (DType::F32 | DType::F64, ReduceOp::Sum | ReduceOp::Avg))
            && self.members > 1
            && !self.machine.rank_order
    }

    /// Whether the algorithm may be chosen by what is fastest: on GPUs, unless one kernel is asked for.
    pub(crate) fn auto(&self) -> bool {
        !self.machine.software && self.members > 1 && self.machine.wish != super::types::Algorithm::Direct
    }

    /// Whether a kernel can name all members. Software GPUs name any number.
    pub(crate) fn nameable(&self) -> bool {
        self.machine.software || self.members <= MOST
    }

    /// Whether the members' kernels can wait for each other in the devices' memory. (In a pool without peer access they
    /// could do so in the host's memory even in a group that has it, but flags there are slow.)
    pub(crate) fn meets_on_devices(&self) -> bool {
        let meets = matches!(self.machine.barrier, KernelBarrier::OnDevices { .. });
        self.direct && (2..=MOST).contains(&self.members) && meets
    }

    /// Whether the members' kernels meet in the host's memory, since some have no access to a peer's.
    pub(crate) fn meets_in_host(&self) -> bool {
        !self.direct && self.members > 1 && matches!(self.machine.barrier, KernelBarrier::InHost { .. })
    }

    /// Whether kernels are to carry it out for the graph that holds it.
    pub(crate) fn held(&self) -> bool {
        self.captured && self.meets_on_devices()
    }

    /// Whether copy engines are the fastest at this size.
    pub(crate) fn engines(&self) -> bool {
        let from = match self.bulk() {
            Some(Bulk::Sums) => self.limits.exchange,
            Some(Bulk::Parts) => self.limits.exchange_parts,
            Some(Bulk::Moves) => self.limits.copies,
            None => usize::MAX,
        };
        self.auto() && self.bytes >= from
    }

    /// Bytes of the largest part of any member.
    pub(crate) fn largest(&self) -> usize {
        let size = self.dtype.size();
        self.shape.map_or(0, |shape| shape.largest(self.members, GRAIN / size).saturating_mul(size))
    }

    /// Whether this algorithm was asked for by its public name.
    pub(crate) fn wants(&self, wish: super::types::Algorithm) -> bool {
        self.machine.wish == wish
    }
}

/// The algorithm, and why it is the one: the first in the table that was asked for and can do it, else the first that
/// fits.
pub(crate) fn choose(case: &Case<'_>) -> (&'static dyn Algorithm, &'static str) {
    let asked = || TABLE.iter().find_map(|&algorithm| Some((algorithm, algorithm.asked_for(case)?)));
    let wished = !matches!(case.machine.wish, super::types::Algorithm::Auto | super::types::Algorithm::Direct);
    let fits = || TABLE.iter().find_map(|&algorithm| Some((algorithm, algorithm.fits(case)?)));
    let chosen = if wished { asked().or_else(fits) } else { fits() };
    chosen.expect("with peer access one kernel fits, and without it copies do")
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
