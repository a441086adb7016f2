//! Through the host's memory, by one kernel per member: every member fills a stage of its own in page-locked memory,
//! and reads the stages of all others. [`staging`](crate::fabric::staging) has the plan, `kernels/staged.cu` the
//! protocol.
//!
//! `choose` picks it for pools without peer access. [`shm_events`](super::shm_events) takes the same steps where
//! kernels cannot wait for each other in the host's memory.

use super::{
    super::{
        case::KernelBarrier,
        kernels::{self, Moves, Role, Stage, Staged},
    },
    About, Algorithm, Case, Matched, Member, Needs,
};
use crate::{
    error::Result,
    fabric::{
        layout::{MOST, STAGED_BLOCKS},
        limits::Limits,
        plan::Side,
        signal_pad::SLOT,
        staging::cutting,
        tiling::GRAIN,
        types,
    },
};

pub(crate) struct Shm;

impl Algorithm for Shm {
    fn about(&self) -> About {
        About { name: "shm", group: types::Algorithm::Staged, waits_by: "flags" }
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
        cutting(plan.most * case.dtype.size(), plan.lanes, most_blocks(case.limits), SLOT).abreast as u32
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
            chunk: cut.tile as u64,
            slot: SLOT as u64,
            steps: u32::try_from(cut.rounds).expect("a piece has at least 4 KiB, so this is more memory than there is"),
            lanes: plan.lanes as u32,
            two: u32::from(plan.two),
            counts,
            spare: 0,
            spares: 0,
        };
        let factors = &member.factors(matched);
        let staged = Staged { meet, stage, role, op: request.reduce, factors, puts, pulls };
        member.launch(&kernels::staged(request.dtype), cut.abreast as u32, &staged.args())
    }
}

/// Whether the user has asked for stages, and members can have them.
pub(super) fn wanted(case: &Case<'_>) -> bool {
    let most = if case.machine.software { usize::MAX } else { MOST };
    case.wants(types::Algorithm::Staged) && (2..=most).contains(&case.members) && !case.machine.virtual_time
}

/// Most blocks of a kernel. All blocks must run at once: a block waits for its peers' blocks.
fn most_blocks(limits: &Limits) -> usize {
    STAGED_BLOCKS.min(limits.ll_blocks as usize)
}
