//! The eager protocol: a sender writes plain data into slots at the receivers, with one flag per block behind them, and
//! no barrier. `choose` picks it for buffers that are too large for [`ll`] and too small for [`fused`]. Runs
//! `kernels/eager.cu`; never touches a peer's user buffer.

use super::{Algorithm, Case, Matched, Member, fused, ll};
use crate::{
    collective::{Entry, KernelBarrier, launch},
    error::Result,
    fabric::{DType, Limits, Side},
    kernel::builtin,
};

pub(crate) struct Eager;

/// Bytes of a block: a pack of 16 for each thread, so that all are on their way at once.
const PER_BLOCK: usize = 512 * 16;

/// Most bytes to one peer of an all-reduce, a reduce or a broadcast: each peer gets the whole buffer. All-reduces on 4
/// H200s: 256 KB take 9.5 us eagerly and 10.1 otherwise, 512 KB take 11.6 and 10.8.
pub(crate) fn most_whole(members: usize) -> usize {
    (1 << 20) / members.saturating_sub(1).max(1)
}

impl Algorithm for Eager {
    about!("eager", Direct, "flags");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let each = case.packets.filter(|&each| each > 0)?;
        let KernelBarrier::OnDevices { eager, .. } = case.machine.barrier else { return None };
        let most = if case.whole { most_whole(case.members) } else { eager };
        (case.meets_on_devices() && each <= most.min(eager)).then_some(
            "not large: written to where the receivers have room for it, it needs no barrier before and none after",
        )
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        blocks(case.packets.unwrap_or(0), case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let packets = ll::packets(member, matched);
        let blocks = blocks(ll::bytes(member, &packets), member.limits);
        ll::trip(member, matched, &packets, Side::Source, entry(member.request.dtype), blocks)
    }
}

pub(crate) fn blocks(bytes: usize, limits: &Limits) -> u32 {
    launch::blocks_of(bytes, PER_BLOCK, limits.blocks(fused::BLOCKS))
}

pub(in super::super) fn entry(dtype: DType) -> Entry {
    Entry { module: &builtin::EAGER, name: typed_name!(dtype, "eager"), host: None }
}
