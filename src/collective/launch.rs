//! Launches of the collectives' kernels, and their numbers of blocks.
//!
//! The algorithms launch through [`Member::launch`], which calls [`submit`]; `all_reduce_many` and the barriers'
//! `count` launch without a member.

use super::{
    algorithm::Member,
    kernels::{self, Combine, Entry, Part},
    request::RemotePtr,
};
use crate::{
    driver::{KernelArg, Launch, LaunchDims, RawFunction},
    error::Result,
    fabric::{
        layout::{FEW, THREADS},
        types::{DType, ReduceOp},
    },
    memory::{handle::DeviceHandle, stream::StreamCore},
    thread::worker::Worker,
};
use smallvec::SmallVec;

/// A kernel that works on its own device's memory has one block for this many bytes, and at most so many blocks.
const PER_BLOCK: usize = 16 << 10;
const MOST_BLOCKS: u32 = 64;

/// `len` elements of the sources, combined into all destinations.
pub(super) struct Combination<'a> {
    pub len: usize,
    pub sources: &'a [RemotePtr],
    pub destinations: &'a [RemotePtr],
    pub factors: &'a [f64],
}

impl Combination<'_> {
    /// Launches the kernel, for elements and an operation of these types.
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

/// The number of blocks of a kernel that works on so many bytes of its own device's memory.
pub(crate) fn blocks(bytes: usize) -> u32 {
    blocks_of(bytes, PER_BLOCK, MOST_BLOCKS)
}

/// One block for each `per_block` bytes, at least one, and at most `most`.
pub(super) fn blocks_of(bytes: usize, per_block: usize, most: u32) -> u32 {
    bytes.div_ceil(per_block).clamp(1, most as usize) as u32
}

/// Launches a kernel on a stream of the worker's device. The caller has noted the uses of the memory.
pub(super) fn launch_on(
    worker: &Worker,
    stream: &StreamCore,
    name: &'static str,
    entry: &Entry,
    blocks: u32,
    args: &[KernelArg],
) -> Result<()> {
    let function = worker.function(entry.module, entry.name)?;
    submit((&worker.handle, stream), name, (entry, function), blocks, args, false)
}

/// Whether a kernel of so many blocks may be on its device before the kernel that it waits for has ended. That one may
/// wait for a peer's kernel. The peer's kernel may come after other work of this device, or be on the same GPU: both
/// must find room beside the two. `kernels/meet.cuh` has the other half of the argument. Large kernels would gain
/// little.
pub(super) fn comes_early(blocks: u32, multiprocessors: u32, sharers: usize) -> bool {
    sharers == 1 && FEW + blocks <= multiprocessors / 4 * 3
}

/// Launches a kernel; `early`: it may be on the device before the kernel in front of it has ended.
pub(super) fn submit(
    (handle, stream): (&DeviceHandle, &StreamCore),
    name: &'static str,
    (entry, function): (&Entry, RawFunction),
    blocks: u32,
    args: &[KernelArg],
    early: bool,
) -> Result<()> {
    let dims = LaunchDims { grid: (blocks, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    let launch = Launch { name: entry.name, function, host: entry.host, dims, args, early };
    // SAFETY: the memory is the members': each has lent it until its stream has passed the collective. It is ordered
    // before this launch, by events or by the kernel's own meeting, and no two members are given the same part.
    let launched = unsafe { handle.driver.launch(&launch, stream.raw) };
    handle.check(name, launched)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_left_beside_a_kernel_that_waits() {
        assert!(comes_early(1, 132, 1) && comes_early(64, 132, 1));
        assert!(!comes_early(68, 132, 1));
        // A peer's kernel must find room on the same GPU.
        assert!(!comes_early(1, 132, 2));
        // Parts of a GPU, and software GPUs.
        assert!(!comes_early(1, 16, 1) && !comes_early(1, 1, 1));
    }
}
