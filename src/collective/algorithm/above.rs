//! A collective by a kernel of a crate above, which does more than the collective: `gpu-pool-train` adds up gradients,
//! updates parameters and sends them by one kernel of each member.
//!
//! Its caller asks for it ([`Group::parts_by_kernel`], [`Group::sum_by_kernel`]), so it is not in the table of
//! [`choose`](super::super::choose). It has no host kernel.

use super::{About, Algorithm, Matched, MeetBy, Member, Needs, Scratch};
use crate::{
    Element, Module, ReduceOp,
    collective::{Arguments, Entry, Group, Request, between, case::Case, ops::sum},
    error::Result,
    fabric::{Area, BLOCKS, Call, DeviceBarrier, Limits, MOST, Shape, Side, types},
    memory::{Access, DeviceView, DeviceViewMut},
};

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
}
