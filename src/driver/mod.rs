//! The narrow waist: what the rest of the crate needs of a device, at the level of the CUDA driver API.
//!
//! One [`Driver`] object stands for one device. Two implementations: [`cuda`] maps each call to the CUDA driver,
//! [`host`] is a software GPU. Everything above is written once and runs on both; `tests/driver_conformance.rs` holds
//! both to this contract. [`check`] and [`faulty`] are layers: drivers around a driver, written with `layer`'s
//! forwards.
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
//!   a wait accepts the event of any device of the same backend. What concerns an event reports the faults of the
//!   event's own device, whichever driver was asked.
//! * **Nothing** to copy or fill (zero bytes) is no error and submits nothing.
//! * **Addresses.** Device memory has an [`Address`] that is unique in the process and tells its device. Host memory
//!   from [`Driver::host_alloc`] and [`Driver::managed_alloc`] has the same address on the host and on every device.
//! * **Lifetime of operands.** The caller keeps memory, events' streams and modules alive until the operations that
//!   name them have completed. Freed memory that is named by an operation in flight is a caller's bug; the software GPU
//!   reports it.
//! * **Graphs.** Between [`Driver::capture_begin`] and [`Driver::capture_end`] a stream notes its operations instead of
//!   running them: copies, fills, kernels and matrix products. Nothing else may go to it meanwhile (events, values,
//!   host functions, other graphs: `Unsupported`), nor may anybody wait for it. A launch of the graph is these
//!   operations, in their order.
//! * **Errors** are [`Fault`]s: the kind says what can be done, code and name are the driver's own. A fault of kind
//!   [`FaultKind::DeviceLost`] is sticky: every later call on the device reports it too. A call that fails has
//!   submitted nothing.
//! * Asynchronous failures (a kernel that traps) surface from any later call, as in CUDA.

pub mod check;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod faulty;
pub(crate) mod gate;
pub mod host;
mod layer;
pub(crate) mod module;
pub(crate) mod route;
mod types;

pub use types::*;

use std::{any::Any, sync::Arc, time::Duration};

/// A device. See the [module docs](self) for the contract that all methods share.
///
/// Calls have no default bodies. So a layer that misses a new call does not compile.
///
/// # Safety
/// Methods that take addresses or host pointers are `unsafe`: the caller guarantees that each range is live memory of
/// a kind that the device may touch, stays so until the operation has completed, and that conflicting operations are
/// ordered by streams and events.
pub trait Driver: Any + Send + Sync {
    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// For downcasts to the implementation (interop).
    fn as_any(&self) -> &dyn Any;

    /// The driver inside, if this one is a layer around another driver.
    fn inner(&self) -> Option<&DriverRef> {
        None
    }

    /// Makes the device's context current on the calling thread, for the user's own driver calls.
    fn bind(&self) -> DriverResult;

    /// `(free, total)` bytes of device memory.
    fn memory_info(&self) -> DriverResult<(u64, u64)>;

    // ---- memory -------------------------------------------------------------------------------------------------

    /// Device memory, contents undefined; 256-byte aligned, and to 4 KiB from 64 KiB on. `bytes > 0`. May block; may
    /// synchronise the device.
    fn mem_alloc(&self, bytes: usize) -> DriverResult<Address>;

    /// Gives memory of [`mem_alloc`](Self::mem_alloc) back. May synchronise the device.
    ///
    /// # Safety
    /// `address` came from `mem_alloc` of this device, is freed once, and no operation in flight names it.
    unsafe fn mem_free(&self, address: Address) -> DriverResult;

    /// Page-locked host memory that every device can copy from and to (portable), zeroed, aligned to 4 KiB.
    /// `bytes > 0`.
    fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8>;

    /// Gives memory of [`host_alloc`](Self::host_alloc) back.
    ///
    /// # Safety
    /// `ptr` came from `host_alloc` of a device of this backend, is freed once, no operation in flight names it.
    unsafe fn host_free(&self, ptr: *mut u8) -> DriverResult;

    /// One allocation that the host and all devices see at one address, zeroed. `bytes > 0`.
    fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8>;

