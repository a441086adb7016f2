//! `kernels/gradients.cu`: its launches and its Rust twins.
//!
//! On a GPU the table has addresses; a twin finds the same memory in slices behind the table, which also tell the checker
//! what is touched. A GPU takes no notice of arguments that its kernel does not have.

#[cfg(test)]
mod tests;

use crate::{
    Device, LaunchDims, builtin,
    driver::{Address, HostArg, HostKernel, KernelArg, Launch, ValueBytes},
    error::Result,
    memory::{DeviceCopy, DeviceView, block::BlockRef, hazard::Access},
};
use half::{bf16, f16};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Segments of a launch, at most. Addresses are arguments, not a table in memory: they may change at every step, and a table
/// would have to be copied there before the launch.
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
pub(super) struct Segment<'a> {
    /// In the bucket.
    pub start: usize,
    pub len: usize,
    /// None: zeros in, nothing out.
    pub memory: Option<DeviceView<'a, f32>>,
}

/// How many blocks go over so many elements: also how many sums they leave.
pub(super) fn blocks(len: usize) -> usize {
    len.div_ceil(PER_BLOCK).clamp(1, BLOCKS)
}

/// What a bucket looks like between the devices.
pub(super) trait OnWire: DeviceCopy {
    const PACK: (&'static str, HostKernel);
    const UNPACK: (&'static str, HostKernel);
    fn narrow(x: f32) -> Self;
    fn wide(self) -> f32;
}

macro_rules! on_wire {
    ($($T:ty, $pack:literal, $unpack:literal, $narrow:expr, $wide:expr;)+) => {$(
        impl OnWire for $T {
            const PACK: (&'static str, HostKernel) = ($pack, pack_twin::<$T>);
            const UNPACK: (&'static str, HostKernel) = ($unpack, unpack_twin::<$T>);
            fn narrow(x: f32) -> Self {
                $narrow(x)
            }
            fn wide(self) -> f32 {
                $wide(self)
            }
        }
    )+};
}
on_wire! {
    f32, "pack_f32", "unpack_f32", std::convert::identity, std::convert::identity;
    f16, "pack_f16", "unpack_f16", f16::from_f32, f16::to_f32;
    bf16, "pack_bf16", "unpack_bf16", bf16::from_f32, bf16::to_f32;
}

fn value<T: bytemuck::Pod>(x: T) -> KernelArg {
    KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&x)))
}

fn slice(address: Address, bytes: usize, write: bool) -> KernelArg {
    KernelArg::Slice { address, bytes, write }
}

type Arguments = SmallVec<[KernelArg; TABLE + 8]>;

fn push_table(args: &mut Arguments, segments: &[Segment<'_>], write: bool) {
    debug_assert!(segments.len() <= SEGMENTS);
    let mut eights = |of: &dyn Fn(&Segment<'_>) -> u64| {
        for eight in 0..SEGMENTS / 8 {
            args.push(value::<[u64; 8]>(std::array::from_fn(|k| segments.get(8 * eight + k).map_or(0, of))));
        }
    };
    eights(&|segment| segment.start as u64);
    eights(&|segment| segment.len as u64);
    eights(&|segment| segment.memory.map_or(0, |memory| memory.address()));
    let places = segments.iter().filter_map(|segment| segment.memory.map(|memory| (memory.address(), segment.len)));
    args.extend(places.map(|(address, len)| slice(address, len * size_of::<f32>(), write)));
}

fn pack_args<T: OnWire>(segments: &[Segment<'_>], factor: f32, wire: &DeviceView<'_, T>) -> Arguments {
    let mut args = Arguments::new();
    args.push(slice(wire.address(), size_of::<T>() * wire.len(), true));
    args.push(value(segments.len() as u32));
    args.push(value(factor));
    push_table(&mut args, segments, false);
    args
}

fn unpack_args<T: OnWire>(
    wire: &DeviceView<'_, T>,
    (first, n): (usize, usize),
    segments: &[Segment<'_>],
    partial: Option<&DeviceView<'_, f64>>,
) -> Arguments {
    let mut args = Arguments::new();
    args.push(slice(wire.address(), size_of::<T>() * wire.len(), false));
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

fn norm_args(partial: &DeviceView<'_, f64>, out: &DeviceView<'_, f32>) -> Arguments {
    let mut args = Arguments::new();
    args.push(slice(partial.address(), size_of::<f64>() * partial.len(), false));
    args.push(slice(out.address(), size_of::<f32>(), true));
    args.push(value(partial.len() as u32));
    args
}

/// Launches one of the kernels, with what it touches.
#[track_caller]
fn launch(
    dev: &Device,
    (name, host): (&'static str, HostKernel),
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
    let launch = Launch { name, function, host: Some(host), dims, args };
    // SAFETY: the arguments are the kernel's, and all memory that they name is live, ordered and noted by `op`.
    op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
}

type Touched<'a> = SmallVec<[(&'a BlockRef, Range<usize>, Access); 8]>;

fn touched<'a>(wire: (&'a BlockRef, Range<usize>), access: Access) -> Touched<'a> {
    smallvec![(wire.0, wire.1, access)]
}

/// Segments to the wire, times `factor`; there are some, in rising order, none of them empty.
#[track_caller]
pub(super) fn pack<T: OnWire>(
    dev: &Device,
    segments: &[Segment<'_>],
    factor: f32,
    wire: &DeviceView<'_, T>,
) -> Result<()> {
    let (first, last) = (segments[0], segments[segments.len() - 1]);
    let covered = (last.start + last.len).next_multiple_of(4) - first.start;
    let args = pack_args(segments, factor, wire);
    let mut touched = touched((wire.block, wire.bytes()), Access::Write);
    let sources = segments.iter().filter_map(|segment| segment.memory.as_ref());
    touched.extend(sources.map(|memory| (memory.block, memory.bytes(), Access::Read)));
    launch(dev, T::PACK, blocks(covered), &args, &touched)
}

/// `n` elements of the wire, from `first` on, to their segments, and the sums of their squares to `partial`.
#[track_caller]
pub(super) fn unpack<T: OnWire>(
    dev: &Device,
    wire: &DeviceView<'_, T>,
    (first, n): (usize, usize),
    segments: &[Segment<'_>],
    partial: Option<DeviceView<'_, f64>>,
) -> Result<()> {
    let args = unpack_args(wire, (first, n), segments, partial.as_ref());
    let mut touched = touched((wire.block, wire.bytes()), Access::Read);
    touched.extend(partial.as_ref().map(|partial| (partial.block, partial.bytes(), Access::Write)));
    let places = segments.iter().filter_map(|segment| segment.memory.as_ref());
    touched.extend(places.map(|memory| (memory.block, memory.bytes(), Access::Write)));
    launch(dev, T::UNPACK, blocks(n), &args, &touched)
}

/// The root of the sum of `partial`.
#[track_caller]
pub(super) fn norm(dev: &Device, partial: &DeviceView<'_, f64>, out: &DeviceView<'_, f32>) -> Result<()> {
    let args = norm_args(partial, out);
    let mut touched = touched((partial.block, partial.bytes()), Access::Read);
    touched.push((out.block, out.bytes(), Access::Write));
    launch(dev, ("gradient_norm", norm_twin), 1, &args, &touched)
}

fn read<T: bytemuck::Pod>(arg: &HostArg) -> T {
    let HostArg::Value(bytes) = arg else { unreachable!("packed above") };
    bytemuck::pod_read_unaligned(bytes.as_bytes())
}

/// The `k`-th number of a table's column, whose first eight are `args[at]`.
fn cell(args: &[HostArg], at: usize, k: usize) -> usize {
    read::<[u64; 8]>(&args[at + k / 8])[k % 8] as usize
}

/// `(start, len, memory)` of every segment; the table begins at `args[at]`.
fn table(args: &[HostArg], at: usize, count: usize) -> impl Iterator<Item = (usize, usize, Option<*mut f32>)> {
    let column = SEGMENTS / 8;
    let mut slices = args[at + TABLE..].iter();
    (0..count).map(move |k| {
        let memory = (cell(args, at + 2 * column, k) != 0).then(|| {
            let Some(HostArg::Slice { ptr, .. }) = slices.next() else { unreachable!("packed above") };
            ptr.cast()
        });
        (cell(args, at, k), cell(args, at + column, k), memory)
    })
}

fn pointer<T>(arg: &HostArg) -> Option<(*mut T, usize)> {
    match arg {
        HostArg::Slice { ptr, bytes, .. } => Some((ptr.cast(), bytes / size_of::<T>())),
        HostArg::Value(_) => None,
    }
}

/// # Safety
/// `args` are those of [`pack`] for this type, with the memory behind them.
unsafe fn pack_twin<T: OnWire>(_dims: LaunchDims, args: &[HostArg]) {
    let (wire, len) = pointer::<T>(&args[0]).expect("packed above");
    // SAFETY: the wire is this kernel's alone (the promise of the caller), aligned as device memory is.
    let wire = unsafe { std::slice::from_raw_parts_mut(wire, len) };
    let factor: f32 = read(&args[2]);
    for (start, len, memory) in table(args, 3, read::<u32>(&args[1]) as usize) {
        let (out, zeros) = wire[start..start + len.next_multiple_of(4)].split_at_mut(len);
        zeros.fill(T::narrow(0.0));
        match memory {
            // SAFETY: a segment has `len` elements that nobody writes meanwhile, and which are not the wire's.
            Some(memory) => out
                .iter_mut()
                .zip(unsafe { std::slice::from_raw_parts(memory.cast_const(), len) })
                .for_each(|(out, x)| *out = T::narrow(x * factor)),
            None => out.fill(T::narrow(0.0)),
        }
    }
}

/// # Safety
/// `args` are those of [`unpack`] for this type, with the memory behind them.
unsafe fn unpack_twin<T: OnWire>(dims: LaunchDims, args: &[HostArg]) {
    let (wire, len) = pointer::<T>(&args[0]).expect("packed above");
    // SAFETY: nobody writes the wire meanwhile (the promise of the caller); aligned as device memory is.
    let wire = unsafe { std::slice::from_raw_parts(wire.cast_const(), len) };
    for (start, len, memory) in table(args, 5, read::<u32>(&args[4]) as usize) {
        if let Some(memory) = memory {
            // SAFETY: a segment has `len` elements that are this kernel's alone, and which are not the wire's.
            let out = unsafe { std::slice::from_raw_parts_mut(memory, len) };
            out.iter_mut().zip(&wire[start..]).for_each(|(out, x)| *out = x.wide());
        }
    }
    let Some((partial, count)) = pointer::<f64>(&args[1]) else { return };
    // SAFETY: as above.
    let partial = unsafe { std::slice::from_raw_parts_mut(partial, count) };
    let (first, n) = (read::<u64>(&args[2]) as usize, read::<u64>(&args[3]) as usize);
    let blocks = dims.grid.0 as usize;
    for (block, sum) in partial[..blocks].iter_mut().enumerate() {
        let part = &wire[first..first + n][crate::shard::balanced(block, blocks, n)];
        *sum = part.iter().map(|x| f64::from(x.wide())).map(|x| x * x).sum();
    }
}

/// # Safety
/// `args` are those of [`norm`], with the memory behind them.
unsafe fn norm_twin(_dims: LaunchDims, args: &[HostArg]) {
    let (Some((partial, len)), Some((out, _))) = (pointer::<f64>(&args[0]), pointer::<f32>(&args[1])) else { return };
    // SAFETY: memory of so many elements that nobody writes meanwhile (the promise of the caller).
    let partial = unsafe { std::slice::from_raw_parts(partial.cast_const(), len) };
    // SAFETY: one element, this kernel's alone.
    unsafe { *out = partial.iter().sum::<f64>().sqrt() as f32 };
}
