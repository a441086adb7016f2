//! [`Driver`] for a software GPU: each call checks its arguments and gives the operation to the machine.

use super::calls::{check_aligned, check_size};
use super::{
    Core, Engine, Event, Graph, Home, HostCall, HostKind, Op, Progress, Work, fault, machine::Owner, op::HostFunction,
    pages, sched::Module, stream::State as StreamState,
};
#[cfg(feature = "blas")]
use crate::driver::Gemm;
use crate::driver::{
    Address, DeviceInfo, Driver, DriverResult, Launch, ModuleImage, RawEvent, RawFunction, RawGraph, RawModule,
    RawStream,
};
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{any::Any, cell::Cell, sync::Arc, time::Duration};

thread_local! {
    static UNCHARGED: Cell<bool> = const { Cell::new(false) };
}

/// Within `f`, calls of this thread that submit no operation take no virtual time.
pub(crate) fn uncharged<R>(f: impl FnOnce() -> R) -> R {
    let before = UNCHARGED.replace(true);
    let result = f();
    UNCHARGED.set(before);
    result
}

/// A software GPU; see the [module docs](super). Made by [`machine`](super::machine()).
pub struct HostGpu {
    pub(super) owner: Arc<Owner>,
    pub(super) index: usize,
    pub(super) info: DeviceInfo,
    pub(super) virtual_memory: bool,
}

impl Driver for HostGpu {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn bind(&self) -> DriverResult {
        self.alive().map(drop)
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        Ok(self.alive()?.core.memory.info(self.index))
    }

    fn mem_alloc(&self, bytes: usize) -> DriverResult<Address> {
        check_size(bytes)?;
        self.alive()?.core.memory.alloc(self.index, bytes)
    }

    unsafe fn mem_free(&self, address: Address) -> DriverResult {
        self.even_if_lost(|core| core.memory.free(self.index, address))
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.host_memory(bytes, HostKind::Pinned)
    }

    unsafe fn host_free(&self, ptr: *mut u8) -> DriverResult {
        self.even_if_lost(|core| core.memory.host_remove(ptr, HostKind::Pinned))
    }

    fn managed_alloc(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.host_memory(bytes, HostKind::Managed)
    }

    unsafe fn managed_free(&self, ptr: *mut u8) -> DriverResult {
        self.even_if_lost(|core| core.memory.host_remove(ptr, HostKind::Managed))
    }

    unsafe fn adopt(&self, address: Address, bytes: usize) -> DriverResult<Address> {
        check_size(bytes)?;
        self.alive()?.core.memory.adopt(self.index, address, bytes)
    }

    unsafe fn disown(&self, address: Address) -> DriverResult {
        self.even_if_lost(|core| core.memory.disown(self.index, address))
    }

    fn vm_granularity(&self) -> Option<usize> {
        self.virtual_memory.then_some(pages::GRANULARITY)
    }

