//! The words of the waist: handles, faults, launches, matrix products.

use crate::error::misuse::Report;
use std::{fmt, sync::Arc};

/// A device address. Never dereferenced on the host, except for host and managed memory.
pub type Address = u64;

macro_rules! handle {
    ($($(#[$m:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$m])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub struct $name(pub u64);
    )+};
}
handle! {
    /// A stream of one device.
    RawStream,
    /// An event of one device.
    RawEvent,
    /// A loaded module of one device.
    RawModule,
    /// A kernel of a loaded module.
    RawFunction,
    /// A captured sequence of operations of one device, ready to be launched.
    RawGraph,
}

/// What a driver call came back with instead of success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What the caller can do about it.
    pub kind: FaultKind,
    /// The driver's numeric code (`CUresult` for CUDA and for the software GPU, which imitates it).
    pub code: i32,
    /// The driver's name of the code, like `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// More, where there is more to say; empty otherwise.
    pub detail: String,
    /// What the checker found, for [`FaultKind::Misuse`].
    pub report: Option<Arc<Report>>,
}

/// The classes of [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Not enough memory; the call had no effect.
    OutOfMemory,
    /// A sticky error: the context is dead (illegal address, launch failure, ECC, GPU off the bus).
    DeviceLost,
    /// No right to a peer's memory.
    PeerDenied,
    /// No such symbol, module image or device.
    NotFound,
    /// A bad argument; the call had no effect.
    InvalidArgument,
    /// This device or driver cannot do that at all.
    Unsupported,
    /// The checker ([`check`](super::check)) has refused the call; it had no effect.
    Misuse,
    /// Everyone waits, and nothing is left that could end it. `detail` says who waits for whom.
    Deadlock,
    /// Anything else.
    Other,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.code)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}
impl std::error::Error for Fault {}

/// `Result` with a [`Fault`].
pub type DriverResult<T = ()> = Result<T, Fault>;

/// What is known of a device when it is opened; it does not change.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The ordinal the *driver* gives it (for CUDA after `CUDA_VISIBLE_DEVICES`), not the ordinal in a pool.
    pub ordinal: usize,
    /// Marketing name, or `software GPU`.
    pub name: String,
    /// Identifies the physical device across pools of this process.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub total_memory: u64,
    /// Compute capability; `(0, 0)` for software GPUs.
    pub compute_capability: (u32, u32),
    /// PCI bus id, empty for software GPUs.
    pub pci_bus_id: String,
    /// Multiprocessors, or executor threads.
    pub multiprocessors: u32,
    /// Whether [`Driver::write_value`](super::Driver::write_value) and
    /// [`Driver::wait_value`](super::Driver::wait_value) work.
    pub stream_values: bool,
    /// Whether the device and the host may touch managed memory at the same time.
    pub concurrent_managed: bool,
}

/// The device code of a module, in every form that its author gave.
#[derive(Clone, Copy, Debug)]
pub struct ModuleImage {
    /// PTX text, compiled by the driver where no cubin fits.
    pub ptx: Option<&'static str>,
    /// `(compute capability as 10 * major + minor, image)`.
    pub cubins: &'static [(u32, &'static [u8])],
    /// CUDA C++ source for NVRTC.
    pub source: Option<&'static str>,
    /// Whether all that have a GPU open may have the module in common there. Not if it has variables that its kernels
    /// write.
    pub shared: bool,
}

/// What a driver says when the time between two events is asked for the wrong way round.
pub(crate) const RECORDED_BEFORE: &str = "the event was recorded before the one that the time is to be measured from";

/// Grid and block of a launch. Units are blocks and threads; shared memory is in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks in x, y, z.
    pub grid: (u32, u32, u32),
    /// Threads of a block in x, y, z.
    pub block: (u32, u32, u32),
    /// Dynamic shared memory per block in bytes.
    pub shared_bytes: u32,
}

impl LaunchDims {
    /// The most blocks in x that CUDA takes.
    const MOST_BLOCKS: usize = i32::MAX as usize;

    /// [`cover`](Self::cover) for kernels that take several elements in a thread where there are not enough threads: of
    /// any number of elements.
    pub(crate) fn stride(n: usize) -> Self {
        Self::cover(n.min(256 * Self::MOST_BLOCKS))
    }

