//! One kernel, which reads and writes the members' memory itself.

use super::{
    DType, Group, ReduceOp,
    kernels::{self, Combine, Entry, FEW, Meet, Pairs, Part, THREADS},
    plan::Shape,
    run::{Job, Request, Spot},
    tuner::Limits,
};
use crate::{
    Device,
    driver::{KernelArg, Launch, LaunchDims},
    error::Result,
    runtime::worker::Worker,
    stream::StreamCore,
};
use smallvec::SmallVec;

/// Bytes that a block of a kernel on a device's own memory is worth starting for, and the most blocks.
const PER_BLOCK: usize = 16 << 10;
const MOST_BLOCKS: u32 = 64;

/// Submits a member's part to the current stream. `largest`: bytes of the largest part of any member, which decides how many
/// blocks each of them starts, within `limits`; all members must come to the same number.
pub(super) fn submit(
    group: &Group<'_>,
    request: &Request,
    job: &Job,
    meet: Meet,
    largest: usize,
    limits: &Limits,
) -> Result<()> {
    let (dev, name) = (group.dev, request.call.op());
    match job {
        Job::Combine { len, sources, destinations, factors } => {
            let what = (request.dtype, request.reduce);
            let work = Combination { name, what, len: *len, sources, destinations, factors };
            let blocks = match sources.len() {
                1 => moving(request.shape.as_ref(), largest, limits),
                several => combining(largest, several, limits),
            };
            work.submit(dev, meet, blocks)
        }
        Job::Pairs(pairs) => {
            let part = |spot: &Spot, bytes| Part { address: spot.address, bytes };
            let parts: Vec<_> = pairs.iter().map(|(from, to, bytes)| (part(from, *bytes), part(to, *bytes))).collect();
            let each = blocks_of(largest, limits.per_block, (limits.blocks / pairs.len() as u32).max(1));
            let args = Pairs { pairs: &parts, blocks_per_pair: each, meet }.args(dev.worker.is_software());
            launch_meeting(dev, &meet, name, kernels::pairs(), each * pairs.len() as u32, &args)
        }
    }
}

/// `len` elements of the sources, combined into all destinations.
pub(super) struct Combination<'a> {
    pub name: &'static str,
    pub what: (DType, ReduceOp),
    pub len: usize,
    pub sources: &'a [Spot],
    pub destinations: &'a [Spot],
    pub factors: &'a [f64],
}

impl Combination<'_> {
    pub(super) fn submit(&self, dev: &Device, meet: Meet, blocks: u32) -> Result<()> {
        let &Combination { name, what: (dtype, op), len, factors, .. } = self;
        // What is only moved is moved as bytes: a NaN keeps its bits.
        let moved = self.sources.len() == 1 && factors.is_empty();
        let (dtype, op, n) = if moved { (DType::U8, ReduceOp::Sum, len * dtype.size()) } else { (dtype, op, len) };
        let bytes = n * dtype.size();
        let part = |spot: &Spot| Part { address: spot.address, bytes };
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

/// How many blocks a kernel has that combines parts of so many sources.
pub(crate) fn combining(largest: usize, sources: usize, limits: &Limits) -> u32 {
    let large = sources > 1 && largest >= limits.large;
    blocks_of(largest, limits.per_block, if large { limits.large_blocks } else { limits.blocks })
}

/// How many blocks a kernel has that moves one part, of which the largest has so many bytes, to all.
fn moving(shape: Option<&Shape>, largest: usize, limits: &Limits) -> u32 {
    let most = match shape {
        Some(Shape::Broadcast { .. }) if largest >= limits.large => limits.handed_on_blocks,
        Some(Shape::AllGather { .. }) if largest >= limits.gathered => limits.gathered_blocks,
        _ => limits.blocks,
    };
    blocks_of(largest, limits.per_block, most)
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

/// [`launch`] of a kernel that meets its peers', if `meet` is a meeting: it may come early. All that take a `Meet` wait by
/// themselves for what is before them (`kernels/build.py` checks that).
pub(super) fn launch_meeting(
    dev: &Device,
    meet: &Meet,
    name: &'static str,
    entry: Entry,
    blocks: u32,
    args: &[KernelArg],
) -> Result<()> {
    let (worker, link) = (&dev.worker, &dev.worker.link);
    let early = meet.signals != 0 && comes_early(blocks, link.driver.info().multiprocessors, link.sharers);
    submit_to((worker, &dev.stream), name, entry, blocks, args, early)
}

/// Whether a kernel of so many blocks may be on its device before the kernel that it waits for has ended. That one may wait for a
/// peer's, which may come after other work of this device, or be on the same GPU: these must find room, beside both.
/// `kernels/meet.cuh` has the other half of the argument. Large kernels would gain little.
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
    // SAFETY: the memory is the members': each has lent it until its stream has passed the collective. It is ordered before
    // this launch, by events or by the kernel's own meeting, and no two members are given the same part.
    let launched = unsafe { worker.link.driver.launch(&launch, stream.raw) };
    worker.link.check(name, launched)
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