    fn vm_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.check_virtual()?;
        self.alive()?.core.memory.reserve(self.index, bytes)
    }

    unsafe fn vm_release(&self, address: Address, bytes: u64) -> DriverResult {
        self.check_virtual()?;
        self.even_if_lost(|core| core.memory.windows(self.index).release(address, bytes))
    }

    unsafe fn vm_map(&self, address: Address, bytes: usize) -> DriverResult {
        self.check_virtual()?;
        self.alive()?.core.memory.map(self.index, address, bytes)
    }

    unsafe fn vm_unmap(&self, address: Address, bytes: usize) -> DriverResult {
        self.check_virtual()?;
        self.even_if_lost(|Core { memory, active, .. }| {
            let busy = |ptr: *mut u8| active.conflicts(ptr as usize, bytes, true);
            memory.unmap(self.index, address, bytes, busy)
        })
    }

    unsafe fn vm_move(&self, from: Address, to: Address, bytes: usize) -> DriverResult {
        self.check_virtual()?;
        let mut state = self.alive()?;
        let Core { memory, active, .. } = &mut state.core;
        let busy = |ptr: *mut u8| active.conflicts(ptr as usize, bytes, true);
        memory.remap(self.index, [from, to], bytes, busy)
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    unsafe fn vm_export(&self, address: Address, bytes: usize) -> DriverResult<OwnedFd> {
        self.check_virtual()?;
        self.alive()?.core.memory.windows(self.index).export(address, bytes)
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    unsafe fn vm_import(&self, address: Address, bytes: usize, memory: BorrowedFd<'_>) -> DriverResult {
        self.check_virtual()?;
        self.alive()?.core.memory.windows(self.index).import(address, bytes, memory)
    }

    #[cfg(all(target_os = "linux", miri))]
    unsafe fn vm_export(&self, _: Address, _: usize) -> DriverResult<OwnedFd> {
        Err(fault::unsupported("no virtual memory management under Miri"))
    }

    #[cfg(all(target_os = "linux", miri))]
    unsafe fn vm_import(&self, _: Address, _: usize, _: BorrowedFd<'_>) -> DriverResult {
        Err(fault::unsupported("no virtual memory management under Miri"))
    }

    fn stream_create(&self, priority: i32) -> DriverResult<RawStream> {
        self.alive()?.core.add_stream(self.index, priority).map(RawStream)
    }

    unsafe fn stream_adopt(&self, stream: RawStream) -> DriverResult {
        self.alive()?.core.stream(self.index, stream.0).map(drop)
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult {
        let mut state = self.lock();
        let found = state.core.stream(self.index, stream.0)?;
        found.destroyed = true;
        if found.state == StreamState::Idle {
            state.core.streams.remove(stream.0);
        }
        state.core.check_alive(self.index)
    }

    fn stream_query(&self, stream: RawStream) -> DriverResult<bool> {
        let mut state = self.alive()?;
        let record = self.record_here(&mut state, stream)?;
        self.query(Some(record), state)
    }

    fn stream_wait_idle(&self, stream: RawStream, limit: Duration) -> DriverResult<bool> {
        let mut state = self.lock();
        let record = self.record_here(&mut state, stream)?;
        let done = self.wait(Some(record), limit, &mut state);
        // The fault is reported now, so it is cleared: later submissions are not affected by it.
        if done.is_err()
            && let Some(stream) = state.core.streams.get_mut(stream.0)
        {
            stream.harm = None;
        }
        done
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult {
        let mut state = self.alive()?;
        state.core.stream(self.index, stream.0)?.check_no_capture()?;
        match Self::record_of(&state, event)? {
            // On a stepped machine the wait is always submitted: whether the record is pending depends on time, but the
            // stream's operations must not.
            Some(record) if state.core.stepped || matches!(state.core.progress(record), Progress::Pending) => {
                self.owner.push(&mut state, stream.0, Op::new(Engine::None, Work::WaitEvent(record)))
            }
            _ => Ok(()),
        }
    }

    fn event_create(&self, timing: bool) -> DriverResult<RawEvent> {
        let event = Event { device: self.index, timing, record: None, stamp: None };
        self.alive()?.core.events.insert(event).map(RawEvent)
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult {
        let event = |core: &mut Core| core.events.remove(event.0).ok_or_else(|| fault::invalid_handle("event"));
        self.even_if_lost(event).map(drop)
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult {
        let mut state = self.alive()?;
        let mut record = self.record_here(&mut state, stream)?;
        state.core.stream(self.index, stream.0)?.check_no_capture()?;
        let found = state.core.events.get(event.0).filter(|event| event.device == self.index);
        if found.ok_or_else(|| fault::invalid_handle("event"))?.timing {
            record.seq += 1;
            let work = Work::Stamp { event: event.0, seq: record.seq };
            self.owner.push(&mut state, stream.0, Op::new(Engine::None, work))?;
        }
        if let Some(event) = state.core.events.get_mut(event.0) {
            event.record = Some(record);
            event.stamp = None;
        }
        if !UNCHARGED.get() {
            state.core.called(HostCall::Record, 0);
        }
        Ok(())
    }

    fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        let state = self.alive()?;
        self.query(Self::record_of(&state, event)?, state)
    }

    fn event_wait(&self, event: RawEvent, limit: Duration) -> DriverResult<bool> {
        let mut state = self.lock();
        let record = Self::record_of(&state, event)?;
        self.wait(record, limit, &mut state)
    }

    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> DriverResult<Duration> {
        let state = self.alive()?;
        let stamp = |event: RawEvent| {
            let event = state.core.events.get(event.0).filter(|event| event.device == self.index);
            match event {
                Some(event) if event.timing && event.record.is_some() => {
                    event.stamp.ok_or_else(|| fault::not_ready("the event's work has not completed"))
                }
                _ => Err(fault::invalid_handle("timing event that was recorded")),
            }
        };
        stamp(end)?.since(stamp(start)?)
    }

    unsafe fn copy_to_device(&self, dst: Address, src: *const u8, bytes: usize, stream: RawStream) -> DriverResult {
        self.alive()?.core.memory.check_host(src as Address, bytes)?;
        self.copy(dst, src as Address, bytes, stream, Engine::Up)
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        self.alive()?.core.memory.check_host(dst as Address, bytes)?;
        self.copy(dst as Address, src, bytes, stream, Engine::Down)
    }

    unsafe fn copy_within(&self, dst: Address, src: Address, bytes: usize, stream: RawStream) -> DriverResult {
        self.copy(dst, src, bytes, stream, Engine::Compute)
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
        let owners = [(dst, self.peer(dst_device)), (src, self.peer(src_device))];
        if !owners.iter().any(|(_, owner)| *owner == Some(self.index)) {
            return Err(fault::invalid("copy_peer on a device that owns neither side"));
        }
        let state = self.alive()?;
        for (address, owner) in owners {
            let Some(owner) = owner else {
                return Err(fault::peer_not_enabled("the other device is not of this machine"));
            };
            if !state.core.rights.allowed(self.index, owner) {
                return Err(fault::peer_not_enabled(format!("device {} may not access device {owner}", self.index)));
            }
            if bytes > 0
                && let Home::Device(home) = state.core.memory.resolve(address, bytes)?.home
                && home != owner
            {
                return Err(fault::invalid(format!("{address:#x} is memory of device {home}, not {owner}")));
            }
        }
        drop(state);
        self.copy(dst, src, bytes, stream, Engine::Peer)
    }

    unsafe fn fill_u8(&self, dst: Address, value: u8, bytes: usize, stream: RawStream) -> DriverResult {
        self.submit(stream, Engine::Compute, Work::FillU8 { dst, value, bytes })
    }

    unsafe fn fill_u32(&self, dst: Address, value: u32, count: usize, stream: RawStream) -> DriverResult {
        check_aligned(dst, 4)?;
        if count > isize::MAX as usize / 4 {
            return Err(fault::invalid(format!("{count} words are more than any memory has")));
        }
        self.submit(stream, Engine::Compute, Work::FillU32 { dst, value, count })
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> DriverResult<bool> {
        let state = self.alive()?;
        Ok(self.peer(peer).is_some_and(|peer| state.core.rights.possible(self.index, peer)))
    }

    fn enable_peer(&self, peer: &dyn Driver) -> DriverResult {
        let peer = self.peer(peer).ok_or_else(|| fault::peer_unsupported("the devices are not of one machine"))?;
        self.alive()?.core.rights.enable(self.index, peer)
    }

    fn disable_peer(&self, peer: &dyn Driver) -> DriverResult {
        let mut state = self.alive()?;
        if let Some(peer) = self.peer(peer) {
            state.core.rights.disable(self.index, peer);
        }
        Ok(())
    }

    fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule> {
        let module = Module { device: self.index, own: image.shared };
        self.alive()?.core.modules.insert(module).map(RawModule)
    }

    unsafe fn module_unload(&self, module: RawModule) -> DriverResult {
        let removed = self.alive()?.core.modules.remove(module.0);
        removed.map(drop).ok_or_else(|| fault::invalid_handle("module"))
    }

    fn function(&self, module: RawModule, _name: &str) -> DriverResult<RawFunction> {
        match self.alive()?.core.modules.get(module.0) {
            Some(loaded) if loaded.device == self.index => Ok(RawFunction(module.0)),
            _ => Err(fault::invalid_handle("module")),
        }
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult {
        let Some(kernel) = launch.host else {
            return Err(fault::not_found(format!("kernel `{}` has no host kernel for software GPUs", launch.name)));
        };
        let (x, y, z) = launch.dims.grid;
        let (bx, by, bz) = launch.dims.block;
        if [x, y, z, bx, by, bz].contains(&0) {
            return Err(fault::invalid(format!("kernel `{}` is launched with an empty grid or block", launch.name)));
        }
        let own = self.lock().core.modules.get(launch.function.0).is_some_and(|module| module.own);
        let Launch { name, dims, .. } = *launch;
        let work = Work::Kernel { name, kernel, dims, args: launch.args.into(), own };
        self.submit(stream, Engine::Compute, work)
    }

    fn launch_host(&self, stream: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult {
        self.submit(stream, Engine::HostThread, Work::HostFunction(HostFunction::new(f)))
    }

    #[cfg(feature = "blas")]
    unsafe fn gemm(&self, gemm: &Gemm, stream: RawStream) -> DriverResult {
        super::gemm::check(gemm)?;
        self.submit(stream, Engine::Compute, Work::Gemm(*gemm))
    }

    fn capture_begin(&self, stream: RawStream) -> DriverResult {
        let mut state = self.alive()?;
        let stream = state.core.stream(self.index, stream.0)?;
        stream.check_no_capture()?;
        stream.capture = Some(Vec::new());
        Ok(())
    }

    fn capture_end(&self, stream: RawStream) -> DriverResult<RawGraph> {
        let (mut state, device) = (self.lock(), self.index);
        let noted = state.core.stream(device, stream.0)?.capture.take();
        state.core.check_alive(device)?;
        let ops = noted.ok_or_else(|| fault::invalid("the stream does not capture"))?;
        state.core.graphs.insert(Graph { device, ops }).map(RawGraph)
    }

    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> DriverResult {
        let (mut state, device) = (self.alive()?, self.index);
        state.core.stream(device, stream.0)?.check_no_capture()?;
        let found = state.core.graphs.get(graph.0).filter(|graph| graph.device == device);
        let noted = &found.ok_or_else(|| fault::invalid_handle("graph"))?.ops;
        let ops: Vec<Op> = noted.iter().filter_map(Op::again).collect();
        // Either all operations are submitted or none: their memory may have been freed since the capture.
        ops.iter().try_for_each(|op| state.core.admit(device, &op.work))?;
        self.owner.push_all(&mut state, stream.0, ops.into_iter())
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> DriverResult {
        let graph = |core: &mut Core| core.graphs.remove(graph.0).ok_or_else(|| fault::invalid_handle("graph"));
        self.even_if_lost(graph).map(drop)
    }

    unsafe fn write_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        self.check_word(address)?;
        self.submit(stream, Engine::None, Work::WriteValue { address, value })
    }

    unsafe fn wait_value(&self, address: Address, value: u64, stream: RawStream) -> DriverResult {
        self.check_word(address)?;
        self.submit(stream, Engine::None, Work::WaitValue { address, value })
    }

    unsafe fn poll_value(&self, address: Address) -> u64 {
        // SAFETY: the caller's promise; operations write such words atomically, and so does the host.
        unsafe { crate::sync::load_word(std::ptr::with_exposed_provenance(address as usize)) }
    }
}
