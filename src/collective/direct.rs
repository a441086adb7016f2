//! One kernel, which reads and writes the members' memory itself.

use super::{
    DType, Group, ReduceOp,
    kernels::{self, Combine, Entry, Meet, Pairs, Part},
    run::{Job, Request, Spot},
};
use crate::{
    Device,
    driver::{KernelArg, Launch, LaunchDims},
    error::Result,
};

/// Threads of a block, as the kernels are made for.
const THREADS: u32 = 512;
/// Bytes that a block is worth starting for.
const PER_BLOCK: usize = 16 << 10;
/// More do not make a link faster (prototypes/README.md), and leave less to other work.
const MOST_BLOCKS: u32 = 64;

/// Submits a member's part to the current stream.
pub(super) fn submit(group: &Group<'_>, request: &Request, job: &Job) -> Result<()> {
    let (dev, name) = (group.dev, request.call.op());
    match job {
        Job::Combine { len, sources, destinations, factors } => {
            combine(dev, name, (request.dtype, request.reduce), *len, sources, destinations, factors)
        }
        Job::Pairs(pairs) => {
            let part = |spot: &Spot, bytes| Part { address: spot.address, bytes };
            let parts: Vec<_> = pairs.iter().map(|(from, to, bytes)| (part(from, *bytes), part(to, *bytes))).collect();
            let largest = pairs.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0);
            let each = blocks(largest).min((MOST_BLOCKS / pairs.len() as u32).max(1));
            let args = Pairs { pairs: &parts, blocks_per_pair: each, meet: Meet::NONE }.args(dev.worker.is_software());
            launch(dev, name, kernels::pairs(), each * pairs.len() as u32, &args)
        }
    }
}

/// Combines `len` elements of the sources into all destinations.
pub(super) fn combine(
    dev: &Device,
    name: &'static str,
    (dtype, op): (DType, ReduceOp),
    len: usize,
    sources: &[Spot],
    destinations: &[Spot],
    factors: &[f64],
) -> Result<()> {
    // What is only moved is moved as bytes: a NaN keeps its bits.
    let moved = sources.len() == 1 && factors.is_empty();
    let (dtype, op, n) = if moved { (DType::U8, ReduceOp::Sum, len * dtype.size()) } else { (dtype, op, len) };
    let bytes = n * dtype.size();
    let part = |spot: &Spot| Part { address: spot.address, bytes };
    let sources: Vec<_> = sources.iter().map(part).collect();
    let destinations: Vec<_> = destinations.iter().map(part).collect();
    if moved && destinations.iter().all(|to| to.address == sources[0].address) {
        return Ok(());
    }
    let combine = Combine { dtype, n, op, factors, sources: &sources, destinations: &destinations, meet: Meet::NONE };
    launch(dev, name, kernels::combine(dtype), blocks(bytes), &combine.args(dev.worker.is_software()))
}

pub(super) fn blocks(bytes: usize) -> u32 {
    bytes.div_ceil(PER_BLOCK).clamp(1, MOST_BLOCKS as usize) as u32
}

/// Launches a kernel on memory whose uses the caller has noted.
pub(super) fn launch(dev: &Device, name: &'static str, entry: Entry, blocks: u32, args: &[KernelArg]) -> Result<()> {
    let link = &dev.worker.link;
    let function = dev.worker.function(entry.module, entry.name)?;
    let dims = LaunchDims { grid: (blocks, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    let launch = Launch { name: entry.name, function, host: entry.host, dims, args };
    // SAFETY: the memory is the members': each has lent it until its stream has passed the collective, and has ordered it
    // before `ready`, for which this stream waits; no two members are given the same part.
    let launched = unsafe { link.driver.launch(&launch, dev.stream.raw) };
    link.check(name, launched)
}
