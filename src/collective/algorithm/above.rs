//! A collective by a kernel of a crate above, which does more than the collective: `gpu-pool-train` adds up gradients,
//! updates parameters and sends them by one kernel of each member.
//!
//! Its caller asks for it ([`Group::parts_by_kernel`], [`Group::sum_by_kernel`]), so it is not in the table of
//! [`choose`](super::super::choose). It has no host kernel. Between processes it works in memory that the members have
//! [lent](Group::lend) each other.

use super::{About, Algorithm, Matched, MeetBy, Member, Needs, Scratch, dims};
use crate::{
    DeviceBuffer, Element, Module, ReduceOp,
    collective::{Arguments, Entry, Group, Request, between, case::Case, lone_pad::OwnKernel, ops::sum, point::area},
    error::Result,
    fabric::{Area, BLOCKS, Call, DeviceBarrier, Limits, MOST, Shape, Side, types},
    memory::{Access, AsView, DeviceView, DeviceViewMut},
};
use std::sync::Arc;

/// Addresses of all members' memory, by rank: sources, destinations, and scratch.
pub type Addresses = [[u64; MOST]; 3];

/// One kernel of each member. They wait for each other, so all of their blocks are on the devices at once.
pub trait MeetingKernel: Sync {
    /// For logs: its name, and the reason to choose it.
    fn about(&self) -> (&'static str, &'static str);

    /// Its module, and the name of its entry.
    fn entry(&self) -> (&'static Module, &'static str);

    /// Blocks that have work; there may be fewer. Equal on all members, as all that follows.
    fn blocks(&self) -> usize;

    /// Bytes of scratch that each member has for the others, and whether members tell each other more than a compact
    /// descriptor holds, as those with scratch do.
    fn scratch(&self) -> (usize, bool);

    /// Its arguments. Without scratch the addresses of it are 0.
    fn args(&self, meet: DeviceBarrier, addresses: &Addresses) -> Arguments;
}

/// The kernel as an algorithm.
struct Above<'a>(&'a dyn MeetingKernel);

impl Above<'_> {
    /// All wait for each other, so all are on the device at once: that is what the limits are for.
    fn grid(&self, limits: &Limits) -> u32 {
        (self.0.blocks().clamp(1, BLOCKS as usize) as u32).min(limits.blocks(BLOCKS))
    }
}

impl Algorithm for Above<'_> {
    fn about(&self) -> About {
        About { name: self.0.about().0, group: types::Algorithm::Direct, waits_by: "flags" }
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        case.meets_on_devices().then(|| self.0.about().1)
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        let (bytes, in_full) = self.0.scratch();
        let meeting = MeetBy::Kernels { launches: 1, in_full };
        Needs { meeting, scratch: Scratch::device(std::iter::once(bytes)) }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        self.grid(case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let (n, (scratch, _)) = (member.count(), self.0.scratch());
        let scratch_of = |rank| if scratch > 0 && rank < n { matched.recv_scratch(rank).address } else { 0 };
        let addresses = [
            matched.addresses(n, Side::Source),
            matched.addresses(n, Side::Destination),
            std::array::from_fn(scratch_of),
        ];
        let (module, name) = self.0.entry();
        let args = self.0.args(member.barrier, &addresses);
        member.launch(&Entry { module, name, host: None }, self.grid(member.limits), &args)
    }
}

impl Group<'_> {
    /// A sum in the order of ranks into all destinations, by a kernel that touches what is in `extra`, too. All members
    /// give the same kernel, whose members [meet](Self::kernels_meet).
    #[track_caller]
    pub(crate) fn sum_by_kernel<T: Element>(
        &self,
        call: Call,
        destination: DeviceViewMut<'_, T>,
        extra: Vec<(Area, Access)>,
        kernel: &dyn MeetingKernel,
    ) -> Result<()> {
        self.run_by(Request { extra, ..sum(call, None, destination) }, Some(&Above(kernel)))
    }

    /// The same for parts: each member adds up its part of all sources, and writes to the same part of all
    /// destinations. Without a source, the destinations are the sources.
    #[track_caller]
    pub(crate) fn parts_by_kernel<T: Element>(
        &self,
        (call, op): (Call, ReduceOp),
        counts: &[usize],
        source: Option<DeviceView<'_, T>>,
        destination: DeviceViewMut<'_, T>,
        extra: Vec<(Area, Access)>,
        kernel: &dyn MeetingKernel,
    ) -> Result<()> {
        let counts = self.check_counts(call.op, counts)?.even();
        let shape = Shape::ReduceScatter { counts, in_place: source.is_none() };
        let request = between(call, Some(op), shape, source, Some(destination));
        self.run_by(Request { extra, ..request }, Some(&Above(kernel)))
    }

    /// Memory of so many elements of each member of several processes, for [`in_lent`](Self::in_lent): by rank. None:
    /// their GPUs have no access to each other. All members call it, and wait. Errors: those of an exchange.
    #[track_caller]
    pub(crate) fn lend<T: Element>(&self, call: &Call, len: usize) -> Result<Option<Vec<DeviceBuffer<T>>>> {
        let Some(door) = self.door() else { return Ok(None) };
        let lent = door.lend(self, call, len * size_of::<T>())?;
        Ok(lent.map(|all| all.into_iter().map(|memory| DeviceBuffer::new(memory.block, len)).collect()))
    }

    /// A kernel of all members in what they have [lent](Self::lend) each other: `len` elements, which are sources and
    /// destinations, and behind them the scratch.
    #[track_caller]
    pub(crate) fn in_lent<T: Element>(
        &self,
        call: Call,
        (lent, len): (&mut [DeviceBuffer<T>], usize),
        mut extra: Vec<(Area, Access)>,
        kernel: &dyn MeetingKernel,
    ) -> Result<()> {
        let limits = self.door().and_then(|door| door.pad(self)).expect("they have lent it by their pads").limits();
        let places: [u64; MOST] = std::array::from_fn(|rank| lent.get(rank).map_or(0, |memory| memory.address()));
        let scratch = places.map(|at| if at == 0 { 0 } else { at + (len * size_of::<T>()) as u64 });
        let (module, name) = kernel.entry();
        let (function, dims) = (self.dev.worker.function(module, name)?, dims(Above(kernel).grid(limits)));
        let args = kernel.args(DeviceBarrier::NONE, &[places, places, scratch]);
        let (me, own) = (self.rank(), Some(Arc::new(OwnKernel { name, function, dims, args })));
        let others = lent.iter().enumerate().filter(|(rank, _)| *rank != me);
        extra.extend(others.map(|(_, memory)| (area(memory.view()), Access::Write)));
        let elements = lent[me].slice_mut(..len);
        self.run(Request { extra, own, ..sum(call, None, elements) })
    }
}
