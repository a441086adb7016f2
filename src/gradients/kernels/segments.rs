//! Launches of kernels on segments: parts of a bucket, each with memory somewhere. On a GPU a table in the arguments
//! holds their addresses. A host kernel finds the memory as slices behind it, which tell the checker what is touched.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

pub use crate::collective::kernels::{Arguments, value};
use crate::driver::{Address, HostArg, KernelArg, Launch};
use crate::memory::{Access, BlockRef, DeviceCopy, DeviceView};
use crate::{Device, LaunchDims, Module, error::Result, gradients::element::private::Named};
use std::ops::Range;

/// Most segments of a launch. Addresses are arguments, not a table in memory: they may change at every step, and a
/// table would have to be copied to the device before each launch.
pub const SEGMENTS: usize = 64;
/// Arguments of a table: starts, lengths and addresses, eight per argument.
const TABLE: usize = 3 * SEGMENTS / 8;

/// Threads per block; the kernels demand this number.
pub const THREADS: u32 = 512;
#[derive(Clone, Copy)]
pub struct Segment<'a, G: DeviceCopy> {
    pub start: usize,
    pub len: usize,
    /// None: pack writes zeros, unpack writes nothing.
    pub memory: Option<DeviceView<'a, G>>,
}

pub fn slice(address: Address, bytes: usize, write: bool) -> KernelArg {
    KernelArg::Slice { address, bytes, write }
}

/// Adds the table of the segments.
pub fn push_table<G: DeviceCopy>(args: &mut Arguments, segments: &[Segment<'_, G>], write: bool) {
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

/// Memory that a launch uses.
pub struct Touch<'a>(&'a BlockRef, Range<usize>, Access);

/// The launch reads or writes this view.
pub fn touch<'a, T: DeviceCopy>(view: &DeviceView<'a, T>, access: Access) -> Touch<'a> {
    Touch(view.block, view.bytes(), access)
}

/// Launches one of the kernels; `touched` lists the memory that it uses.
#[track_caller]
pub fn launch(
    dev: &Device,
    module: &'static Module,
    (name, host): Named,
    blocks: usize,
    args: &Arguments,
    touched: &[Touch<'_>],
) -> Result<()> {
    let mut op = dev.op_in_graph(name)?;
    for Touch(block, bytes, access) in touched {
        op.touch(block, bytes.clone(), *access, false)?;
    }
    let function = dev.worker.function(module, name)?;
    let dims = LaunchDims { grid: (blocks as u32, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    let launch = Launch { name, function, host: Some(host), dims, args, early: false };
    // SAFETY: the arguments fit the kernel, and all memory that they name is live, ordered and noted by `op`.
    op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
}

pub fn read<T: bytemuck::Pod>(arg: &HostArg) -> T {
    let HostArg::Value(bytes) = arg else { unreachable!("packed above") };
    bytemuck::pod_read_unaligned(bytes.as_bytes())
}

fn cell(args: &[HostArg], at: usize, k: usize) -> usize {
    read::<[u64; 8]>(&args[at + k / 8])[k % 8] as usize
}

/// `(start, len, memory)` of every segment; the table begins at `args[at]`.
pub fn table<G>(args: &[HostArg], at: usize, count: usize) -> impl Iterator<Item = (usize, usize, Option<*mut G>)> {
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

/// Memory of an argument, and its elements, if it is a [`slice()`].
pub fn pointer<T>(arg: &HostArg) -> Option<(*mut T, usize)> {
    match arg {
        HostArg::Slice { ptr, bytes, .. } => Some((ptr.cast(), bytes / size_of::<T>())),
        HostArg::Value(_) => None,
    }
}
