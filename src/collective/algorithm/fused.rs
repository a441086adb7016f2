//! One kernel per member does the whole collective: it reads one slice from all members and writes the sums to all.
//!
//! `choose` picks it on GPUs with peer access where no other algorithm is faster. The kernel waits for its peers'
//! kernels by flags, before it reads and after it has written (`kernels/combine.cu`, `kernels/meet.cuh`).
//! [`fused_events`](super::fused_events) runs the same kernels where they cannot wait for each other.

use super::{super::kernels, Algorithm, Case, Matched, Member};
use crate::{
    collective::{Combination, Job, Pairs, Part, RemotePtr, launch::blocks_of},
    error::Result,
    fabric::{Limits, Shape},
};

pub(crate) struct Fused;

impl Algorithm for Fused {
    about!("fused", Direct, "flags");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        case.meets_on_devices().then_some("all members have peer access, and their kernels can meet: one launch each")
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        combining(case.largest(), case.members, case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let request = member.request;
        let work = matched.shape.work(member.count(), member.rank, request.grain());
        let at = |rank, side| member.local(matched.address(rank, side));
        launch(member, matched, &request.job(&work, at, member.factors(matched)))
    }
}

/// All members must launch the same number of blocks, so the largest part of any member decides.
pub(super) fn launch(member: &Member<'_>, matched: &Matched<'_>, job: &Job) -> Result<()> {
    let (request, limits) = (member.request, member.limits);
    let largest = matched.shape.largest(member.count(), request.grain()) * request.dtype.size();
    match job {
        Job::Combine { len, sources, destinations, factors } => {
            let work = Combination { len: *len, sources, destinations, factors };
            let blocks = match sources.len() {
                1 => moving(request.shape.as_ref(), largest, member.count(), limits),
                several => combining(largest, several, limits),
            };
            work.submit(member, (request.dtype, request.reduce), blocks)
        }
        Job::Pairs(pairs) => {
            let part = |at: &RemotePtr, bytes| Part { address: at.address, bytes };
            let parts: Vec<_> = pairs.iter().map(|(from, to, bytes)| (part(from, *bytes), part(to, *bytes))).collect();
            let each = blocks_of(largest, PER_BLOCK, (limits.blocks(BLOCKS) / pairs.len() as u32).max(1));
            let args = Pairs { pairs: &parts, blocks_per_pair: each, meet: member.barrier };
            let (blocks, args) = (each * pairs.len() as u32, args.args(member.is_software()));
            member.launch(&kernels::pairs(), blocks, &args)
        }
    }
}

/// A kernel has one block for this many bytes,
pub(crate) const PER_BLOCK: usize = 16 << 10;
/// and at most so many. More do not make a link faster, and leave less to other work.
pub(crate) const BLOCKS: u32 = 64;

/// Parts of at least so many bytes are large, and kernels that add them up have at most so many blocks. On 4 H200s,
/// parts of 2 MB: all-reduce 50 us with 16 blocks, 52 with 64; reduce-scatter 30 and 33.
pub(crate) fn large(members: usize) -> (usize, u32) {
    if members > 2 { (2 << 20, 16) } else { (8 << 20, BLOCKS) }
}

/// For large parts. On 4 H200s, parts of 2 MB take 40 us with 32 blocks and 41 with 64, parts of 21 MB 209 and 238.
fn relays(members: usize) -> u32 {
    if members > 2 { 32 } else { BLOCKS }
}

/// Bytes of parts from which on an all-gather has at most so many blocks.
fn gathers(members: usize) -> (usize, u32) {
    if members > 2 { (4 << 20, 96) } else { (8 << 20, BLOCKS) }
}

/// Blocks of a kernel that adds up parts of all `members`' buffers. The largest part has `largest` bytes.
pub(crate) fn combining(largest: usize, members: usize, limits: &Limits) -> u32 {
    let (from, few) = large(members);
    let large = members > 1 && largest >= from;
    blocks_of(largest, PER_BLOCK, limits.blocks(if large { few } else { BLOCKS }))
}

fn moving(shape: Option<&Shape>, largest: usize, members: usize, limits: &Limits) -> u32 {
    let most = match shape {
        Some(Shape::Broadcast { .. }) if largest >= large(members).0 => relays(members),
        Some(Shape::AllGather { .. }) if largest >= gathers(members).0 => gathers(members).1,
        _ => BLOCKS,
    };
    blocks_of(largest, PER_BLOCK, limits.blocks(most))
}
