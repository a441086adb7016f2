//! NVIDIA GPUs, through the CUDA driver API.
//!
//! The driver is loaded at run time by cudarc, of which only the `sys` and `result` layers are used: every call here
//! maps to one or two of the driver's, on the device's *primary* context, which the runtime API, cuBLAS, NCCL and
//! cudarc share. A machine without a driver or without a GPU is an [`Error::NoDevice`] that says what is missing.
//!
//! The oldest driver is 535 (CUDA 12.2). What came later is looked for by name, and done without where it is missing.
//!
//! One file per subject: `library` finds libcuda, `context` opens a device and holds what every call checks, `fault`
//! knows the codes; `memory`, `vmm`, `stream`, `copy`, `peer`, `module` (with `nvrtc` and `shared`), `launch` (with `early`), `gemm` and `graph` are the calls, as
//! inherent methods to which the one `impl Driver` below delegates; `interop` is cudarc's view of it all.

mod context;
mod copy;
mod early;
mod fault;
#[cfg(feature = "blas")]
mod gemm;
mod graph;
mod interop;
mod launch;
mod library;
mod memory;
mod module;
#[cfg(feature = "nvrtc")]
mod nvrtc;
mod peer;
mod shared;
mod stream;
mod vmm;

use std::{any::Any, sync::Arc, time::Duration};

use cudarc::driver::sys;

pub use context::CudaGpu;

#[cfg(feature = "blas")]
use super::Gemm;
use super::{
    Address, DeviceInfo, Driver, DriverRef, DriverResult, Launch, ModuleImage, RawEvent, RawFunction, RawGraph,
    RawModule, RawStream, gate,
};
use crate::error::Error;

/// How many GPUs the driver sees, after `CUDA_VISIBLE_DEVICES`.
///
/// # Errors
/// [`Error::NoDevice`] where there is no driver, or it sees none, or it is too old.
pub fn device_count() -> Result<usize, Error> {
    library::ready()?;
    let mut count = 0;
    // SAFETY: the driver is initialised; the pointer is to a live integer.
    context::opened("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    match usize::try_from(count) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(library::no_device("the CUDA driver is there but sees no GPU (CUDA_VISIBLE_DEVICES may hide them)")),
    }
}

/// Opens the GPU of this ordinal, as the driver counts.
///
/// # Errors
/// [`Error::NoDevice`], with words for what is missing.
pub fn open(ordinal: usize) -> Result<DriverRef, Error> {
    Ok(Arc::new(CudaGpu::open(ordinal)?))
}

/// Opens every GPU that the driver sees, in its order.
///
/// # Errors
/// As [`open`].
pub fn open_all() -> Result<Vec<DriverRef>, Error> {
    (0..device_count()?).map(open).collect()
}

/// What may wait for running kernels, and what the driver does under a lock that launches need, goes through the launch
/// gate (`sync::LaunchGate`) first: such calls have hung programs in which kernels wait for each other (nccl#744,
/// torchcomms#2334).
#[rustfmt::skip]
impl Driver for CudaGpu {
    fn info(&self) -> &DeviceInfo { &self.info }
    fn as_any(&self) -> &dyn Any { self }
    fn bind(&self) -> DriverResult { self.bind() }
    fn memory_info(&self) -> DriverResult<(u64, u64)> { self.memory_info() }

    fn mem_alloc(&self, bytes: usize) -> DriverResult<Address> {
        let _blocking = gate::blocking();
        self.mem_alloc(bytes)
    }
    unsafe fn mem_free(&self, address: Address) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.mem_free(address) }
    }
    fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        let _blocking = gate::blocking();
        self.host_alloc(bytes)
    }
    unsafe fn host_free(&self, ptr: *mut u8) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.host_free(ptr) }
    }
    fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        let _blocking = gate::blocking();
        self.managed_alloc(bytes)
    }
    unsafe fn managed_free(&self, ptr: *mut u8) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.managed_free(ptr) }
    }

    fn vm_granularity(&self) -> Option<usize> { self.vm_granularity() }
    fn vm_reserve(&self, bytes: u64) -> DriverResult<Address> {
        let _blocking = gate::blocking();
        self.vm_reserve(bytes)
    }
    unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.vm_release(address, bytes) }
    }
    unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.vm_map(address, bytes) }
    }
    unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.vm_unmap(address, bytes) }
    }
    unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.vm_move(from, to, bytes) }
    }

    fn stream_create(&self, priority: i32) -> DriverResult<RawStream> {
        let _blocking = gate::blocking();
        self.stream_create(priority)
    }
    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.stream_destroy(stream) }
    }
    fn stream_query(&self, stream: RawStream) -> DriverResult<bool> { self.stream_query(stream) }
    fn stream_wait_idle(&self, stream: RawStream, limit: Duration) -> DriverResult<bool> {
        self.stream_wait_idle(stream, limit)
    }
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult {
        self.stream_wait_event(stream, event)
    }
    fn event_create(&self, timing: bool) -> DriverResult<RawEvent> { self.event_create(timing) }
    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.event_destroy(event) }
    }
    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult { self.event_record(event, stream) }
    fn event_query(&self, event: RawEvent) -> DriverResult<bool> { self.event_query(event) }
    fn event_wait(&self, event: RawEvent, limit: Duration) -> DriverResult<bool> { self.event_wait(event, limit) }
    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration> { self.event_elapsed(start, end) }

    unsafe fn copy_to_device(&self, dst: Address, src: *const u8, bytes: usize, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_to_device(dst, src, bytes, stream) }
    }
    unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_to_host(dst, src, bytes, stream) }
    }
    unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_within(dst, src, bytes, stream) }
    }
    unsafe fn copy_peer(
        &self, dst: Address, dst_device: &dyn Driver, src: Address, src_device: &dyn Driver, bytes: usize,
        stream: RawStream,
    ) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_peer(dst, dst_device, src, src_device, bytes, stream) }
    }
    unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.fill_u8(dst, value, bytes, stream) }
    }
    unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.fill_u32(dst, value, count, stream) }
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool> { self.can_access_peer(peer) }
    fn enable_peer(&self, peer: &dyn Driver) -> DriverResult {
        let _blocking = gate::blocking();
        self.enable_peer(peer)
    }
    fn disable_peer(&self, peer: &dyn Driver) -> DriverResult {
        let _blocking = gate::blocking();
        self.disable_peer(peer)
    }

    fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule> {
        let _blocking = gate::blocking();
        self.module_load(image)
    }
    unsafe fn module_unload(&self, module: RawModule) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.module_unload(module) }
    }
    fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction> { self.function(module, name) }
    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.launch(launch, stream) }
    }
    fn launch_host(&self, stream: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult {
        self.launch_host(stream, f)
    }
    #[cfg(feature = "blas")]
    unsafe fn gemm(&self, gemm: &Gemm, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.gemm(gemm, stream) }
    }

    fn capture_begin(&self, stream: RawStream) -> DriverResult { self.capture_begin(stream) }
    fn capture_end(&self, stream: RawStream) -> DriverResult<RawGraph> {
        let _blocking = gate::blocking();
        self.capture_end(stream)
    }
    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.graph_launch(graph, stream) }
    }
    unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult {
        let _blocking = gate::blocking();
        // SAFETY: the caller's promise is the same.
        unsafe { self.graph_destroy(graph) }
    }

    unsafe fn write_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.write_value(address, value, stream) }
    }
    unsafe fn wait_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        unsafe { self.wait_value(address, value, stream) }
    }
}
