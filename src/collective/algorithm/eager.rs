//! The eager protocol: a sender writes plain data into slots at the receivers, with one flag per block behind them. No
//! barrier before and none after.
//!
//! `choose` picks it for buffers that are too large for [`ll`], whose flags double the bytes, and too small for
//! [`fused`](super::fused), whose barriers cost two trips. Runs `kernels/eager.cu`; never touches a peer's user buffer.

use super::{
    super::{
        case::KernelBarrier,
        kernels::{Entry, typed},
        launch,
    },
    About, Algorithm, Case, Matched, Member, Needs, ll,
};
use crate::{
    error::Result,
    fabric::{
        limits::Limits,
        plan::Side,
        types::{self, DType},
    },
    kernel::builtin,
};

pub(crate) struct Eager;

impl Algorithm for Eager {
    fn about(&self) -> About {
        About { name: "eager", group: types::Algorithm::Direct, waits_by: "flags" }
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let each = case.packets.filter(|&each| each > 0)?;
        let KernelBarrier::OnDevices { eager, .. } = case.machine.barrier else { return None };
        let most = if case.whole { case.limits.eager_whole } else { case.limits.eager };
        (case.meets_on_devices() && each <= most.min(eager)).then_some(
            "not large: written to where the receivers have room for it, it needs no barrier before and none after",
        )
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::ONE_KERNEL
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

/// Blocks of a kernel that sends `bytes` bytes to each peer.
pub(crate) fn blocks(bytes: usize, limits: &Limits) -> u32 {
    launch::blocks_of(bytes, limits.eager_per_block, limits.blocks)
}

/// The kernel: plain data into slots at the receivers. Launched with [`Push::args`](ll::Push::args).
pub(in super::super) fn entry(dtype: DType) -> Entry {
    Entry { module: &builtin::EAGER, name: typed!(dtype, "eager"), host: None }
}
