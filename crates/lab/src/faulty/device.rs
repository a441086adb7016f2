//! A fault plan as a layer: asks the plan about each call, then makes the call or fails. Invariant: a failed call was
//! not made. Calls that free or destroy something are made in any case.

use super::{
    common::{Common, Owned},
    lie::{self, Liar},
    plan::{FaultOp, FaultPlan, Injected},
    stuck::Stuck,
};
use gpu_pool::{extend::driver::*, extend::lab::forward};
use parking_lot::Mutex;
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{any::Any, collections::HashSet, sync::Arc, time::Duration};

pub(super) struct Faulty {
    pub inner: DriverRef,
    pub index: usize,
    pub plan: FaultPlan,
    pub common: Arc<Common>,
    pub stuck: Arc<Stuck>,
    /// A capture holds no function of the host, so nothing is delayed in one.
    pub captures: Mutex<HashSet<RawStream>>,
    pub liar: Liar,
}

impl Driver for Faulty {
    fn inner(&self) -> Option<&DriverRef> {
        Some(&self.inner)
    }

    forward! { |this, call| this.inner;
        info();
        as_any();
        bind() => this.asks(FaultOp::Bind, call);
        memory_info() => this.asks(FaultOp::MemoryInfo, call);

        mem_alloc(bytes) => {
            let address = this.asks(FaultOp::Alloc, call)?;
            this.common.allocated(address, Owned { bytes, device: this.index, lie: None });
            Ok(address)
        };
        mem_free(address) => this.give_back(FaultOp::Free, || {
            // Before the call, since another device may get the address right after it.
            this.common.freed(address);
            call()
        });
        host_alloc(bytes) => this.asks(FaultOp::HostAlloc, call);
        host_free(ptr) => this.give_back(FaultOp::HostFree, call);
        managed_alloc(bytes) => this.asks(FaultOp::ManagedAlloc, call);
        managed_free(ptr) => this.give_back(FaultOp::ManagedFree, call);

        adopt(address, bytes);
        disown(address);

        vm_granularity();
        vm_reserve(bytes) => this.asks(FaultOp::VmReserve, call);
        vm_release(address, bytes) => this.give_back(FaultOp::VmRelease, call);
        vm_map(address, bytes) => {
            // A rule about allocations includes mappings.
            this.begin(FaultOp::Alloc, &[])?;
            let verdict = this.begin(FaultOp::VmMap, &[])?;
            call()?;
            this.common.allocated(address, Owned { bytes, device: this.index, lie: lie::of_mapping(&verdict) });
            Ok(())
        };
        vm_unmap(address, bytes) => this.give_back(FaultOp::VmUnmap, || {
            this.common.freed(address);
            call()
        });
        vm_move(from, to, bytes) => {
            this.asks(FaultOp::VmMove, call)?;
            if let Some(known) = this.common.freed(from) {
                this.common.allocated(to, known);
            }
            Ok(())
        };

        #[cfg(target_os = "linux")]
        vm_export(address, bytes) => this.asks(FaultOp::VmExport, call);
        #[cfg(target_os = "linux")]
        vm_import(address, bytes, memory) => {
            this.asks(FaultOp::VmImport, call)?;
            this.common.allocated(address, Owned { bytes, device: this.index, lie: None });
            Ok(())
        };

        stream_create(priority) => this.asks(FaultOp::StreamCreate, call);
        stream_adopt(stream);
        stream_destroy(stream) => this.give_back(FaultOp::StreamDestroy, call);
        stream_query(stream) => this.asks(FaultOp::StreamQuery, call);
        stream_wait_idle(stream, limit) => this.waits(FaultOp::StreamWait, call);
        stream_wait_event(stream, event) => {
            this.submit(FaultOp::Wait, &[], 0, stream)?;
            this.common.event_alive(event)?;
            call()
        };

        event_create(timing) => {
            let event = this.asks(FaultOp::EventCreate, call)?;
            this.common.event_created(event, this.index);
            Ok(event)
        };
        event_destroy(event) => this.give_back(FaultOp::EventDestroy, || {
            this.common.event_destroyed(event);
            call()
        });
        event_record(event, stream) => this.sends(FaultOp::Record, 0, stream, call);
        event_query(event) => {
            this.begin(FaultOp::EventQuery, &[])?;
            this.common.event_alive(event)?;
            call()
        };
        event_wait(event, limit) => {
            let waited = this.waits(FaultOp::EventWait, call)?;
            this.common.event_alive(event)?;
            Ok(waited)
        };
        event_elapsed(start, end) => this.asks(FaultOp::EventElapsed, call);

        copy_to_device(dst, src, bytes, stream) => this.sends(FaultOp::CopyUp, bytes, stream, call);
        copy_to_host(dst, src, bytes, stream) => this.sends(FaultOp::CopyDown, bytes, stream, call);
        copy_within(dst, src, bytes, stream) => {
            this.submit(FaultOp::CopyWithin, &[], bytes, stream)?;
            // SAFETY: the caller's promise; `delivered` is `bytes` or 0.
            let copy = |delivered| unsafe { this.inner.copy_within(dst, src, delivered, stream) };
            // SAFETY: the caller's promise.
            unsafe { this.deliver(this.common.lie(dst, src), (dst, bytes), stream, copy) }
        };
        copy_peer(dst, dst_device, src, src_device, bytes, stream) => {
            let (to, from) = (this.common.index(dst_device), this.common.index(src_device));
            let own = to == Some(this.index);
            let (op, peer) = if own { (FaultOp::CopyFromPeer, from) } else { (FaultOp::CopyToPeer, to) };
            let verdict = this.submit(op, peer.as_slice(), bytes, stream)?;
            let lie = peer.and_then(|peer| lie::about(&verdict, peer)).or_else(|| this.common.lie(dst, src));
            // SAFETY: the caller's promise; `delivered` is `bytes` or 0.
            let copy = |delivered| unsafe { this.inner.copy_peer(dst, dst_device, src, src_device, delivered, stream) };
            // SAFETY: the caller's promise.
            unsafe { this.deliver(lie, (dst, bytes), stream, copy) }
        };
        fill_u8(dst, value, bytes, stream) => this.sends(FaultOp::Fill, bytes, stream, call);
        fill_u32(dst, value, count, stream) => this.sends(FaultOp::Fill, 0, stream, call);

        can_access_peer(peer) => this.peer(FaultOp::CanAccessPeer, peer).and_then(|_| call());
        enable_peer(peer) => this.peer(FaultOp::EnablePeer, peer).and_then(|_| call());
        disable_peer(peer) => this.peer(FaultOp::DisablePeer, peer).and_then(|_| call());

        module_load(image) => this.asks(FaultOp::ModuleLoad, call);
        module_unload(module) => this.give_back(FaultOp::ModuleUnload, call);
        function(module, name) => this.asks(FaultOp::Function, call);
        launch_host(stream, f) => this.sends(FaultOp::LaunchHost, 0, stream, call);
            gemm(gemm, stream) => this.sends(FaultOp::Gemm, 0, stream, call);

        capture_begin(stream) => this.asks(FaultOp::CaptureBegin, || {
            call()?;
            this.captures.lock().insert(stream);
            Ok(())
        });
        capture_end(stream) => {
            let begun = this.begin(FaultOp::CaptureEnd, &[]);
            let ended = call();
            this.captures.lock().remove(&stream);
            if let (Err(_), Ok(graph)) = (&begun, &ended) {
                // SAFETY: the graph was just made, and no other code uses it.
                let _ = unsafe { this.inner.graph_destroy(*graph) };
            }
            begun.and(ended)
        };
        graph_launch(graph, stream) => this.sends(FaultOp::GraphLaunch, 0, stream, call);
        graph_destroy(graph) => this.give_back(FaultOp::GraphDestroy, call);

        write_value(address, value, stream) => this.sends(FaultOp::WriteValue, 0, stream, call);
        wait_value(address, value, stream) => this.sends(FaultOp::WaitValue, 0, stream, call);
        poll_value(address);
    }

    unsafe fn launch(&self, launch: &Launch<'_>, stream: RawStream) -> DriverResult {
        let verdict = self.submit(FaultOp::Launch, &self.peers(launch), 0, stream)?;
        match verdict.iter().map(|(injected, _)| *injected).find(|fault| *fault != Injected::Stuck) {
            // SAFETY: the caller's promise.
            None => unsafe { self.inner.launch(launch, stream) },
            Some(Injected::LaunchFailed) => Ok(()),
            // SAFETY: as above.
            Some(_) => unsafe { self.liar.launch(&self.common, &verdict, launch, stream) },
        }
    }
}
