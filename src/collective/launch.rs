//! Launches of kernels that several algorithms have in common, and their numbers of blocks.

use super::{
    Combine, Entry, Member, Part, RemotePtr,
    algorithm::{dims, launch},
    kernels,
};
use crate::fabric::{DType, ReduceOp};
use crate::{driver::KernelArg, error::Result, memory::StreamCore, thread::worker::Worker};
use smallvec::SmallVec;

/// A kernel that works on its own device's memory has one block for this many bytes, and at most so many blocks.
const PER_BLOCK: usize = 16 << 10;
const MOST_BLOCKS: u32 = 64;

pub(super) struct Combination<'a> {
    pub len: usize,
    pub sources: &'a [RemotePtr],
    pub destinations: &'a [RemotePtr],
    pub factors: &'a [f64],
}

impl Combination<'_> {
    pub(super) fn submit(&self, member: &Member<'_>, (dtype, op): (DType, ReduceOp), blocks: u32) -> Result<()> {
        let &Combination { len, factors, .. } = self;
        // A single source is moved as bytes, so that a NaN keeps its bits.
        let moved = self.sources.len() == 1 && factors.is_empty();
        let (dtype, op, n) = if moved { (DType::U8, ReduceOp::Sum, len * dtype.size()) } else { (dtype, op, len) };
        let bytes = n * dtype.size();
        let part = |at: &RemotePtr| Part { address: at.address, bytes };
        let sources: SmallVec<[Part; 8]> = self.sources.iter().map(part).collect();
        let destinations: SmallVec<[Part; 8]> = self.destinations.iter().map(part).collect();
        let meet = member.barrier;
        if moved && meet.signals == 0 && destinations.iter().all(|to| to.address == sources[0].address) {
            return Ok(());
        }
        let combine = Combine { n, op, factors, sources: &sources, destinations: &destinations, meet };
        member.launch(&kernels::combine(dtype), blocks, &combine.args(member.is_software()))
    }
}

pub(crate) fn blocks(bytes: usize) -> u32 {
    blocks_of(bytes, PER_BLOCK, MOST_BLOCKS)
}

/// One block for each `per_block` bytes, at least one, and at most `most`.
pub(super) fn blocks_of(bytes: usize, per_block: usize, most: u32) -> u32 {
    bytes.div_ceil(per_block).clamp(1, most as usize) as u32
}

/// Launches a kernel on a stream of the worker's device. The caller has noted the uses of the memory.
pub(crate) fn launch_on(
    worker: &Worker,
    stream: &StreamCore,
    name: &'static str,
    entry: &Entry,
    blocks: u32,
    args: &[KernelArg],
) -> Result<()> {
    let function = worker.function(entry.module, entry.name)?;
    launch((&worker.handle, stream), name, (entry, function), dims(blocks), args, false)
}
