//! All-reduce around a ring by one kernel per member, which writes to its successor's scratch. `kernels/ring.cu` has
//! the protocol. `choose` picks it for large `f32` and `f64` sums if kernels can wait for each other on the devices.
//!
//! Invariant: all members know the smallest scratch, so all cut alike ([`cut`]). The bits are those of
//! [`ring_ce`](super::ring_ce).

pub(crate) mod cut;

use super::{Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch};
use crate::collective::{Arguments, Entry, kernels::value};
use crate::fabric::{DType, DeviceBarrier, ReduceOp, Shape, Side, types};
use crate::{driver::Address, error::Result, kernel::builtin};

pub(crate) struct Ring;

impl Algorithm for Ring {
    about!("ring", Ring, "flags");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        // Calls and graphs give the same bits, so no ring where calls use `exchange_ce`, which adds in rank order.
        (can(case) && case.auto() && !case.engines() && case.bytes >= cut::least(case.members))
            .then_some("at this size a kernel that writes to its neighbour alone is fastest")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (can(case) && case.wants(types::Algorithm::Ring)).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let scratch = match case.shape {
            Some(&Shape::AllReduce { len: len @ 1.. }) => {
                let chunk = largest(case.members, case.dtype, len);
                Scratch::device(cut::scratch_sizes(chunk, cut::blocks(chunk, case.limits)))
            }
            _ => Scratch::None,
        };
        Needs { meeting: MeetBy::Kernels { launches: 1, in_full: true }, scratch }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        cut::blocks(case.largest(), case.limits) as u32
    }

    fn packs(&self) -> bool {
        false
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let &Shape::AllReduce { len: len @ 1.. } = matched.shape else {
            return super::fused::Fused.submit(member, matched);
        };
        let request = member.request;
        let n = member.count();
        let chunk = largest(n, request.dtype, len);
        let cutting = cut::cutting(chunk, cut::blocks(chunk, member.limits), matched.least_scratch(n));
        let sendings = cutting.rounds * cutting.abreast * 2 * (n - 1);
        assert!(u32::try_from(sendings).is_ok(), "they are counted in 32 bits; a terabyte has some millions");
        let own = |side| request.area(side).expect("all_reduce has a buffer").address;
        let next = (member.rank + 1) % n;
        let ring = Neighbours {
            from: own(Side::Source),
            to: own(Side::Destination),
            next_to: matched.address(next, Side::Destination),
            recv_scratch: matched.recv_scratch(member.rank).address,
            next_scratch: matched.recv_scratch(next).address,
        };
        let agreed = Cut {
            bytes: (len * request.dtype.size()) as u64,
            chunk: chunk as u64,
            piece: cutting.piece as u64,
            rounds: cutting.rounds as u32,
            abreast: cutting.abreast as u32,
            slots: cutting.slots as u32,
            spare: 0,
        };
        let factor = if request.reduce == ReduceOp::Avg { 1.0 / n as f64 } else { 1.0 };
        let round = Round { meet: member.barrier, ring, cut: agreed, dtype: request.dtype, factor };
        let (entry, blocks) = (entry(request.dtype), cutting.blocks as u32);
        member.launch(&entry, blocks, &round.args())
    }
}

fn can(case: &Case<'_>) -> bool {
    case.rings() && case.meets_on_devices()
}

fn largest(members: usize, dtype: DType, len: usize) -> usize {
    cut::chunk(0, members, len, dtype.size()).len() * dtype.size()
}

/// The kernel, launched with [`Round::args`]. It has no host kernel: software GPUs go round by copies.
pub(in super::super) fn entry(dtype: DType) -> Entry {
    let name = if dtype == DType::F64 { "ring_f64" } else { "ring_f32" };
    Entry { module: &builtin::RING, name, host: None }
}

#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in super::super) struct Neighbours {
    /// Own source and destination; they may be one.
    pub from: Address,
    pub to: Address,
    pub next_to: Address,
    /// Own memory that the predecessor fills: `slots` slots for each block,
    pub recv_scratch: Address,
    /// and the successor's.
    pub next_scratch: Address,
}

#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in super::super) struct Cut {
    pub bytes: u64,
    /// Bytes from one chunk to the next, a multiple of 128.
    pub chunk: u64,
    /// Bytes of a slot, a multiple of 128.
    pub piece: u64,
    /// Not 0.
    pub rounds: u32,
    /// Pieces of a block that take a hop after one another; not 0.
    pub abreast: u32,
    /// More than `abreast`.
    pub slots: u32,
    pub spare: u32,
}

/// One member's part of an all-reduce around a ring; on GPUs only. Every member launches the same grid.
pub(in super::super) struct Round {
    pub meet: DeviceBarrier,
    pub ring: Neighbours,
    pub cut: Cut,
    pub dtype: DType,
    pub factor: f64,
}

impl Round {
    pub(in super::super) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.cut.rounds > 0 && self.cut.slots > self.cut.abreast);
        let factor = if self.dtype == DType::F64 { value(self.factor) } else { value(self.factor as f32) };
        [value(self.meet), value(self.ring), value(self.cut), factor].into_iter().collect()
    }
}
