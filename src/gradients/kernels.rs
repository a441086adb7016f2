//! `kernels/gradients.cu`: its launches and its host kernels.
//!
//! On a GPU the table has addresses; a host kernel finds the same memory in slices behind the table, which also tell the
//! checker what is touched. A GPU takes no notice of arguments that its kernel does not have.

pub(super) mod host_kernels;
#[cfg(test)]
mod tests;

use super::{
    element::{
        Gradient,
        private::{Between, Named},
    },
    layout::Unit,
};
use crate::{
    Device, Element, LaunchDims,
    driver::{Address, KernelArg, Launch, ValueBytes},
    error::{Error, Result},
    kernel::builtin,
    memory::{DeviceCopy, DeviceView, block::BlockRef, hazard::Access},
};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Segments of a launch, at most. Addresses are arguments, not a table in memory: they may change at every step, and a
/// table would have to be copied there before the launch.
pub(super) const SEGMENTS: usize = 64;
/// Blocks of a launch, at most.
const BLOCKS: usize = 256;
/// Threads of a block, as the kernels demand.
const THREADS: u32 = 512;
/// Elements that a block is worth starting for.
const PER_BLOCK: usize = 2048;
/// Arguments of a table: starts, lengths and addresses by eights.
const TABLE: usize = 3 * SEGMENTS / 8;

/// Part of a bucket, and where its gradient is.
#[derive(Clone, Copy)]
pub(super) struct Segment<'a, G: DeviceCopy> {
    /// In the bucket.
    pub start: usize,
    pub len: usize,
    /// None: zeros in, nothing out.
    pub memory: Option<DeviceView<'a, G>>,
}

/// How many blocks go over so many elements: also how many sums they leave.
pub(super) fn blocks(len: usize) -> usize {
    len.div_ceil(PER_BLOCK).clamp(1, BLOCKS)
}

/// The kernels of gradients of type `G` on a wire of type `W`.
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

/// Launches one of the kernels, with what it touches.
#[track_caller]
fn launch(
    dev: &Device,
    (name, host): Named,
    blocks: usize,
    args: &Arguments,
    touched: &[(&BlockRef, Range<usize>, Access)],
) -> Result<()> {
    let mut op = dev.op(name)?;
    for (block, bytes, access) in touched {
        op.touch(block, bytes.clone(), *access, false)?;
    }
    let function = dev.worker.function(&builtin::GRADIENTS, name)?;
    let dims = LaunchDims { grid: (blocks as u32, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    let launch = Launch { name, function, host: Some(host), dims, args, early: false };
    // SAFETY: the arguments are the kernel's, and all memory that they name is live, ordered and noted by `op`.
    op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
}

type Touched<'a> = SmallVec<[(&'a BlockRef, Range<usize>, Access); 8]>;

fn touched<'a>(wire: (&'a BlockRef, Range<usize>), access: Access) -> Touched<'a> {
    smallvec![(wire.0, wire.1, access)]
}

/// Segments to the wire, times `factor`; there are some, in rising order, none of them empty.
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
    launch(dev, between::<G, W>()?.pack, blocks(covered), &args, &touched)
}

/// `n` elements of the wire, from `first` on, to their segments, and the sums of their squares to `partial`.
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
    launch(dev, between::<G, W>()?.unpack, blocks(n), &args, &touched)
}

/// The root of the sum of `partial`.
#[track_caller]
pub(super) fn norm<G: Gradient>(
    dev: &Device,
    partial: &DeviceView<'_, f64>,
    out: &DeviceView<'_, G::Norm>,
) -> Result<()> {
    let args = norm_args(partial, out);
    let mut touched = touched((partial.block, partial.bytes()), Access::Read);
    touched.push((out.block, out.bytes(), Access::Write));
    launch(dev, G::NORM_KERNEL, 1, &args, &touched)
}
