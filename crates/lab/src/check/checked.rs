//! The checker as a layer: it judges each call of a driver, forwards it, and records it. Invariant: the state is locked
//! while a submission is forwarded, so it records the submissions in their real order.

use super::calls::{is_gone, is_over, read, write};
use super::heap::{Found, Source};
use super::judge::{Operand, refusal};
use super::{Checker, host::InStream, note::Call};
use gpu_pool::{
    extend::driver::*,
    extend::lab::{Watch, forward},
};
use smallvec::SmallVec;
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{any::Any, sync::Arc, time::Duration};

pub(super) struct Checked {
    pub inner: DriverRef,
    pub index: usize,
    pub checker: Arc<Checker>,
}

impl Driver for Checked {
    fn inner(&self) -> Option<&DriverRef> {
        Some(&self.inner)
    }

    fn watch(&self) -> Option<Watch> {
        Some(Watch { checker: self.checker.clone(), device: self.index, unwatched: self.inner.clone() })
    }

    forward! { |this, call| this.inner;
        info();
        as_any();
        bind();
        memory_info();

        mem_alloc(bytes) => call().inspect(|&address| this.added(address, bytes, Source::Device(this.index)));
        mem_free(address) => this.free("mem_free", address, Source::Device(this.index), call);
        host_alloc(bytes) => call().inspect(|&ptr| this.added(ptr as Address, bytes, Source::Pinned));
        host_free(ptr) => this.free("host_free", ptr as Address, Source::Pinned, call);
        managed_alloc(bytes) => call().inspect(|&ptr| this.added(ptr as Address, bytes, Source::Managed));
        managed_free(ptr) => this.free("managed_free", ptr as Address, Source::Managed, call);

        adopt(address, bytes) => {
            let address = call()?;
            let range = address..address + bytes as u64;
            let mut state = this.checker.state.lock();
            let count = state.adoptions.entry((this.index, address)).or_default();
            *count += 1;
            // A buffer of this process that comes back from other code is in the account already, and so is memory
            // whose last adoption is not over.
            let again = *count > 1 && state.heap.covers(&range);
            if !again && !matches!(state.heap.find(&range), Found::Live(_)) {
                state.mem_added(range.clone(), Source::Adopted(this.index));
            }
            state.heap.write(range);
            Ok(address)
        };
        disown(address) => {
            let left = this.checker.state.lock().disowned((this.index, address));
            if left > 0 { call() } else { this.free("disown", address, Source::Adopted(this.index), call) }
        };

        // A window has no memory, so only its mappings are recorded.
        vm_granularity();
        vm_reserve(bytes);
        vm_release(address, bytes);
        vm_map(address, bytes) => call().inspect(|()| this.added(address, bytes, Source::Mapped(this.index)));
        vm_unmap(address, bytes) => this.free("vm_unmap", address, Source::Mapped(this.index), call);
        vm_move(from, to, bytes) => {
            this.free("vm_move", from, Source::Mapped(this.index), call)?;
            this.added(to, bytes, Source::Mapped(this.index));
            Ok(())
        };

        #[cfg(target_os = "linux")]
        vm_export(address, bytes);
        #[cfg(target_os = "linux")]
        vm_import(address, bytes, memory) => {
            call()?;
            this.added(address, bytes, Source::Mapped(this.index));
            this.checker.state.lock().heap.write(address..address + bytes as u64);
            Ok(())
        };

        stream_create(priority) => {
            let stream = call()?;
            this.checker.state.lock().stream_created((this.index, stream.0));
            Ok(stream)
        };
        stream_adopt(stream) => {
            call()?;
            let (mut state, key) = (this.checker.state.lock(), (this.index, stream.0));
            if !state.streams.contains_key(&key) {
                state.stream_created(key);
            }
            Ok(())
        };
        stream_destroy(stream) => {
            let mut state = this.checker.state.lock();
            let destroyed = call();
            if is_gone(&destroyed) {
                state.stream_destroyed((this.index, stream.0));
            }
            destroyed
        };
        stream_query(stream) => {
            let (mut state, by) = this.checker.enter();
            let idle = call()?;
            let found = state.streams.get(&(this.index, stream.0)).filter(|_| idle);
            if let Some(clock) = found.map(|stream| stream.clock.clone()) {
                state.learn(by, &clock);
            }
            Ok(idle)
        };
        stream_wait_idle(stream, limit) => {
            // The wait covers only operations that were submitted before it.
            let key = (this.index, stream.0);
            let clock = this.checker.state.lock().streams.get(&key).map(|stream| stream.clock.clone());
            let idle = call();
            if let Some(clock) = clock.filter(|_| is_over(&idle)) {
                let (mut state, by) = this.checker.enter();
                state.learn(by, &clock);
            }
            idle
        };
        stream_wait_event(stream, event) => {
            let (mut state, by) = this.checker.enter();
            let key = (this.index, stream.0);
            let record = state.awaited(key, event.0, Call::new("stream_wait_event", ""), Some(key)).map_err(refusal)?;
            call()?;
            if let (Some((_, record, _)), Some(stream)) = (record, state.hear(key, by)) {
                stream.clock.join(&record);
            }
            Ok(())
        };

        event_create(timing) => {
            let event = call()?;
            this.checker.state.lock().events.insert((this.index, event.0), Default::default());
            Ok(event)
        };
        event_destroy(event) => {
            let mut state = this.checker.state.lock();
            let destroyed = call();
            if is_gone(&destroyed) {
                state.events.remove(&(this.index, event.0));
            }
            destroyed
        };
        event_record(event, stream) => {
            let (mut state, by) = this.checker.enter();
            call()?;
            state.recorded(by, (this.index, event.0), (this.index, stream.0));
            Ok(())
        };
        event_query(event) => {
            let (mut state, by) = this.checker.enter();
            let done = call()?;
            let key = state.event_key(this.index, event.0).filter(|_| done);
            if let Some(record) = key.and_then(|key| state.events[&key].record.clone()) {
                state.learn(by, &record);
            }
            Ok(done)
        };
        event_wait(event, limit) => {
            let (key, what) = ((this.index, 0), Call::new("event_wait", ""));
            let awaited = this.checker.state.lock().awaited(key, event.0, what, None).map_err(refusal)?;
            let done = call();
            let Some((key, record, version)) = awaited.filter(|_| is_over(&done)) else { return done };
            let (mut state, by) = this.checker.enter();
            if state.events.get(&key).is_none_or(|event| event.version == version) {
                state.learn(by, &record);
            } else {
                // The event was recorded again meanwhile, so it is unknown which record the call has waited for.
                drop(state);
                this.event_query(event)?;
            }
            done
        };
        event_elapsed(start, end);

        copy_to_device(dst, src, bytes, stream) => {
            let what = const { Call::new("copy_to_device", "to the device") };
            this.submit(stream, what, &[write(dst, bytes), read(src as Address, bytes)], call)
        };
        copy_to_host(dst, src, bytes, stream) => {
            let what = const { Call::new("copy_to_host", "to the host") };
            this.submit(stream, what, &[write(dst as Address, bytes), read(src, bytes)], call)
        };
        copy_within(dst, src, bytes, stream) => {
            let what = const { Call::new("copy_within", "on the device") };
            this.submit(stream, what, &[write(dst, bytes), read(src, bytes)], call)
        };
        copy_peer(dst, dst_device, src, src_device, bytes, stream) => {
            let what = const { Call::new("copy_peer", "peer copy") };
            this.submit(stream, what, &[write(dst, bytes), read(src, bytes)], call)
        };
        fill_u8(dst, value, bytes, stream) => {
            this.submit(stream, const { Call::new("fill_u8", "fill") }, &[write(dst, bytes)], call)
        };
        fill_u32(dst, value, count, stream) => {
            let bytes = count.saturating_mul(4);
            this.submit(stream, const { Call::new("fill_u32", "fill") }, &[write(dst, bytes)], call)
        };

        can_access_peer(peer);
        enable_peer(peer);
        disable_peer(peer);

        module_load(image);
        module_unload(module);
        function(module, name);
        launch(launch, stream) => {
            let what = Call { name: "launch", what: "kernel", kernel: Some(launch.name) };
            let slice = |arg: &KernelArg| match *arg {
                KernelArg::Slice { address, bytes, write: true } => Some(write(address, bytes)),
                KernelArg::Slice { address, bytes, write: false } => Some(read(address, bytes)),
                // A value; there is no other argument.
                _ => None,
            };
            let operands: SmallVec<[Operand; 8]> = launch.args.iter().filter_map(slice).collect();
            this.submit(stream, what, &operands, call)
        };
            gemm(gemm, stream) => {
            let what = const { Call::new("gemm", "matrix product") };
            let [a, b, c] = gemm.spans();
            let old = c.pieces().filter(|_| gemm.beta != 0.0);
            let reads = a.pieces().chain(b.pieces()).chain(old).map(|(address, bytes)| read(address, bytes));
            let writes = c.pieces().map(|(address, bytes)| write(address, bytes));
            let operands: SmallVec<[Operand; 8]> = reads.chain(writes).collect();
            this.submit(stream, what, &operands, call)
        };

        capture_begin(stream) => {
            let mut state = this.checker.state.lock();
            call()?;
            state.captures.insert((this.index, stream.0), Vec::new());
            Ok(())
        };
        capture_end(stream) => {
            let noted = this.checker.state.lock().captures.remove(&(this.index, stream.0)).unwrap_or_default();
            let graph = call()?;
            this.checker.state.lock().graphs.insert((this.index, graph.0), noted.into());
            Ok(graph)
        };
        graph_launch(graph, stream) => {
            let (mut state, by) = this.checker.enter();
            let noted = state.graphs.get(&(this.index, graph.0)).cloned().unwrap_or_default();
            state.replay(by, (this.index, stream.0), &noted, call)
        };
        graph_destroy(graph) => {
            this.checker.state.lock().graphs.remove(&(this.index, graph.0));
            call()
        };

        write_value(address, value, stream) => {
            let what = const { Call::new("write_value", "raises a flag") };
            let (mut state, by) = this.checker.enter();
            state.raise(by, (this.index, stream.0), what, (address, value), call)
        };
        wait_value(address, value, stream) => {
            let what = const { Call::new("wait_value", "waits for a flag") };
            let (mut state, by) = this.checker.enter();
            let key = (this.index, stream.0);
            state.submit(by, key, what, &[Operand::flag(address)], call)?;
            state.waits_for_flag(key, address, value);
            Ok(())
        };
        poll_value(address) => {
            let (mut state, by) = this.checker.enter();
            // The word is read under the lock, so the write of this value is already in the account.
            let value = call();
            if let Some(clock) = state.flags.seen(address, value) {
                state.learn(by, &clock);
            }
            value
        };
    }

    /// The function is forwarded without the lock: if the call is refused, the function's drop may call the driver.
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
}
