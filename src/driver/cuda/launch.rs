//! Launches of kernels and of host functions.

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

use cudarc::driver::sys::{self, CUfunction_attribute};

use super::{CudaGpu, early, fault, module::function, stream::stream};
use crate::{
    contain::{contain, discard, payload_text},
    driver::{DriverResult, KernelArg, Launch, RawFunction, RawStream},
};

/// Dynamic shared memory that needs no permission.
const FREE_SHARED: u32 = 48 * 1024;

/// Launches with up to this many arguments do not allocate.
const FEW: usize = 16;

fn pointer(arg: &KernelArg) -> *mut c_void {
    match arg {
        KernelArg::Slice { address, .. } => ptr::from_ref(address).cast_mut().cast(),
        KernelArg::Value(v) => v.as_bytes().as_ptr().cast_mut().cast(),
    }
}

impl CudaGpu {
    pub(super) unsafe fn launch(&self, launch: &Launch<'_>, s: RawStream) -> DriverResult {
        self.enter()?;
        let shared = launch.dims.shared_bytes;
        if shared > FREE_SHARED {
            self.allow_shared(launch.function, shared)?;
        }
        let mut few = [ptr::null_mut(); FEW];
        let mut many;
        let args = if launch.args.len() <= FEW {
            few.iter_mut().zip(launch.args).for_each(|(to, arg)| *to = pointer(arg));
            &mut few[..]
        } else {
            many = launch.args.iter().map(pointer).collect::<Vec<_>>();
            &mut many[..]
        };
        let args = args.as_mut_ptr();
        let early = if launch.early { self.early(launch.function, s) } else { None };
        let code = match early {
            // SAFETY: as below; and the kernel waits for the previous one: the caller promises it, and the loaded code
            // contains the instruction.
            Some(launch_ex) => unsafe { early::launch(launch_ex, launch.function, launch.dims, s, args) },
            None => {
                let ((gx, gy, gz), (bx, by, bz)) = (launch.dims.grid, launch.dims.block);
                let (f, s) = (function(launch.function), stream(s));
                // SAFETY: a kernel and a stream of this device, whose context is current. The caller promises that the
                // arguments and their memory fit the kernel. The driver copies the arguments before it returns.
                fault::code(unsafe { sys::cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, args, ptr::null_mut()) })
            }
        };
        self.check_code(code, || format!("kernel `{}`", launch.name))
    }

    /// One driver call per kernel and amount.
    fn allow_shared(&self, f: RawFunction, bytes: u32) -> DriverResult {
        let mut allowed = self.big_shared.lock();
        if allowed.get(&f.0).is_some_and(|&b| b >= bytes) {
            return Ok(());
        }
        let what = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = i32::try_from(bytes).map_err(|_| fault::invalid("more than 2 GiB of shared memory"))?;
        // SAFETY: a kernel of this device, whose context is current.
        let r = unsafe { sys::cuFuncSetAttribute(function(f), what, value) };
        self.check_code(fault::code(r), || format!("{bytes} bytes of dynamic shared memory"))?;
        allowed.insert(f.0, bytes);
        Ok(())
    }

    /// If the call fails, the function is dropped without a run. If the device is lost before its turn, the driver
    /// never calls it, and it leaks: CUDA does not report that in time.
    pub(super) fn launch_host(&self, s: RawStream, f: Box<dyn FnOnce() + Send>) -> DriverResult {
        self.enter()?;
        // A graph would call the function at every launch, but it can be called only once.
        self.check_no_capture(s)?;
        // A box of a box, because the driver takes a thin pointer.
        let data = Box::into_raw(Box::new(f));
        // SAFETY: a stream of this device; `trampoline` takes the box that `data` points to, once.
        let r = self.check(unsafe { sys::cuLaunchHostFunc(stream(s), Some(trampoline), data.cast()) });
        if r.is_err() {
            // SAFETY: the driver did not take it.
            let refused = unsafe { Box::from_raw(data) };
            // The drops of its captured values are user code.
            contain(|| drop(refused));
        }
        r
    }
}

/// Runs on a thread of the driver. Catches panics: they must not unwind into C.
unsafe extern "C" fn trampoline(data: *mut c_void) {
    // SAFETY: `launch_host` has made the box and passed it on; the driver calls this once.
    let f = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (*f)())) {
        let text = payload_text(&*payload).unwrap_or("(no message)");
        event!(error, "host_function_panicked", "a host function panicked in a CUDA stream: {text}");
        discard(payload);
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/launch_tests.rs"]
mod tests;
