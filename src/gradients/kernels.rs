//! Launches of `kernels/gradients.cu`: pack, unpack and norm; their host kernels are in [`host_kernels`]. [`segments`]:
//! how kernels with tables of segments are launched, also those of `gpu-pool-train`.

pub(super) mod host_kernels;
pub mod segments;
#[cfg(test)]
#[path = "../../tests/unit/gradients/kernels/tests.rs"]
mod tests;

use super::{
    element::{Gradient, private::Between},
    layout::Unit,
};
use crate::error::{Error, Result};
use crate::memory::{Access, DeviceCopy, DeviceView};
use crate::{Device, Element, driver::KernelArg, kernel::builtin};
use segments::{Arguments, Touch, launch, push_table, slice, touch, value};
pub(super) use segments::{SEGMENTS, Segment};
use smallvec::{SmallVec, smallvec};

/// Most thread blocks of a launch.
const BLOCKS: usize = 256;
/// Elements per block below which a further block does not pay.
const PER_BLOCK: usize = 2048;
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

fn whole<T: DeviceCopy>(view: &DeviceView<'_, T>, write: bool) -> KernelArg {
    slice(view.address(), size_of::<T>() * view.len(), write)
}

type Touched<'a> = SmallVec<[Touch<'a>; 8]>;

fn pack_args<G: DeviceCopy, W: DeviceCopy>(
    segments: &[Segment<'_, G>],
    factor: KernelArg,
    wire: &DeviceView<'_, W>,
) -> Arguments {
    let mut args = Arguments::from_iter([whole(wire, true), value(segments.len() as u32), factor]);
    push_table(&mut args, segments, false);
    args
}

fn unpack_args<G: DeviceCopy, W: DeviceCopy>(
    wire: &DeviceView<'_, W>,
    (first, n): (usize, usize),
    segments: &[Segment<'_, G>],
    partial: Option<&DeviceView<'_, f64>>,
) -> Arguments {
    let partial = partial.map_or(value(0u64), |partial| whole(partial, true));
    let [first, n] = [first, n].map(|number| value(number as u64));
    let mut args = Arguments::from_iter([whole(wire, false), partial, first, n, value(segments.len() as u32)]);
    push_table(&mut args, segments, true);
    args
}

fn norm_args<A: DeviceCopy>(partial: &DeviceView<'_, f64>, out: &DeviceView<'_, A>) -> Arguments {
    [whole(partial, false), whole(out, true), value(partial.len() as u32)].into_iter().collect()
}

/// Packs segments into the wire, times `factor`. There is at least one; they rise, and none is empty.
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
    let mut touched: Touched<'_> = smallvec![touch(wire, Access::Write)];
    let sources = segments.iter().filter_map(|segment| segment.memory.as_ref());
    touched.extend(sources.map(|memory| touch(memory, Access::Read)));
    launch(dev, &builtin::GRADIENTS, between::<G, W>()?.pack, blocks(covered), &args, &touched)
}

/// Unpacks `n` elements of the wire, from `first` on, into their segments. Writes their sums of squares to `partial`.
#[track_caller]
pub fn unpack<G: Gradient, W: Element>(
    dev: &Device,
    wire: &DeviceView<'_, W>,
    (first, n): (usize, usize),
    segments: &[Segment<'_, G>],
    partial: Option<DeviceView<'_, f64>>,
) -> Result<()> {
    let args = unpack_args(wire, (first, n), segments, partial.as_ref());
    let mut touched: Touched<'_> = smallvec![touch(wire, Access::Read)];
    touched.extend(partial.as_ref().map(|partial| touch(partial, Access::Write)));
    let places = segments.iter().filter_map(|segment| segment.memory.as_ref());
    touched.extend(places.map(|memory| touch(memory, Access::Write)));
    launch(dev, &builtin::GRADIENTS, between::<G, W>()?.unpack, blocks(n), &args, &touched)
}

/// Writes the root of the sum of `partial`.
#[track_caller]
pub fn norm<G: Gradient>(dev: &Device, partial: &DeviceView<'_, f64>, out: &DeviceView<'_, G::Norm>) -> Result<()> {
    let args = norm_args(partial, out);
    let touched = [touch(partial, Access::Read), touch(out, Access::Write)];
    launch(dev, &builtin::GRADIENTS, G::NORM_KERNEL, 1, &args, &touched)
}
