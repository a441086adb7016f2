//! The decorator: each call of a driver, judged, passed on and noted.

use super::{
    Checker,
    calls::{is_gone, is_over, read, write},
    heap::Source,
    host::InStream,
    judge::{Operand, refusal},
    note::Call,
};
#[cfg(feature = "blas")]
use crate::driver::Gemm;
use crate::driver::{
    Address, DeviceInfo, Driver, DriverRef, DriverResult, KernelArg, Launch, ModuleImage, RawEvent, RawFunction,
    RawGraph, RawModule, RawStream,
};
use smallvec::SmallVec;
use std::{any::Any, sync::Arc, time::Duration};

/// A driver with a checker.
pub(super) struct Checked {
    pub inner: DriverRef,
    pub index: usize,
    pub checker: Arc<Checker>,
}

impl Driver for Checked {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn unwatched(&self) -> Option<DriverRef> {
        Some(self.inner.clone())
    }

    fn checker(&self) -> Option<(&Arc<Checker>, usize)> {
        Some((&self.checker, self.index))
    }

    fn bind(&self) -> DriverResult {
        self.inner.bind()
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        self.inner.memory_info()
    }

    fn mem_alloc(&self, bytes: usize) -> DriverResult<Address> {
        let address = self.inner.mem_alloc(bytes)?;
        self.added(address, bytes, Source::Device(self.index));
        Ok(address)
    }

    unsafe fn mem_free(&self, address: Address) -> DriverResult {
        // SAFETY: the caller's promise.
        self.free("mem_free", address, Source::Device(self.index), || unsafe { self.inner.mem_free(address) })
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        let ptr = self.inner.host_alloc(bytes)?;
        self.added(ptr as Address, bytes, Source::Pinned);
        Ok(ptr)
    }

    unsafe fn host_free(&self, ptr: *mut u8) -> DriverResult {
        // SAFETY: the caller's promise.
        self.free("host_free", ptr as Address, Source::Pinned, || unsafe { self.inner.host_free(ptr) })
    }

    fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        let ptr = self.inner.managed_alloc(bytes)?;
        self.added(ptr as Address, bytes, Source::Managed);
        Ok(ptr)
    }

    unsafe fn managed_free(&self, ptr: *mut u8) -> DriverResult {
        // SAFETY: the caller's promise.
        self.free("managed_free", ptr as Address, Source::Managed, || unsafe { self.inner.managed_free(ptr) })
    }

    fn vm_granularity(&self) -> Option<usize> {
        self.inner.vm_granularity()
    }

    fn vm_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.inner.vm_reserve(bytes)
    }

    unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult {
        // SAFETY: the caller's promise.
        unsafe { self.inner.vm_release(address, bytes) }
    }

    unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult {
        // SAFETY: the caller's promise.
        unsafe { self.inner.vm_map(address, bytes)? };
        self.added(address, bytes, Source::Mapped(self.index));
        Ok(())
    }

    unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult {
        let source = Source::Mapped(self.index);
        // SAFETY: the caller's promise.
        self.free("vm_unmap", address, source, || unsafe { self.inner.vm_unmap(address, bytes) })
    }

    unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult {
        let source = Source::Mapped(self.index);
        // SAFETY: the caller's promise.
        self.free("vm_move", from, source, || unsafe { self.inner.vm_move(from, to, bytes) })?;
        self.added(to, bytes, source);
        Ok(())
    }

    fn stream_create(&self, priority: i32) -> DriverResult<RawStream> {
        let stream = self.inner.stream_create(priority)?;
        self.checker.state.lock().stream_created((self.index, stream.0));
        Ok(stream)
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult {
        let mut state = self.checker.state.lock();
        // SAFETY: the caller's promise.
        let destroyed = unsafe { self.inner.stream_destroy(stream) };
        if is_gone(&destroyed) {
            state.stream_destroyed((self.index, stream.0));
        }
        destroyed
    }

    fn stream_query(&self, stream: RawStream) -> DriverResult<bool> {
        let (mut state, by) = self.checker.enter();
        let idle = self.inner.stream_query(stream)?;
        let found = state.streams.get(&(self.index, stream.0)).filter(|_| idle);
        if let Some(clock) = found.map(|stream| stream.clock.clone()) {
            state.learn(by, &clock);
        }
        Ok(idle)
    }

    fn stream_wait_idle(&self, stream: RawStream, limit: Duration) -> DriverResult<bool> {
        // What others submit meanwhile is not waited for.
        let clock = self.checker.state.lock().streams.get(&(self.index, stream.0)).map(|stream| stream.clock.clone());
        let idle = self.inner.stream_wait_idle(stream, limit);
        if let Some(clock) = clock.filter(|_| is_over(&idle)) {
            let (mut state, by) = self.checker.enter();
            state.learn(by, &clock);
        }
        idle
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult {
        let (mut state, by) = self.checker.enter();
        let key = (self.index, stream.0);
        let call = Call::new("stream_wait_event", "");
        let record = state.awaited(key, event.0, call, Some(key)).map_err(refusal)?;
        self.inner.stream_wait_event(stream, event)?;
        if let (Some((_, record, _)), Some(stream)) = (record, state.hear(key, by)) {
            stream.clock.join(&record);
        }
        Ok(())
    }

    fn event_create(&self, timing: bool) -> DriverResult<RawEvent> {
        let event = self.inner.event_create(timing)?;
        self.checker.state.lock().events.insert((self.index, event.0), Default::default());
        Ok(event)
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult {
        let mut state = self.checker.state.lock();
        // SAFETY: the caller's promise.
        let destroyed = unsafe { self.inner.event_destroy(event) };
        if is_gone(&destroyed) {
            state.events.remove(&(self.index, event.0));
        }
        destroyed
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult {
        let (mut state, by) = self.checker.enter();
        self.inner.event_record(event, stream)?;
        state.recorded(by, (self.index, event.0), (self.index, stream.0));
        Ok(())
    }

    fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        let (mut state, by) = self.checker.enter();
        let done = self.inner.event_query(event)?;
        let key = state.event_key(self.index, event.0).filter(|_| done);
        if let Some(record) = key.and_then(|key| state.events[&key].record.clone()) {
            state.learn(by, &record);
        }
        Ok(done)
    }

    fn event_wait(&self, event: RawEvent, limit: Duration) -> DriverResult<bool> {
        let call = Call::new("event_wait", "");
        let awaited = self.checker.state.lock().awaited((self.index, 0), event.0, call, None).map_err(refusal)?;
        let done = self.inner.event_wait(event, limit);
        let Some((key, record, version)) = awaited.filter(|_| is_over(&done)) else { return done };
        let (mut state, by) = self.checker.enter();
        if state.events.get(&key).is_none_or(|event| event.version == version) {
            state.learn(by, &record);
        } else {
            // Recorded anew meanwhile, so that it is open which record was waited for.
            drop(state);
            self.event_query(event)?;
        }
        done
    }

    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration> {
        self.inner.event_elapsed(start, end)
    }

    unsafe fn copy_to_device(&self, dst: Address, src: *const u8, bytes: usize, stream: RawStream) -> DriverResult {
        let call = const { Call::new("copy_to_device", "to the device") };
        let operands = [write(dst, bytes), read(src as Address, bytes)];
        // SAFETY: the caller's promise.
        self.submit(stream, call, &operands, || unsafe { self.inner.copy_to_device(dst, src, bytes, stream) })
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        let call = const { Call::new("copy_to_host", "to the host") };
        let operands = [write(dst as Address, bytes), read(src, bytes)];
        // SAFETY: the caller's promise.
        self.submit(stream, call, &operands, || unsafe { self.inner.copy_to_host(dst, src, bytes, stream) })
    }

    unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        let call = const { Call::new("copy_within", "on the device") };
        let operands = [write(dst, bytes), read(src, bytes)];
        // SAFETY: the caller's promise.
        self.submit(stream, call, &operands, || unsafe { self.inner.copy_within(dst, src, bytes, stream) })
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
        let call = const { Call::new("copy_peer", "peer copy") };
        let operands = [write(dst, bytes), read(src, bytes)];
        // SAFETY: the caller's promise.
        let forward = || unsafe { self.inner.copy_peer(dst, dst_device, src, src_device, bytes, stream) };
        self.submit(stream, call, &operands, forward)
    }

    unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, stream: RawStream) -> DriverResult {
        let call = const { Call::new("fill_u8", "fill") };
        // SAFETY: the caller's promise.
        self.submit(stream, call, &[write(dst, bytes)], || unsafe { self.inner.fill_u8(dst, value, bytes, stream) })
    }

    unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, stream: RawStream) -> DriverResult {
        let call = const { Call::new("fill_u32", "fill") };
        let operands = [write(dst, count.saturating_mul(4))];
        // SAFETY: the caller's promise.
        self.submit(stream, call, &operands, || unsafe { self.inner.fill_u32(dst, value, count, stream) })
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool> {
        self.inner.can_access_peer(peer)
    }

    fn enable_peer(&self, peer: &dyn Driver) -> DriverResult {
        self.inner.enable_peer(peer)
    }

    fn disable_peer(&self, peer: &dyn Driver) -> DriverResult {
        self.inner.disable_peer(peer)
    }

    fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule> {
        self.inner.module_load(image)
    }

    unsafe fn module_unload(&self, module: RawModule) -> DriverResult {
        // SAFETY: the caller's promise.
        unsafe { self.inner.module_unload(module) }
    }

    fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction> {
        self.inner.function(module, name)
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult {
        let call = Call { name: "launch", what: "kernel", kernel: Some(launch.name) };
        let slice = |arg: &KernelArg| match *arg {
            KernelArg::Slice { address, bytes, write: true } => Some(write(address, bytes)),
            KernelArg::Slice { address, bytes, write: false } => Some(read(address, bytes)),
            KernelArg::Value(_) => None,
        };
        let operands: SmallVec<[Operand; 8]> = launch.args.iter().filter_map(slice).collect();
        // SAFETY: the caller's promise.
        self.submit(stream, call, &operands, || unsafe { self.inner.launch(launch, stream) })
    }

    /// The function is passed on without the lock: if it is refused, its drop may call the driver.
    fn launch_host(&self, stream: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult {
        let key = (self.index, stream.0);
        let (mut state, by) = self.checker.enter();
        let clock = state.hear(key, by).map(|stream| stream.clock.clone());
        drop(state);
        let checker = Arc::downgrade(&self.checker);
        let f = move || {
            let _known = clock.map(|clock| InStream::enter(checker, clock));
            f();
        };
        self.inner.launch_host(stream, Box::new(f))
    }

    #[cfg(feature = "blas")]
    unsafe fn gemm(&self, gemm: &Gemm, stream: RawStream) -> DriverResult {
        let call = const { Call::new("gemm", "matrix product") };
        let size = |rows: usize, columns: usize| rows.saturating_mul(columns).saturating_mul(4);
        let c = write(gemm.c, size(gemm.m, gemm.n));
        let old = Operand { bytes: if gemm.beta == 0.0 { 0 } else { c.bytes }, ..read(gemm.c, 0) };
        let operands = [read(gemm.a, size(gemm.m, gemm.k)), read(gemm.b, size(gemm.k, gemm.n)), old, c];
        // SAFETY: the caller's promise.
        self.submit(stream, call, &operands, || unsafe { self.inner.gemm(gemm, stream) })
    }

    fn capture_begin(&self, stream: RawStream) -> DriverResult {
        let mut state = self.checker.state.lock();
        self.inner.capture_begin(stream)?;
        state.captures.insert((self.index, stream.0), Vec::new());
        Ok(())
    }

    fn capture_end(&self, stream: RawStream) -> DriverResult<RawGraph> {
        let noted = self.checker.state.lock().captures.remove(&(self.index, stream.0)).unwrap_or_default();
        let graph = self.inner.capture_end(stream)?;
        self.checker.state.lock().graphs.insert((self.index, graph.0), noted.into());
        Ok(graph)
    }

    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> DriverResult {
        let (mut state, by) = self.checker.enter();
        let noted = state.graphs.get(&(self.index, graph.0)).cloned().unwrap_or_default();
        // SAFETY: the caller's promise.
        state.replay(by, (self.index, stream.0), &noted, || unsafe { self.inner.graph_launch(graph, stream) })
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult {
        self.checker.state.lock().graphs.remove(&(self.index, graph.0));
        // SAFETY: the caller's promise.
        unsafe { self.inner.graph_destroy(graph) }
    }

    unsafe fn write_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        let call = const { Call::new("write_value", "raises a flag") };
        let (mut state, by) = self.checker.enter();
        // SAFETY: the caller's promise.
        let forward = || unsafe { self.inner.write_value(address, value, stream) };
        state.raise(by, (self.index, stream.0), call, (address, value), forward)
    }

    unsafe fn wait_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        let call = const { Call::new("wait_value", "waits for a flag") };
        let (mut state, by) = self.checker.enter();
        // SAFETY: the caller's promise.
        let forward = || unsafe { self.inner.wait_value(address, value, stream) };
        state.wait_flag(by, (self.index, stream.0), call, (address, value), forward)
    }

    unsafe fn poll_value(&self, address: Address) -> u64 {
        let (mut state, by) = self.checker.enter();
        // SAFETY: the caller's promise. Under the lock, so that whoever wrote the value is in the account.
        let value = unsafe { self.inner.poll_value(address) };
        if let Some(clock) = state.flags.seen(address, value) {
            state.learn(by, &clock);
        }
        value
    }
}
