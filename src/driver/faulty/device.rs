//! The decorator: each call is judged, then made.

use super::{
    common::{Common, Owned},
    lie::{self, Liar},
    stuck::Stuck,
};
#[cfg(feature = "blas")]
use crate::driver::Gemm;
use crate::{
    driver::{
        Address, DeviceInfo, Driver, DriverRef, DriverResult, Launch, ModuleImage, RawEvent, RawFunction, RawGraph,
        RawModule, RawStream, check,
    },
    testing::{FaultOp, FaultPlan, Injected},
};
use std::{any::Any, sync::Arc, time::Duration};

/// A device with a plan around it.
pub(super) struct Faulty {
    pub inner: DriverRef,
    pub index: usize,
    pub plan: FaultPlan,
    pub common: Arc<Common>,
    pub stuck: Arc<Stuck>,
    pub liar: Liar,
}

impl Driver for Faulty {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn checker(&self) -> Option<(&Arc<check::Checker>, usize)> {
        self.inner.checker()
    }

    fn bind(&self) -> DriverResult {
        self.begin(FaultOp::Bind, &[])?;
        self.inner.bind()
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        self.begin(FaultOp::MemoryInfo, &[])?;
        self.inner.memory_info()
    }

    fn mem_alloc(&self, bytes: usize) -> DriverResult<Address> {
        self.begin(FaultOp::Alloc, &[])?;
        let address = self.inner.mem_alloc(bytes)?;
        self.common.allocated(address, Owned { bytes, device: self.index, lie: None });
        Ok(address)
    }

    unsafe fn mem_free(&self, address: Address) -> DriverResult {
        self.give_back(FaultOp::Free, || {
            // Before it is: afterwards it may be another device's.
            self.common.freed(address);
            // SAFETY: the caller's promise is the same.
            unsafe { self.inner.mem_free(address) }
        })
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.begin(FaultOp::HostAlloc, &[])?;
        self.inner.host_alloc(bytes)
    }