    /// One thread for each of `n` elements, in blocks of 256; at least one block. CUDA takes 2^31 - 1 blocks at most.
    ///
    /// # Panics
    /// When `n` elements need more than `u32::MAX` blocks.
    ///
    /// ```
    /// # use gpu_pool::LaunchDims;
    /// assert_eq!(LaunchDims::cover(1000).grid, (4, 1, 1));
    /// assert_eq!(LaunchDims::cover(0).grid, (1, 1, 1));
    /// ```
    #[track_caller]
    pub fn cover(n: usize) -> Self {
        let blocks = u32::try_from(n.div_ceil(256).max(1)).expect("more than u32::MAX blocks");
        LaunchDims { grid: (blocks, 1, 1), block: (256, 1, 1), shared_bytes: 0 }
    }
}

/// Bytes of a by-value kernel argument, at most [`ValueBytes::MAX`], aligned for any scalar.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct ValueBytes {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl ValueBytes {
    /// The largest by-value argument, in bytes.
    pub const MAX: usize = 64;

    /// # Panics
    /// When `bytes` is longer than [`MAX`](Self::MAX).
    pub fn new(bytes: &[u8]) -> Self {
        let mut all = [0; Self::MAX];
        all[..bytes.len()].copy_from_slice(bytes);
        ValueBytes { bytes: all, len: bytes.len() as u8 }
    }

    /// The argument's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }
}

/// One argument of a launch, as submitted.
#[derive(Clone, Copy)]
pub enum KernelArg {
    /// A range of memory. The device function gets the address; the length is for checks and for software kernels.
    Slice {
        /// First byte.
        address: Address,
        /// Length in bytes.
        bytes: usize,
        /// Whether the kernel may write it.
        write: bool,
    },
    /// A value.
    Value(ValueBytes),
}

/// One argument of a software kernel, as it runs: slices are translated to host memory.
pub enum HostArg {
    /// A range of memory that is the kernel's own while it runs, exclusively when `write`.
    Slice {
        /// First byte, aligned as the buffer was.
        ptr: *mut u8,
        /// Length in bytes.
        bytes: usize,
        /// Whether the kernel may write it.
        write: bool,
    },
    /// A value.
    Value(ValueBytes),
}

/// A whole launch of a software kernel.
///
/// # Safety
/// The arguments are those that the kernel's signature demands, in order, with valid memory behind them.
pub type HostKernel = unsafe fn(LaunchDims, &[HostArg]);

/// What to launch: CUDA takes `function`, the software GPU takes `host`.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel's name, for reports.
    pub name: &'static str,
    /// From [`Driver::function`](super::Driver::function) of the same device.
    pub function: RawFunction,
    /// The host kernel.
    pub host: Option<HostKernel>,
    /// Grid and block.
    pub dims: LaunchDims,
    /// The arguments in order.
    pub args: &'a [KernelArg],
    /// Whether the kernel may be put on the device while the kernel before it on the stream ends: it waits by itself
    /// until that has completed, before it touches memory, in whatever code there is of it for compute capability 9.0
    /// or later. Where a device or a driver cannot do so, it is launched as any other.
    pub early: bool,
}

/// `C = alpha * op(A) * op(B) + beta * C`, single precision, row-major, densely packed.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// Rows of `op(A)` and of C.
    pub m: usize,
    /// Columns of `op(B)` and of C.
    pub n: usize,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: usize,
    /// Factor of the product.
    pub alpha: f32,
    /// A: `m x k`, or `k x m` when transposed.
    pub a: Address,
    /// Whether A is used transposed.
    pub transpose_a: bool,
    /// B: `k x n`, or `n x k` when transposed.
    pub b: Address,
    /// Whether B is used transposed.
    pub transpose_b: bool,
    /// Factor of the old C; 0 means that C is not read.
    pub beta: f32,
    /// C: `m x n`.
    pub c: Address,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_elements_has_a_grid() {
        for (n, blocks) in [(0, 1), (256, 1), (257, 2), (1 << 39, i32::MAX as u32), (usize::MAX, i32::MAX as u32)] {
            assert_eq!(LaunchDims::stride(n).grid, (blocks, 1, 1), "{n}");
        }
    }
}
