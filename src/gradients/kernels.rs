//! Launches of `kernels/gradients.cu`: pack, unpack and norm; their host kernels are in [`host_kernels`]. [`update`]
//! launches `kernels/optimizer.cu`; [`sharded`] has the arguments of `kernels/sharded.cu`.
//!
//! On a GPU the table of segments holds addresses. A host kernel finds the same memory as slices behind the table; the
//! slices also tell the checker what is touched. A GPU ignores arguments that its kernel does not have.

pub(super) mod host_kernels;
pub(super) mod sharded;
#[cfg(test)]
mod tests;
pub(crate) mod update;

use super::{
    element::{
        Gradient,
        private::{Between, Named},
    },
    layout::Unit,
};
use crate::{
    Device, Element, LaunchDims, Module,
    driver::{Address, KernelArg, Launch, ValueBytes},
    error::{Error, Result},
    kernel::builtin,
    memory::{DeviceCopy, DeviceView, block::BlockRef, hazard::Access},
};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Most segments of a launch. Addresses are arguments, not a table in memory: they may change at every step, and a
/// table would have to be copied to the device before each launch.
pub(super) const SEGMENTS: usize = 64;
/// Most thread blocks of a launch.
const BLOCKS: usize = 256;
/// Threads per block; the kernels demand this number.
const THREADS: u32 = 512;
/// Elements per block below which a further block does not pay.
const PER_BLOCK: usize = 2048;
/// Arguments of a table: starts, lengths and addresses, eight per argument.
const TABLE: usize = 3 * SEGMENTS / 8;

/// Part of a bucket, and the memory of its gradient.
#[derive(Clone, Copy)]
pub(super) struct Segment<'a, G: DeviceCopy> {
    /// First element in the bucket.
    pub start: usize,
    pub len: usize,
    /// None: pack writes zeros, unpack writes nothing.
    pub memory: Option<DeviceView<'a, G>>,
}

/// Number of blocks for `len` elements; also the number of partial sums.
pub(super) fn blocks(len: usize) -> usize {
    len.div_ceil(PER_BLOCK).clamp(1, BLOCKS)
}

/// The kernels for gradient type `G` on wire type `W`.
#[track_caller]
fn between<G: Gradient, W: Element>() -> Result<Between> {
    match G::kernels(W::DTYPE) {
        Some(kernels) => Ok(kernels),
        None => Err(Error::invalid("GradientExchange", format_args!("{:?} on a wire of {:?}", G::DTYPE, W::DTYPE))),
    }
}

fn value<T: bytemuck::Pod>(x: T) -> KernelArg {
    KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&x)))
}

fn slice(address: Address, bytes: usize, write: bool) -> KernelArg {
    KernelArg::Slice { address, bytes, write }
}

type Arguments = SmallVec<[KernelArg; TABLE + 8]>;

