//! The narrow waist: all calls of a device that the rest of the crate needs, at the level of the CUDA driver API.
//!
//! One [`Driver`] object stands for one device. Two implementations: [`cuda`] maps each call to the CUDA driver,
//! [`host`] is a software GPU. Everything above is written once and runs on both; `tests/driver_conformance/` holds
//! both to this contract. The checker and the fault plans of `gpu-pool-lab` are layers: drivers around a driver,
//! written with `layer`'s forwards.
//!
//! # Contract
//!
//! * **Threads.** Every method may be called on any thread, also several at once. An implementation makes its context
//!   current by itself where a call depends on it, and never relies on what was current before.
//! * **Streams** run their operations in the order of submission, asynchronously to the caller. Operations of different
//!   streams are unordered unless an event orders them. There is no default stream.
//! * **Events** have CUDA's semantics: [`Driver::event_record`] captures the work submitted to the stream so far;
//!   [`Driver::stream_wait_event`] captures the *latest record at the time of the call* (a later re-record does not
//!   change it); waiting for an event that was never recorded does nothing. Record demands a stream of the same device;
//!   a wait accepts the event of any device of the same backend. Calls with an event report the faults of the event's
//!   own device, even if the call was made on the driver of another device.
//! * **Zero bytes** to copy or to fill are no error. Such a call submits nothing.
//! * **Addresses.** Device memory has an [`Address`] that is unique in the process and identifies its device. Host
//!   memory from [`Driver::host_alloc`] and [`Driver::managed_alloc`] has the same address on the host and on every
//!   device.
//! * **Lifetime of operands.** The caller keeps memory, events' streams and modules alive until the operations that
//!   name them have completed. To free memory that an operation in flight names is a bug of the caller; the software
//!   GPU reports it.
//! * **Graphs.** Between [`Driver::capture_begin`] and [`Driver::capture_end`] a stream records its operations and does
//!   not run them. Copies, fills, kernels and matrix products can be captured. Everything else (events, values, host
//!   functions, other graphs) is `Unsupported` during a capture, and no caller may wait for the stream. A launch of the
//!   graph runs the captured operations in their order.
//! * **Errors** are [`Fault`]s. The kind says what the caller can do; code and name are the driver's own. A fault of
//!   kind [`FaultKind::DeviceLost`] is sticky: every later call on the device reports it, too. A call that fails has
//!   submitted nothing.
//! * **Asynchronous failures** (a kernel that traps) are reported by any later call, as in CUDA.

#[cfg(feature = "cuda")]
pub mod cuda;
pub(crate) mod fault;
pub(crate) mod gate;
#[cfg(feature = "blas")]
mod gemm;
pub mod host;
pub(crate) mod layer;
pub(crate) mod module;
pub(crate) mod observe;
pub(crate) mod route;
mod types;

pub(crate) use self::{
    host::ExecutionOrder,
    observe::{FailPoint, Observer},
};

#[cfg(feature = "blas")]
pub use gemm::*;
pub use types::*;

use observe::Watch;

#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{any::Any, sync::Arc, time::Duration};

/// A device. The head of `driver/mod.rs` has the contract that all methods share.
///
/// # Safety
/// Methods that take addresses or host pointers are `unsafe`. The caller guarantees that each range is live memory that
/// the device may access, that it stays live until the operation has completed, and that streams and events order
/// conflicting operations. (For a graph that holds for every operation in it.) A method's own section adds to that.
#[allow(clippy::missing_safety_doc, reason = "the section above is that of each method without one")]
pub trait Driver: Any + Send + Sync {
    /// The device's properties.
    fn info(&self) -> &DeviceInfo;

    /// For downcasts to the implementation (interop).
    fn as_any(&self) -> &dyn Any;

    /// The wrapped driver, if this driver is a layer.
    fn inner(&self) -> Option<&DriverRef> {
        None
    }

    /// The order of the pool's work, if this driver is a layer that follows it.
    fn watch(&self) -> Option<Watch> {
        None
    }

    /// Makes the device's context current on the calling thread, for driver calls that the user makes directly.
    fn bind(&self) -> DriverResult;

    /// `(free, total)` bytes of device memory.
    fn memory_info(&self) -> DriverResult<(u64, u64)>;

    /// Allocates device memory with undefined contents. The alignment is 256 bytes, and 4 KiB from 64 KiB on. `bytes >
    /// 0`. May block; may synchronise the device.
    fn mem_alloc(&self, bytes: usize) -> DriverResult<Address>;

    /// Frees memory of [`mem_alloc`](Self::mem_alloc). May synchronise the device.
    ///
    /// # Safety
    /// `address` came from `mem_alloc` of this device, is freed once, and no operation in flight names it.
    unsafe fn mem_free(&self, address: Address) -> DriverResult;

    /// Allocates zeroed page-locked host memory, aligned to 4 KiB, for copies by every device (portable). `bytes > 0`.
    fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8>;

    /// Frees memory of [`host_alloc`](Self::host_alloc).
    ///
    /// # Safety
    /// `ptr` came from `host_alloc` of a device of this backend, is freed once, no operation in flight names it.
    unsafe fn host_free(&self, ptr: *mut u8) -> DriverResult;

