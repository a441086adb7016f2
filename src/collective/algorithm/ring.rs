//! All-reduce around a ring by one kernel per member, which writes to its successor alone. `kernels/ring.cu` has the
//! protocol.
//!
//! `choose` picks it for large sums of `f32` and `f64` where kernels can wait for each other on the devices. Partial
//! sums go to the successor's scratch.
//!
//! Invariant: all members know the smallest scratch, so all cut alike ([`ring_cut`]). The order of additions is that of
//! [`ring_ce`](super::ring_ce), and so are the bits.

use super::{
    super::kernels::{self, Cut, Round},
    About, Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, ring_cut,
};
use crate::{
    error::Result,
    fabric::{
        plan::{Shape, Side},
        types::{self, DType, ReduceOp},
    },
};

pub(crate) struct Ring;

impl Algorithm for Ring {
    fn about(&self) -> About {
        About { name: "ring", group: types::Algorithm::Ring, waits_by: "flags" }
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        // At sizes for which calls use `exchange_ce`, which adds in rank order, a graph must not use a ring: calls and
        // graphs give the same bits.
        (can(case) && case.auto() && !case.engines() && case.bytes >= case.limits.ring)
            .then_some("at this size a kernel that writes to its neighbour alone is fastest")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (can(case) && case.wants(types::Algorithm::Ring)).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let scratch = match case.shape {
            Some(&Shape::AllReduce { len: len @ 1.. }) => {
                let chunk = largest(case.members, case.dtype, len);
                Scratch::device(ring_cut::scratch_sizes(chunk, ring_cut::blocks(chunk, case.limits)))
            }
            _ => Scratch::None,
        };
        Needs { meeting: MeetBy::Kernels { launches: 1, in_full: true }, scratch }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        ring_cut::blocks(case.largest(), case.limits) as u32
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
        let cutting = ring_cut::cutting(chunk, ring_cut::blocks(chunk, member.limits), matched.least_scratch(n));
        let sendings = cutting.rounds * cutting.abreast * 2 * (n - 1);
        assert!(u32::try_from(sendings).is_ok(), "they are counted in 32 bits; a terabyte has some millions");
        let own = |side| request.area(side).expect("all_reduce has a buffer").address;
        let next = (member.rank + 1) % n;
        let ring = kernels::Ring {
            from: own(Side::Source),
            to: own(Side::Destination),
            next_to: matched.address(next, Side::Destination),
            recv_scratch: matched.recv_scratch(member.rank).address,
            next_scratch: matched.recv_scratch(next).address,
        };
        let cut = Cut {
            bytes: (len * request.dtype.size()) as u64,
            chunk: chunk as u64,
            piece: cutting.piece as u64,
            rounds: cutting.rounds as u32,
            abreast: cutting.abreast as u32,
            slots: cutting.slots as u32,
            spare: 0,
        };
        let factor = if request.reduce == ReduceOp::Avg { 1.0 / n as f64 } else { 1.0 };
        let round = Round { meet: member.barrier, ring, cut, dtype: request.dtype, factor };
        let (entry, blocks) = (kernels::ring(request.dtype), cutting.blocks as u32);
        member.launch(&entry, blocks, &round.args())
    }
}

fn can(case: &Case<'_>) -> bool {
    case.rings() && case.meets_on_devices()
}

/// Bytes of the largest chunk of an all-reduce of `len` elements.
fn largest(members: usize, dtype: DType, len: usize) -> usize {
    ring_cut::chunk(0, members, len, dtype.size()).len() * dtype.size()
}
