//! Launches of the collectives' kernels.

use super::{
    DType, ReduceOp,
    kernels::{self, Combine, Entry, FEW, Meet, Part, THREADS},
    request::RemotePtr,
};
use crate::{
    Device,
    driver::{KernelArg, Launch, LaunchDims},
    error::Result,
    memory::stream::StreamCore,
    thread::worker::Worker,
};
use smallvec::SmallVec;

/// Bytes that a block of a kernel on a device's own memory is worth starting for, and the most blocks.
const PER_BLOCK: usize = 16 << 10;
const MOST_BLOCKS: u32 = 64;

/// `len` elements of the sources, combined into all destinations.
pub(super) struct Combination<'a> {
    pub name: &'static str,
    pub what: (DType, ReduceOp),
    pub len: usize,
    pub sources: &'a [RemotePtr],
    pub destinations: &'a [RemotePtr],
    pub factors: &'a [f64],
}

impl Combination<'_> {
    pub(super) fn submit(&self, dev: &Device, meet: Meet, blocks: u32) -> Result<()> {
        let &Combination { name, what: (dtype, op), len, factors, .. } = self;
        // What is only moved is moved as bytes: a NaN keeps its bits.
        let moved = self.sources.len() == 1 && factors.is_empty();
        let (dtype, op, n) = if moved { (DType::U8, ReduceOp::Sum, len * dtype.size()) } else { (dtype, op, len) };
        let bytes = n * dtype.size();
        let part = |at: &RemotePtr| Part { address: at.address, bytes };
        let sources: SmallVec<[Part; 8]> = self.sources.iter().map(part).collect();
        let destinations: SmallVec<[Part; 8]> = self.destinations.iter().map(part).collect();
        if moved && meet.signals == 0 && destinations.iter().all(|to| to.address == sources[0].address) {
            return Ok(());
        }
        let combine = Combine { n, op, factors, sources: &sources, destinations: &destinations, meet };
        let args = combine.args(dev.worker.is_software());
        launch_meeting(dev, &meet, name, kernels::combine(dtype), blocks, &args)
    }
}

/// How many blocks a kernel has that works on so many bytes of its own device.
pub(crate) fn blocks(bytes: usize) -> u32 {
    blocks_of(bytes, PER_BLOCK, MOST_BLOCKS)
}

pub(super) fn blocks_of(bytes: usize, per_block: usize, most: u32) -> u32 {
    bytes.div_ceil(per_block).clamp(1, most as usize) as u32
}

/// Launches a kernel on memory whose uses the caller has noted.
pub(super) fn launch(dev: &Device, name: &'static str, entry: Entry, blocks: u32, args: &[KernelArg]) -> Result<()> {
    launch_on(&dev.worker, &dev.stream, name, entry, blocks, args)
}

/// [`launch`] on a stream of the worker's.
pub(super) fn launch_on(
    worker: &Worker,
    stream: &StreamCore,
    name: &'static str,
    entry: Entry,
    blocks: u32,
    args: &[KernelArg],
) -> Result<()> {
    submit_to((worker, stream), name, entry, blocks, args, false)
}

/// [`launch`] of a kernel that meets its peers', if `meet` is a meeting: it may come early. All that take a `Meet` wait
/// by themselves for what is before them (`kernels/build.py` checks that).
pub(super) fn launch_meeting(
    dev: &Device,
    meet: &Meet,
    name: &'static str,
    entry: Entry,
    blocks: u32,
    args: &[KernelArg],
) -> Result<()> {
    let (worker, handle) = (&dev.worker, &dev.worker.handle);
    let early = meet.signals != 0 && comes_early(blocks, handle.driver.info().multiprocessors, handle.sharers);
    submit_to((worker, &dev.stream), name, entry, blocks, args, early)
}

/// Whether a kernel of so many blocks may be on its device before the kernel that it waits for has ended. That one may
/// wait for a peer's, which may come after other work of this device, or be on the same GPU: these must find room,
/// beside both. `kernels/meet.cuh` has the other half of the argument. Large kernels would gain little.
fn comes_early(blocks: u32, multiprocessors: u32, sharers: usize) -> bool {
    sharers == 1 && FEW + blocks <= multiprocessors / 4 * 3
}

fn submit_to(
    (worker, stream): (&Worker, &StreamCore),
    name: &'static str,
    entry: Entry,
    blocks: u32,
    args: &[KernelArg],
    early: bool,
) -> Result<()> {
    let function = worker.function(entry.module, entry.name)?;
    let dims = LaunchDims { grid: (blocks, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    let launch = Launch { name: entry.name, function, host: entry.host, dims, args, early };
    // SAFETY: the memory is the members': each has lent it until its stream has passed the collective. It is ordered
    // before this launch, by events or by the kernel's own meeting, and no two members are given the same part.
    let launched = unsafe { worker.handle.driver.launch(&launch, stream.raw) };
    worker.handle.check(name, launched)
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
