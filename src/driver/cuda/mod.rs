//! NVIDIA GPUs, through the CUDA driver API.
//!
//! cudarc's `sys` and `result` load the driver at run time. Every call makes one or two driver calls on the device's
//! *primary* context. The oldest supported driver is 535 (CUDA 12.2); later functions, looked up by name, are optional.
//!
//! `library` finds libcuda, `context` opens a device and has the checks of every call, `fault` has the error codes. The
//! calls are inherent methods in the other files, to which the `impl Driver` below forwards; an unsafe one demands what
//! the [`Driver`]'s does. `interop` gives cudarc's types.

mod context;
mod copy;
mod early;
mod fault;
mod foreign;
#[cfg(feature = "blas")]
mod gemm;
mod graph;
mod interop;
mod launch;
mod library;
mod memory;
mod module;
#[cfg(feature = "nvrtc")]
pub(super) mod nvrtc;
mod peer;
mod shared;
mod stream;
mod vmm;

pub use context::{CudaGpu, device_count};

use super::{layer::forward, *};
use crate::error::Error;

/// Opens the GPU with this ordinal of the driver. Errors: [`Error::NoDevice`], which says what is missing.
pub fn open(ordinal: usize) -> Result<DriverRef, Error> {
    Ok(Arc::new(CudaGpu::open(ordinal)?))
}

/// Makes a call that may wait for running kernels, or takes a driver lock which launches need, while no kernels wait
/// for each other (`sync::LaunchGate`). Without the gate, such calls have hung programs (nccl#744, torchcomms#2334).
fn gated<R>(call: impl FnOnce() -> R) -> R {
    let _blocking = gate::blocking();
    call()
}

impl Driver for CudaGpu {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn poll_value(&self, address: Address) -> u64 {
        // SAFETY: the caller's promise; devices write such words atomically, and so does the host.
        unsafe { crate::sync::load_word(std::ptr::with_exposed_provenance(address as usize)) }
    }

    // Each call but `copy_peer` forwards to the inherent method of the same name.
    forward! { |this, call| this;
        bind();
        memory_info();

        mem_alloc(bytes) => gated(call);
        mem_free(address) => gated(call);
        host_alloc(bytes) => gated(call);
        host_free(ptr) => gated(call);
        managed_alloc(bytes) => gated(call);
        managed_free(ptr) => gated(call);
        adopt(address, bytes) => gated(call);
        disown(address);

        vm_granularity();
        vm_reserve(bytes) => gated(call);
        vm_release(address, bytes) => gated(call);
        vm_map(address, bytes) => gated(call);
        vm_unmap(address, bytes) => gated(call);
        vm_move(from, to, bytes) => gated(call);
        #[cfg(target_os = "linux")]
        vm_export(address, bytes) => gated(call);
        #[cfg(target_os = "linux")]
        vm_import(address, bytes, memory) => gated(call);

        stream_create(priority) => gated(call);
        stream_adopt(stream);
        stream_destroy(stream) => gated(call);
        stream_query(stream);
        stream_wait_idle(stream, limit);
        stream_wait_event(stream, event);
        event_create(timing);
        event_destroy(event);
        event_record(event, stream);
        event_query(event);
        event_wait(event, limit);
        event_elapsed(start, end);

        copy_to_device(dst, src, bytes, stream);
        copy_to_host(dst, src, bytes, stream);
        copy_within(dst, src, bytes, stream);
        copy_peer(dst, dst_device, src, src_device, bytes, stream) => {
            // SAFETY: the caller's promise.
            unsafe { this.copy_between([(dst, dst_device), (src, src_device)], bytes, stream) }
        };
        fill_u8(dst, value, bytes, stream);
        fill_u32(dst, value, count, stream);

        can_access_peer(peer);
        enable_peer(peer) => gated(call);
        disable_peer(peer) => gated(call);

        module_load(image) => gated(call);
        module_unload(module) => gated(call);
        function(module, name);
        launch(launch, stream);
        launch_host(stream, f);
        #[cfg(feature = "blas")]
        gemm(gemm, stream);

        capture_begin(stream);
        capture_end(stream) => gated(call);
        graph_launch(graph, stream);
        graph_destroy(graph) => gated(call);

        write_value(address, value, stream);
        wait_value(address, value, stream);
    }
}