    /// Allocates zeroed managed memory: the host and all devices use it at one address. `bytes > 0`.
    fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8>;

    /// Frees memory of [`managed_alloc`](Self::managed_alloc).
    ///
    /// # Safety
    /// As [`host_free`](Self::host_free).
    unsafe fn managed_free(&self, ptr: *mut u8) -> DriverResult;

    /// Makes memory that other code has allocated usable like memory of [`mem_alloc`](Self::mem_alloc), and returns the
    /// address by which the calls of this driver name it. The address is one of this device's memory; on a software GPU
    /// it is one of host memory. `InvalidArgument` if the driver knows that it is not; `Unsupported` if devices that
    /// have access to this one cannot have access to it. `bytes > 0`.
    ///
    /// # Safety
    /// The bytes are live memory until [`disown`](Self::disown), and other code uses them only in the order of streams.
    unsafe fn adopt(&self, address: Address, bytes: usize) -> DriverResult<Address>;

    /// Ends an [`adopt`](Self::adopt), which returned `address`. The memory itself stays as it is.
    ///
    /// # Safety
    /// No operation in flight, of any device, names the memory.
    unsafe fn disown(&self, address: Address) -> DriverResult;

    /// Every mapping is a multiple of this many bytes. `None` if the device has no virtual memory management: then the
    /// other calls of this group are `Unsupported`.
    fn vm_granularity(&self) -> Option<usize>;

    /// Reserves an address window without memory, aligned to at least 2 MiB. `bytes` is a multiple of the granularity.
    fn vm_reserve(&self, bytes: u64) -> DriverResult<Address>;

    /// Releases a whole window. `InvalidArgument` while anything is mapped in it.
    ///
    /// # Safety
    /// The window came from [`vm_reserve`](Self::vm_reserve) of this device, and its addresses are not used again.
    unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult;

    /// Maps fresh memory of this device, with undefined contents, into a window. Address and size are multiples of the
    /// granularity, and nothing is mapped there yet. Mapped memory behaves in every call as memory of
    /// [`mem_alloc`](Self::mem_alloc), also for peers. An operand may span adjacent mappings. May block.
    ///
    /// # Safety
    /// No operation in flight names these addresses.
    unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult;

    /// Unmaps one whole mapping, exactly as [`vm_map`](Self::vm_map) or [`vm_move`](Self::vm_move) made it, and frees
    /// its memory. Does not wait. On a lost device the call unmaps first and then reports the loss.
    ///
    /// # Safety
    /// No operation in flight, of any device, names these addresses.
    unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult;

    /// Moves one whole mapping to other addresses, in any window of this device. The memory stays the same, so no other
    /// caller can allocate it in between. Its contents are undefined afterwards. The two ranges do not overlap.
    ///
    /// # Safety
    /// As [`vm_unmap`](Self::vm_unmap) for `from`, and as [`vm_map`](Self::vm_map) for `to`.
    unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult;

    /// A descriptor of one whole mapping of [`vm_map`](Self::vm_map), for other processes to map the same memory. The
    /// contents become undefined. Such a mapping does not move: [`vm_move`](Self::vm_move) is `InvalidArgument`.
    ///
    /// # Safety
    /// As [`vm_unmap`](Self::vm_unmap).
    #[cfg(target_os = "linux")]
    unsafe fn vm_export(&self, address: Address, bytes: usize) -> DriverResult<OwnedFd>;

    /// Like [`vm_map`](Self::vm_map), but maps the memory behind a descriptor of [`vm_export`](Self::vm_export), with
    /// its contents. The descriptor may come from another process: from this GPU, from one whose memory this one has
    /// access to, or from any software GPU for another one. `bytes` is the size of the exported mapping; a larger one
    /// is `InvalidArgument`. The memory lives until each process has unmapped it and has closed the descriptor.
    ///
    /// # Safety
    /// As [`vm_map`](Self::vm_map). Operations of the other mappings' owners are not ordered with those of this one.
    #[cfg(target_os = "linux")]
    unsafe fn vm_import(&self, address: Address, bytes: usize, memory: BorrowedFd<'_>) -> DriverResult;

    /// Creates a stream that synchronises with no default stream. A lower `priority` runs first (default 0).
    fn stream_create(&self, priority: i32) -> DriverResult<RawStream>;

    /// Makes a stream that other code has created on this device usable like one of
    /// [`stream_create`](Self::stream_create). It is never destroyed by this driver. `InvalidArgument` if the driver
    /// knows that it is not a stream of this device.
    ///
    /// # Safety
    /// The stream lives as long as any stream or event of this driver names it.
    unsafe fn stream_adopt(&self, stream: RawStream) -> DriverResult;

    /// Destroys a stream; work already submitted still completes.
    ///
    /// # Safety
    /// `stream` came from this device and is not used again.
    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult;

    /// Whether all submitted work has completed.
    fn stream_query(&self, stream: RawStream) -> DriverResult<bool>;

    /// Waits at most `limit` for all submitted work; `false` if the limit came first. Uses only interruptible calls.
    fn stream_wait_idle(&self, stream: RawStream, limit: Duration) -> DriverResult<bool>;

    /// Makes all later work of `stream` wait, on the device, for the event's latest record.
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult;

    /// Creates an event; with `timing`, [`event_elapsed`](Self::event_elapsed) works on it.
    fn event_create(&self, timing: bool) -> DriverResult<RawEvent>;

    /// Destroys an event; waits that have captured a record of it stay valid.
    ///
    /// # Safety
    /// `event` came from this device and is not used again.
    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult;

    /// Captures the work submitted to `stream` so far.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult;

    /// Whether the work of the latest record has completed; true if there was no record.
    fn event_query(&self, event: RawEvent) -> DriverResult<bool>;

    /// Waits at most `limit` for the latest record's work; `false` if the limit came first.
    fn event_wait(&self, event: RawEvent, limit: Duration) -> DriverResult<bool>;

    /// Time between the completions of two recorded timing events of this device.
    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration>;

    /// Asynchronous copy from page-locked host memory.
    unsafe fn copy_to_device(&self, dst: Address, src: *const u8, bytes: usize, stream: RawStream) -> DriverResult;

    /// Asynchronous copy to page-locked host memory.
    unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, stream: RawStream) -> DriverResult;

