//! Through the host's memory, by one kernel per member: every member fills a stage of its own in page-locked memory,
//! and reads the stages of all others. [`staging`](super::staging) has the plan, `kernels/staged.cu` the protocol.
//!
//! `choose` picks it for pools without peer access. [`shm_events`](super::shm_events) takes the same steps where
//! kernels cannot wait for each other in the host's memory.

use super::{Algorithm, Case, Matched, Member, cutting};
use crate::{
    collective::{Arguments, Entry, KernelBarrier, code, eights, factors, kernels::value},
    driver::{Address, KernelArg},
    error::Result,
    fabric::{
        BLOCKS, DType, DeviceBarrier, GRAIN, Limits, MOST, ReduceOp, STAGED_BLOCKS, Side, signal_pad::SLOT, types,
    },
    kernel::builtin,
};

pub(crate) struct Shm;

impl Algorithm for Shm {
    about!("shm", Staged, "flags");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        case.meets_in_host().then_some(
            "not all members have peer access, but their kernels can meet in the host's memory: one launch each",
        )
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        let in_host = matches!(case.machine.barrier, KernelBarrier::InHost { .. });
        (in_host && wanted(case)).then_some("asked for")
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
        member.launch(&entry(request.dtype), cut.abreast as u32, &staged.args())
    }
}

/// Whether the user has asked for stages, and members can have them.
pub(super) fn wanted(case: &Case<'_>) -> bool {
    let most = if case.machine.software { usize::MAX } else { MOST };
    case.wants(types::Algorithm::Staged) && (2..=most).contains(&case.members) && !case.machine.virtual_time
}

/// Most blocks of a kernel. All blocks must run at once: a block waits for its peers' blocks.
fn most_blocks(limits: &Limits) -> usize {
    STAGED_BLOCKS.min(limits.of_one_trip(BLOCKS) as usize)
}

pub(in super::super) fn entry(dtype: DType) -> Entry {
    Entry { module: &builtin::STAGED, name: typed_name!(dtype, "staged"), host: None }
}

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in super::super) struct Stage {
    pub offset: u64,
    /// Bytes of a lane that a block stages at once, a multiple of 128.
    pub chunk: u64,
    pub slot: u64,
    /// Pieces; not 0.
    pub steps: u32,
    pub lanes: u32,
    pub two: u32,
    pub spare: u32,
    /// Bytes from a member's signals to its counters ([`STAGED_COUNTS`](crate::fabric::layout::STAGED_COUNTS)).
    pub counts: u64,
    pub spares: u64,
}

#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in super::super) struct Role {
    pub from: Address,
    pub to: Address,
    pub bytes: u64,
    pub local_from: Address,
    pub local_to: Address,
    pub local_bytes: u64,
    /// 1: the fold's result goes to the own lane.
    pub result: u64,
    pub spare: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Moves([(Address, u64); MOST]);

impl Moves {
    pub(in super::super) fn set(&mut self, at: usize, address: Address, bytes: usize) {
        self.0[at] = (address, bytes as u64);
    }

    fn args(&self) -> impl Iterator<Item = KernelArg> {
        [self.0.map(|(address, _)| address), self.0.map(|(_, bytes)| bytes)].into_iter().flat_map(|all| eights(&all))
    }
}

/// One member's part of a collective that goes through the host's memory; on GPUs only. Every member launches the same
/// grid, of blocks whose threads are a multiple of 128.
pub(in super::super) struct Staged<'a> {
    pub meet: DeviceBarrier,
    pub stage: Stage,
    pub role: Role,
    pub op: ReduceOp,
    pub factors: &'a [f64],
    /// Own source, by lane.
    pub puts: Moves,
    /// Own destination, by rank of whose stage it comes from.
    pub pulls: Moves,
}

impl Staged<'_> {
    pub(in super::super) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.stage.steps > 0);
        let [low, high] = factors(self.factors);
        let head = [value(self.meet), value(self.stage), value(self.role), value(code(self.op)), low, high];
        head.into_iter().chain(self.puts.args()).chain(self.pulls.args()).collect()
    }
}