fn push_table<G: DeviceCopy>(args: &mut Arguments, segments: &[Segment<'_, G>], write: bool) {
    debug_assert!(segments.len() <= SEGMENTS);
    let mut eights = |of: &dyn Fn(&Segment<'_, G>) -> u64| {
        for eight in 0..SEGMENTS / 8 {
            args.push(value::<[u64; 8]>(std::array::from_fn(|k| segments.get(8 * eight + k).map_or(0, of))));
        }
    };
    eights(&|segment| segment.start as u64);
    eights(&|segment| segment.len as u64);
    eights(&|segment| segment.memory.map_or(0, |memory| memory.address()));
    let places = segments.iter().filter_map(|segment| segment.memory.map(|memory| (memory.address(), segment.len)));
    args.extend(places.map(|(address, len)| slice(address, len * size_of::<G>(), write)));
}

fn pack_args<G: DeviceCopy, W: DeviceCopy>(
    segments: &[Segment<'_, G>],
    factor: KernelArg,
    wire: &DeviceView<'_, W>,
) -> Arguments {
    let mut args = Arguments::new();
    args.push(slice(wire.address(), size_of::<W>() * wire.len(), true));
    args.push(value(segments.len() as u32));
    args.push(factor);
    push_table(&mut args, segments, false);
    args
}

fn unpack_args<G: DeviceCopy, W: DeviceCopy>(
    wire: &DeviceView<'_, W>,
    (first, n): (usize, usize),
    segments: &[Segment<'_, G>],
    partial: Option<&DeviceView<'_, f64>>,
) -> Arguments {
    let mut args = Arguments::new();
    args.push(slice(wire.address(), size_of::<W>() * wire.len(), false));
    args.push(match partial {
        Some(partial) => slice(partial.address(), size_of::<f64>() * partial.len(), true),
        None => value(0u64),
    });
    args.push(value(first as u64));
    args.push(value(n as u64));
    args.push(value(segments.len() as u32));
    push_table(&mut args, segments, true);
    args
}

fn norm_args<A: DeviceCopy>(partial: &DeviceView<'_, f64>, out: &DeviceView<'_, A>) -> Arguments {
    let mut args = Arguments::new();
    args.push(slice(partial.address(), size_of::<f64>() * partial.len(), false));
    args.push(slice(out.address(), size_of::<A>(), true));
    args.push(value(partial.len() as u32));
    args
}

/// Launches one of the kernels; `touched` lists the memory that it uses.
#[track_caller]
fn launch(
    dev: &Device,
    module: &'static Module,
    (name, host): Named,
    blocks: usize,
    args: &Arguments,
    touched: &[(&BlockRef, Range<usize>, Access)],
) -> Result<()> {
    let mut op = dev.op_in_graph(name)?;
    for (block, bytes, access) in touched {
        op.touch(block, bytes.clone(), *access, false)?;
    }
    let function = dev.worker.function(module, name)?;
    let dims = LaunchDims { grid: (blocks as u32, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    let launch = Launch { name, function, host: Some(host), dims, args, early: false };
    // SAFETY: the arguments fit the kernel, and all memory that they name is live, ordered and noted by `op`.
    op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
}

type Touched<'a> = SmallVec<[(&'a BlockRef, Range<usize>, Access); 8]>;

fn touched<'a>(wire: (&'a BlockRef, Range<usize>), access: Access) -> Touched<'a> {
    smallvec![(wire.0, wire.1, access)]
}

/// Packs segments into the wire, times `factor`. There is at least one segment; they are in rising order, and none is
/// empty.
#[track_caller]
pub(super) fn pack<G: Gradient, W: Element>(
    dev: &Device,
    segments: &[Segment<'_, G>],
    factor: f64,
    wire: &DeviceView<'_, W>,
) -> Result<()> {
    let (first, last) = (segments[0], segments[segments.len() - 1]);
    let covered = Unit::of::<G>().padded(last.start + last.len) - first.start;
    let Some(weight) = G::factor(factor) else {
        return Err(Error::invalid("GradientExchange", format_args!("a weight of {factor}")));
    };
    let args = pack_args(segments, weight, wire);
    let mut touched = touched((wire.block, wire.bytes()), Access::Write);
    let sources = segments.iter().filter_map(|segment| segment.memory.as_ref());
    touched.extend(sources.map(|memory| (memory.block, memory.bytes(), Access::Read)));
    launch(dev, &builtin::GRADIENTS, between::<G, W>()?.pack, blocks(covered), &args, &touched)
}

/// Unpacks `n` elements of the wire, from `first` on, into their segments, and writes the sums of their squares to
/// `partial`.
#[track_caller]
pub(super) fn unpack<G: Gradient, W: Element>(
    dev: &Device,
    wire: &DeviceView<'_, W>,
    (first, n): (usize, usize),
    segments: &[Segment<'_, G>],
    partial: Option<DeviceView<'_, f64>>,
) -> Result<()> {
    let args = unpack_args(wire, (first, n), segments, partial.as_ref());
    let mut touched = touched((wire.block, wire.bytes()), Access::Read);
    touched.extend(partial.as_ref().map(|partial| (partial.block, partial.bytes(), Access::Write)));
    let places = segments.iter().filter_map(|segment| segment.memory.as_ref());
    touched.extend(places.map(|memory| (memory.block, memory.bytes(), Access::Write)));
    launch(dev, &builtin::GRADIENTS, between::<G, W>()?.unpack, blocks(n), &args, &touched)
}

/// Writes the root of the sum of `partial`.
#[track_caller]
pub(super) fn norm<G: Gradient>(
    dev: &Device,
    partial: &DeviceView<'_, f64>,
    out: &DeviceView<'_, G::Norm>,
) -> Result<()> {
    let args = norm_args(partial, out);
    let mut touched = touched((partial.block, partial.bytes()), Access::Read);
    touched.push((out.block, out.bytes(), Access::Write));
    launch(dev, &builtin::GRADIENTS, G::NORM_KERNEL, 1, &args, &touched)
}