    unsafe fn host_free(&self, ptr: *mut u8) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        self.give_back(FaultOp::HostFree, || unsafe { self.inner.host_free(ptr) })
    }

    fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.begin(FaultOp::ManagedAlloc, &[])?;
        self.inner.managed_alloc(bytes)
    }

    unsafe fn managed_free(&self, ptr: *mut u8) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        self.give_back(FaultOp::ManagedFree, || unsafe { self.inner.managed_free(ptr) })
    }

    fn vm_granularity(&self) -> Option<usize> {
        self.inner.vm_granularity()
    }

    fn vm_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.begin(FaultOp::VmReserve, &[])?;
        self.inner.vm_reserve(bytes)
    }

    unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        self.give_back(FaultOp::VmRelease, || unsafe { self.inner.vm_release(address, bytes) })
    }

    unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult {
        // Whoever plans that memory runs out does not care which way it comes.
        self.begin(FaultOp::Alloc, &[])?;
        let verdict = self.begin(FaultOp::VmMap, &[])?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.vm_map(address, bytes)? };
        self.common.allocated(address, Owned { bytes, device: self.index, lie: lie::of_mapping(&verdict) });
        Ok(())
    }

    unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult {
        self.give_back(FaultOp::VmUnmap, || {
            // As for `mem_free`.
            self.common.freed(address);
            // SAFETY: the caller's promise is the same.
            unsafe { self.inner.vm_unmap(address, bytes) }
        })
    }

    unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult {
        self.begin(FaultOp::VmMove, &[])?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.vm_move(from, to, bytes)? };
        if let Some(known) = self.common.freed(from) {
            self.common.allocated(to, known);
        }
        Ok(())
    }

    fn stream_create(&self, priority: i32) -> DriverResult<RawStream> {
        self.begin(FaultOp::StreamCreate, &[])?;
        self.inner.stream_create(priority)
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        self.give_back(FaultOp::StreamDestroy, || unsafe { self.inner.stream_destroy(stream) })
    }

    fn stream_query(&self, stream: RawStream) -> DriverResult<bool> {
        self.begin(FaultOp::StreamQuery, &[])?;
        self.inner.stream_query(stream)
    }

    fn stream_wait_idle(&self, stream: RawStream, limit: Duration) -> DriverResult<bool> {
        self.waits(FaultOp::StreamWait, || self.inner.stream_wait_idle(stream, limit))
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult {
        self.submit(FaultOp::Wait, &[], 0, stream)?;
        self.common.event_alive(event)?;
        self.inner.stream_wait_event(stream, event)
    }

    fn event_create(&self, timing: bool) -> DriverResult<RawEvent> {
        self.begin(FaultOp::EventCreate, &[])?;
        let event = self.inner.event_create(timing)?;
        self.common.event_created(event, self.index);
        Ok(event)
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult {
        self.give_back(FaultOp::EventDestroy, || {
            self.common.event_destroyed(event);
            // SAFETY: the caller's promise is the same.
            unsafe { self.inner.event_destroy(event) }
        })
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::Record, &[], 0, stream)?;
        self.inner.event_record(event, stream)
    }

    fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        self.begin(FaultOp::EventQuery, &[])?;
        self.common.event_alive(event)?;
        self.inner.event_query(event)
    }

    fn event_wait(&self, event: RawEvent, limit: Duration) -> DriverResult<bool> {
        let waited = self.waits(FaultOp::EventWait, || self.inner.event_wait(event, limit))?;
        self.common.event_alive(event)?;
        Ok(waited)
    }

    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration> {
        self.begin(FaultOp::EventElapsed, &[])?;
        self.inner.event_elapsed(start, end)
    }

    unsafe fn copy_to_device(&self, dst: Address, src: *const u8, bytes: usize, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::CopyUp, &[], bytes, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.copy_to_device(dst, src, bytes, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::CopyDown, &[], bytes, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.copy_to_host(dst, src, bytes, stream) }
    }

    unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::CopyWithin, &[], bytes, stream)?;
        let lie = self.common.lie(dst, src);
        let delivered = if lie == Some(Injected::Drop) { 0 } else { bytes };
        // SAFETY: the caller's promise is the same, for these bytes or none.
        unsafe { self.inner.copy_within(dst, src, delivered, stream)? };
        match lie {
            // SAFETY: what the caller's copy writes.
            Some(Injected::Corrupt) => unsafe { self.liar.damage(dst, bytes, stream) },
            _ => Ok(()),
        }
    }

    unsafe fn copy_peer(
        &self,
        dst: Address,
        dst_device: &dyn Driver,
        src: Address,
        src_device: &dyn Driver,
        bytes: usize,
        stream: RawStream,
    ) -> DriverResult {
        let (to, from) = (self.common.index(dst_device), self.common.index(src_device));
        let (op, peer) = if to == Some(self.index) { (FaultOp::CopyFromPeer, from) } else { (FaultOp::CopyToPeer, to) };
        let verdict = self.submit(op, peer.as_slice(), bytes, stream)?;
        let lie = peer.and_then(|peer| lie::about(&verdict, peer)).or_else(|| self.common.lie(dst, src));
        // A lie is not less strict than the truth: without the right to the peer's memory the call still fails.
        let delivered = if lie == Some(Injected::Drop) { 0 } else { bytes };
        // SAFETY: the caller's promise is the same, for these bytes or none.
        unsafe { self.inner.copy_peer(dst, dst_device, src, src_device, delivered, stream)? };
        match lie {
            // SAFETY: what the caller's copy writes.
            Some(Injected::Corrupt) => unsafe { self.liar.damage(dst, bytes, stream) },
            _ => Ok(()),
        }
    }

    unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::Fill, &[], bytes, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.fill_u8(dst, value, bytes, stream) }
    }

    unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::Fill, &[], 0, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.fill_u32(dst, value, count, stream) }
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool> {
        self.begin(FaultOp::CanAccessPeer, &self.peer(peer))?;
        self.inner.can_access_peer(peer)
    }

    fn enable_peer(&self, peer: &dyn Driver) -> DriverResult {
        self.begin(FaultOp::EnablePeer, &self.peer(peer))?;
        self.inner.enable_peer(peer)
    }

    fn disable_peer(&self, peer: &dyn Driver) -> DriverResult {
        self.begin(FaultOp::DisablePeer, &self.peer(peer))?;
        self.inner.disable_peer(peer)
    }

    fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule> {
        self.begin(FaultOp::ModuleLoad, &[])?;
        self.inner.module_load(image)
    }

    unsafe fn module_unload(&self, module: RawModule) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        self.give_back(FaultOp::ModuleUnload, || unsafe { self.inner.module_unload(module) })
    }

    fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction> {
        self.begin(FaultOp::Function, &[])?;
        self.inner.function(module, name)
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult {
        let verdict = self.submit(FaultOp::Launch, &self.peers(launch), 0, stream)?;
        match verdict.iter().map(|(injected, _)| *injected).find(|fault| *fault != Injected::Stuck) {
            // SAFETY: the caller's promise is the same.
            None => unsafe { self.inner.launch(launch, stream) },
            Some(Injected::LaunchFailed) => Ok(()),
            // SAFETY: as above.
            Some(_) => unsafe { self.liar.launch(&self.common, &verdict, launch, stream) },
        }
    }

    fn launch_host(&self, stream: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult {
        self.submit(FaultOp::LaunchHost, &[], 0, stream)?;
        self.inner.launch_host(stream, f)
    }

    #[cfg(feature = "blas")]
    unsafe fn gemm(&self, gemm: &Gemm, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::Gemm, &[], 0, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.gemm(gemm, stream) }
    }

    fn capture_begin(&self, stream: RawStream) -> DriverResult {
        self.begin(FaultOp::CaptureBegin, &[])?;
        self.inner.capture_begin(stream)
    }

    fn capture_end(&self, stream: RawStream) -> DriverResult<RawGraph> {
        let begun = self.begin(FaultOp::CaptureEnd, &[]);
        let ended = self.inner.capture_end(stream);
        if let (Err(_), Ok(graph)) = (&begun, &ended) {
            // SAFETY: made just now, and nobody gets to know it.
            let _ = unsafe { self.inner.graph_destroy(*graph) };
        }
        begun.and(ended)
    }

    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::GraphLaunch, &[], 0, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.graph_launch(graph, stream) }
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult {
        // SAFETY: the caller's promise is the same.
        self.give_back(FaultOp::GraphDestroy, || unsafe { self.inner.graph_destroy(graph) })
    }

    unsafe fn write_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::WriteValue, &[], 0, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.write_value(address, value, stream) }
    }

    unsafe fn wait_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        self.submit(FaultOp::WaitValue, &[], 0, stream)?;
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.wait_value(address, value, stream) }
    }

    unsafe fn poll_value(&self, address: Address) -> u64 {
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.poll_value(address) }
    }
}
