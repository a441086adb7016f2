//! Through the host's memory, by one kernel per member: each member writes its own stage in page-locked memory, and
//! reads all others' ([`staging`](crate::fabric::staging) has the plan). For pools without peer access;
//! `kernels/staged.cu` has the protocol.
//!
//! [`shm_events`](super::shm_events) takes the same steps where kernels cannot wait for each other there.

use super::{
    super::{
        choose::{Case, KernelBarrier},
        kernels::{self, Moves, Role, Stage, Staged},
    },
    Algorithm, Matched, Member, Needs,
};
use crate::error::Result;
use crate::fabric::{
    layout::{MOST, STAGED_BLOCKS},
    limits::Limits,
    plan::{GRAIN, Side},
    signal_pad::SLOT,
    staging::cutting,
    types,
};

pub(crate) struct Shm;

impl Algorithm for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn group(&self, _: &Case<'_>) -> types::Algorithm {
        types::Algorithm::Staged
    }

    fn waits_by(&self) -> &'static str {
        "flags"
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        case.meets_in_host().then_some(
            "not all members have peer access, but their kernels can meet in the host's memory: one launch each",
        )
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        let in_host = matches!(case.machine.barrier, KernelBarrier::InHost { .. });
        (in_host && wanted(case)).then_some("asked for")
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::ONE_KERNEL
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        let Some(shape) = case.shape else { return 0 };
        let plan = shape.staging(case.members, 0, GRAIN / case.dtype.size());
        cutting(plan.most * case.dtype.size(), plan.lanes, most_blocks(case.limits), SLOT).blocks as u32
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let (request, meet) = (member.request, member.barrier);
        let plan = matched.shape.staging(member.count(), member.rank, request.grain());
        let size = request.dtype.size();
        if plan.most == 0 {
            return member.launch_counting();
        }
        let cut = cutting(plan.most * size, plan.lanes, most_blocks(member.limits), SLOT);
        let (mut puts, mut pulls) = (Moves::default(), Moves::default());
        for (lane, range) in &plan.puts {
            puts.set(*lane, member.own(Side::Source, range.start, range.len()), range.len() * size);
        }
        for &(peer, _, start, len) in &plan.pulls {
            pulls.set(peer, member.own(Side::Destination, start, len), len * size);
        }
        let mut role = Role::default();
        if let Some(fold) = &plan.fold {
            role.from = member.own(Side::Source, fold.source, fold.len);
            role.to = fold.destination.map_or(0, |start| member.own(Side::Destination, start, fold.len));
            role.bytes = (fold.len * size) as u64;
            role.result = u64::from(fold.result);
        }
        if let Some((from, to, len)) = plan.stays {
            role.local_from = member.own(Side::Source, from, len);
            role.local_to = member.own(Side::Destination, to, len);
            role.local_bytes = (len * size) as u64;
        }
        let (counts, offset) = member.pad().stage_offsets();
        let stage = Stage {
            offset,
            chunk: cut.chunk as u64,
            slot: SLOT as u64,
            steps: u32::try_from(cut.steps).expect("a piece has at least 4 KiB, so this is more memory than there is"),
            lanes: plan.lanes as u32,
            two: u32::from(plan.two),
            counts,
            spare: 0,
            spares: 0,
        };
        let factors = &member.factors(matched);
        let staged = Staged { meet, stage, role, op: request.reduce, factors, puts, pulls };
        member.launch(&kernels::staged(request.dtype), cut.blocks as u32, &staged.args())
    }
}

/// Whether the user asked for stages, and the pool can have them.
pub(super) fn wanted(case: &Case<'_>) -> bool {
    let most = if case.machine.software { usize::MAX } else { MOST };
    case.wants(types::Algorithm::Staged) && (2..=most).contains(&case.members) && !case.machine.virtual_time
}

/// Most blocks. All of them are on the device at once; else a block could wait for a peer's block that is not.
fn most_blocks(limits: &Limits) -> usize {
    STAGED_BLOCKS.min(limits.ll_blocks as usize)
}