    /// Gives memory of [`managed_alloc`](Self::managed_alloc) back.
    ///
    /// # Safety
    /// As [`host_free`](Self::host_free).
    unsafe fn managed_free(&self, ptr: *mut u8) -> DriverResult;

    // ---- virtual memory -------------------------------------------------------------------------------------------

    /// Bytes that mappings are multiples of. None where the device has no virtual memory management: the other calls of
    /// this group are `Unsupported` there.
    fn vm_granularity(&self) -> Option<usize>;

    /// A window of addresses with nothing behind them, aligned to at least 2 MiB. `bytes` is a multiple of the
    /// granularity.
    fn vm_reserve(&self, bytes: u64) -> DriverResult<Address>;

    /// Gives a window back, whole. `InvalidArgument` while anything is mapped in it.
    ///
    /// # Safety
    /// The window came from [`vm_reserve`](Self::vm_reserve) of this device, and nobody uses its addresses again.
    unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult;

    /// Puts fresh memory of this device, contents undefined, behind addresses of a window: both a multiple of the
    /// granularity, and nothing mapped there. What is mapped behaves in every call as memory of
    /// [`mem_alloc`](Self::mem_alloc), also for peers, and operands may span mappings that lie side by side. May block.
    ///
    /// # Safety
    /// No operation in flight names these addresses.
    unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult;

    /// Takes a mapping out of its window, whole: exactly what one [`vm_map`](Self::vm_map) or
    /// [`vm_move`](Self::vm_move) put there. Its memory goes back. Waits for nothing. Also done, before the loss is
    /// reported, when the device is lost.
    ///
    /// # Safety
    /// No operation in flight, of any device, names these addresses.
    unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult;

    /// Moves a whole mapping to another place of a window of this device: the same memory, so that nobody else can get
    /// it meanwhile. Contents are undefined afterwards. The places do not overlap.
    ///
    /// # Safety
    /// As [`vm_unmap`](Self::vm_unmap) for `from`, and as [`vm_map`](Self::vm_map) for `to`.
    unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult;

    // ---- streams and events -------------------------------------------------------------------------------------

    /// A stream that does not synchronise with any default stream. Lower `priority` runs first; 0 is the default.
    fn stream_create(&self, priority: i32) -> DriverResult<RawStream>;

    /// Destroys a stream; work already submitted still completes.
    ///
    /// # Safety
    /// `stream` came from this device and is not used again.
    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult;

    /// Whether all submitted work has completed.
    fn stream_query(&self, stream: RawStream) -> DriverResult<bool>;

    /// Waits at most `limit` for all submitted work; `false` when time ran out first. Never blocks uninterruptibly.
    fn stream_wait_idle(&self, stream: RawStream, limit: Duration) -> DriverResult<bool>;

    /// All later work of `stream` waits, on the device, for the event's latest record.
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult;

    /// An event; with `timing`, [`event_elapsed`](Self::event_elapsed) works on it.
    fn event_create(&self, timing: bool) -> DriverResult<RawEvent>;

    /// Destroys an event; waits that captured it still hold.
    ///
    /// # Safety
    /// `event` came from this device and is not used again.
    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult;

    /// Captures the work submitted to `stream` so far.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult;

    /// Whether the work of the latest record has completed; true if there was no record.
    fn event_query(&self, event: RawEvent) -> DriverResult<bool>;

    /// Waits at most `limit` for the latest record's work; `false` when time ran out first.
    fn event_wait(&self, event: RawEvent, limit: Duration) -> DriverResult<bool>;

    /// Time between the completions of two recorded timing events of this device.
    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration>;

    // ---- copies ---------------------------------------------------------------------------------------------------

    /// Asynchronous copy from page-locked host memory.
    ///
    /// # Safety
    /// See the trait; `src` is page-locked host memory.
    unsafe fn copy_to_device(&self, dst: Address, src: *const u8, bytes: usize, stream: RawStream) -> DriverResult;