    /// Asynchronous copy within this device, or between managed memory and it. Ranges do not overlap.
    unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, stream: RawStream) -> DriverResult;

    /// Asynchronous copy between devices by the copy engines, on a stream of this device. This device owns `dst` or
    /// `src`. It needs peer access to the other device. Without that right the call fails with
    /// [`FaultKind::PeerDenied`]; it never goes through the host silently.
    ///
    /// # Safety
    /// Also: `dst` is memory of `dst_device`, `src` of `src_device`, drivers of the same backend.
    unsafe fn copy_peer(
        &self,
        dst: Address,
        dst_device: &dyn Driver,
        src: Address,
        src_device: &dyn Driver,
        bytes: usize,
        stream: RawStream,
    ) -> DriverResult;

    /// Sets every byte.
    unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, stream: RawStream) -> DriverResult;

    /// Sets `count` 4-byte words; `dst` is 4-byte aligned.
    unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, stream: RawStream) -> DriverResult;

    /// Whether the hardware can give this device access to `peer`'s memory. The right has a direction. Pools rely on
    /// the answer only after a probe.
    fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool>;

    /// Gives this device access to all memory of `peer`, present and future, allocated and mapped. Idempotent.
    /// `PeerDenied` if that is not possible.
    fn enable_peer(&self, peer: &dyn Driver) -> DriverResult;

    /// Revokes the access of [`enable_peer`](Self::enable_peer). Idempotent.
    fn disable_peer(&self, peer: &dyn Driver) -> DriverResult;

    /// Loads device code eagerly: every kernel is resident afterwards. May block.
    fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule>;

    /// # Safety
    /// `module` came from this device; none of its kernels is in flight or used again.
    unsafe fn module_unload(&self, module: RawModule) -> DriverResult;

    /// A kernel of a module. The software GPU has no symbols, so it returns a function for any name.
    fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// Also: the arguments fit the kernel. If [`Launch::early`] is set, the kernel waits as that field demands.
    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult;

    /// Runs a function on a host thread in stream order. The function must not call the driver or wait for device work.
    fn launch_host(&self, stream: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult;

    /// A batch of matrix products in stream order.
    #[cfg(feature = "blas")]
    unsafe fn gemm(&self, gemm: &Gemm, stream: RawStream) -> DriverResult;

    /// From now on `stream` records its operations for a graph. They are checked as usual, but do not run.
    fn capture_begin(&self, stream: RawStream) -> DriverResult;

    /// Ends the capture, also when the call fails, and returns the recorded operations as a graph. May block.
    fn capture_end(&self, stream: RawStream) -> DriverResult<RawGraph>;

    /// Submits all operations of a graph to `stream` in one call.
    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> DriverResult;

    /// Destroys a graph.
    ///
    /// # Safety
    /// `graph` came from this device, its launches are over, and it is not used again.
    unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult;

    /// Writes an 8-byte word in stream order, visible to all devices and the host. `Unsupported` where
    /// [`DeviceInfo::stream_values`] is false.
    ///
    /// # Safety
    /// Also: `address` is 8-byte aligned.
    unsafe fn write_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult;

    /// The stream waits until the 8-byte word is at least `value` (compared cyclically, as CUDA does).
    ///
    /// # Safety
    /// As [`write_value`](Self::write_value).
    unsafe fn wait_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult;

    /// The host reads an 8-byte word of page-locked memory: an acquire load, no driver call. A thread that sees a value
    /// of [`write_value`](Self::write_value) may rely on that stream's earlier work; a checker takes it for an edge.
    ///
    /// # Safety
    /// `address` is an 8-byte aligned word of live memory of [`host_alloc`](Self::host_alloc).
    unsafe fn poll_value(&self, address: Address) -> u64;
}

/// A shared handle to a device's driver.
pub type DriverRef = Arc<dyn Driver>;
