//! The data types of the driver interface: handles, faults, launches, matrix products.

use crate::error::misuse::Report;
use std::sync::Arc;

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

/// The error of a driver call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} ({code}){}{detail}", if detail.is_empty() { "" } else { ": " })]
pub struct Fault {
    /// The class of the fault: it says what the caller can do.
    pub kind: FaultKind,
    /// The driver's numeric code. CUDA and the software GPU use the codes of `CUresult`.
    pub code: i32,
    /// The driver's name of the code, like `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// Further information, or empty.
    pub detail: String,
    /// The checker's report, for [`FaultKind::Misuse`].
    pub report: Option<Arc<Report>>,
}

/// The classes of [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Not enough memory; the call had no effect.
    OutOfMemory,
    /// A sticky error: the context is unusable (illegal address, launch failure, ECC, GPU off the bus).
    DeviceLost,
    /// No right to a peer's memory.
    PeerDenied,
    /// No such symbol, module image or device.
    NotFound,
    /// A bad argument; the call had no effect.
    InvalidArgument,
    /// This device or driver does not have the feature.
    Unsupported,
    /// An observer has refused the call. The call had no effect.
    Misuse,
    /// All threads and streams wait, and no running work can end a wait. `detail` lists the waits.
    Deadlock,
    /// Anything else.
    Other,
}

/// `Result` with a [`Fault`].
pub type DriverResult<T = ()> = Result<T, Fault>;

/// The constant properties of an open device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The *driver's* ordinal (for CUDA after `CUDA_VISIBLE_DEVICES`), not the ordinal in a pool.
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

/// The device code of a module, in each form that exists of it.
#[derive(Clone, Copy, Debug)]
pub struct ModuleImage {
    /// PTX text, compiled by the driver where no cubin fits.
    pub ptx: Option<&'static [u8]>,
    /// `(compute capability as 10 * major + minor, image)`.
    pub cubins: &'static [(u32, &'static [u8])],
    /// Whether PTX and cubins are packed: PTX by Zstandard, a cubin as an LZ4 block after its unpacked size (32 bits,
    /// little-endian).
    pub packed: bool,
    /// CUDA C++ source for NVRTC.
    pub source: Option<&'static str>,
    /// Whether all users of a GPU in this process may share one loaded copy of the module. They may not if its kernels
    /// write to variables of the module.
    pub shared: bool,
}

/// The driver's message if `event_elapsed` gets an end event that was recorded before the start event.
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
    /// CUDA's limit for blocks in x.
    const MOST_BLOCKS: usize = i32::MAX as usize;

    /// [`cover`](Self::cover) for kernels with a grid-stride loop. They take any number of elements, since a thread
    /// handles several elements if there are more elements than threads.
    pub(crate) fn stride(n: usize) -> Self {
        Self::cover(n.min(256 * Self::MOST_BLOCKS))
    }

    /// One thread for each of `n` elements, in blocks of 256; at least one block. CUDA's limit is 2^31 - 1 blocks.
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

/// One argument of a submitted launch.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum KernelArg {
    /// A range of memory. The device function gets the address; checks and host kernels use the length.
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

/// One argument of a host kernel: addresses are translated to host memory.
#[non_exhaustive]
pub enum HostArg {
    /// A range of memory. The kernel may read it while it runs; with `write` it has exclusive access.
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

/// A kernel as a Rust function: one call does the work of a whole launch.
///
/// # Safety
/// The arguments fit the kernel's signature, in order, and the slices are valid memory.
pub type HostKernel = unsafe fn(LaunchDims, &[HostArg]);

/// A kernel launch: CUDA runs `function`, the software GPU runs `host`.
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
    /// Whether the kernel may start while the previous kernel of the stream ends (programmatic dependent launch). Then
    /// all its code for compute capability 9.0 or later waits for the previous kernel before it touches memory. Devices
    /// and drivers without this feature launch the kernel normally.
    pub early: bool,
}

#[cfg(test)]
#[path = "../../tests/unit/driver/types_tests.rs"]
mod tests;