    /// Asynchronous copy to page-locked host memory.
    ///
    /// # Safety
    /// See the trait; `dst` is page-locked host memory.
    unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, stream: RawStream) -> DriverResult;

    /// Asynchronous copy within this device, or between managed memory and it. Ranges do not overlap.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, stream: RawStream) -> DriverResult;

    /// Asynchronous copy between devices, by the copy engines, on a stream of this device, which owns `dst` or `src`.
    /// Demands peer access of this device to the other one: without it this is [`FaultKind::PeerDenied`], never a
    /// silent detour through the host.
    ///
    /// # Safety
    /// See the trait; `dst` is memory of `dst_device`, `src` of `src_device`, drivers of the same backend.
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
    ///
    /// # Safety
    /// See the trait.
    unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, stream: RawStream) -> DriverResult;

    /// Sets `count` 4-byte words; `dst` is 4-byte aligned.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, stream: RawStream) -> DriverResult;

    // ---- peers ----------------------------------------------------------------------------------------------------

    /// Whether the hardware can give this device access to `peer`'s memory. Directed; believed only after a probe.
    fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool>;

    /// Gives this device access to `peer`'s memory, present and future, allocated and mapped. Idempotent. `PeerDenied`
    /// where it cannot be.
    fn enable_peer(&self, peer: &dyn Driver) -> DriverResult;

    /// Takes the right back. Idempotent.
    fn disable_peer(&self, peer: &dyn Driver) -> DriverResult;

    // ---- kernels --------------------------------------------------------------------------------------------------

    /// Loads device code, eagerly: every kernel is resident afterwards. May block.
    fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule>;

    /// # Safety
    /// `module` came from this device; none of its kernels is in flight or used again.
    unsafe fn module_unload(&self, module: RawModule) -> DriverResult;

    /// A kernel of a module. The software GPU has no symbols: it answers for any name.
    fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// See the trait; the arguments fit the kernel, which waits as [`Launch::early`] says where that is set.
    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult;

    /// Runs a function on a host thread in stream order. It must not call the driver, nor wait for device work.
    fn launch_host(&self, stream: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult;

    /// Single-precision matrix product in stream order.
    ///
    /// # Safety
    /// See the trait.
    #[cfg(feature = "blas")]
    unsafe fn gemm(&self, gemm: &Gemm, stream: RawStream) -> DriverResult;

    // ---- graphs ---------------------------------------------------------------------------------------------------

    /// From now on `stream` notes its operations for a graph. They are checked as ever, but touch nothing.
    fn capture_begin(&self, stream: RawStream) -> DriverResult;

    /// Ends the capture, in any case; what was noted comes back as a graph. May block.
    fn capture_end(&self, stream: RawStream) -> DriverResult<RawGraph>;

    /// Submits the operations of a graph to `stream`, as one call.
    ///
    /// # Safety
    /// See the trait, for every operation of the graph.
    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> DriverResult;

    /// Destroys a graph.
    ///
    /// # Safety
    /// `graph` came from this device, its launches are over, and it is not used again.
    unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult;

    // ---- flags ----------------------------------------------------------------------------------------------------

    /// Writes an 8-byte word in stream order, visible to all devices and the host. `Unsupported` where
    /// [`DeviceInfo::stream_values`] is false.
    ///
    /// # Safety
    /// See the trait; `address` is 8-byte aligned.
    unsafe fn write_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult;

    /// The stream waits until the 8-byte word is at least `value` (compared cyclically, as CUDA does).
    ///
    /// # Safety
    /// As [`write_value`](Self::write_value).
    unsafe fn wait_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult;

    /// The host looks at an 8-byte word of page-locked memory: a load with acquire, no call of the driver. Who sees a
    /// value that [`write_value`](Self::write_value) wrote may rely on what its stream did before; a checker takes it
    /// for an edge.
    ///
    /// # Safety
    /// `address` is an 8-byte aligned word of live memory of [`host_alloc`](Self::host_alloc).
    unsafe fn poll_value(&self, address: Address) -> u64;
}

/// A shared handle to a device's driver.
pub type DriverRef = Arc<dyn Driver>;
