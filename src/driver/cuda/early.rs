//! Early launches (CUDA's *programmatic dependent launch*, [guide]): a kernel is put on the device while the previous
//! kernel of the stream ends, and waits there. This saves the microsecond between two kernels.
//!
//! The kernel itself waits, by an instruction of compute capability 9.0; without it, it would race with all earlier
//! work. [`Launch::early`](crate::driver::Launch::early) says that the source contains it. This module asks the driver
//! whether the loaded code does, too: the crate's PTX is for older GPUs and does not.
//!
//! [guide]: https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html

use std::{ffi::c_void, ptr};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute};

use super::library::{Attribute, Config, LaunchEx};
use super::{CudaGpu, module::function, stream::stream};
use crate::driver::{LaunchDims, RawFunction, RawStream};

/// The compute capability (10 * major + minor) from which on compiled code contains the waiting instruction.
const WAITS: i32 = 90;

/// CUDA 12.3, the first version in which a graph's edge can express an early launch
/// ([edge data](https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/cuda-graphs.html)).
const IN_GRAPHS: i32 = 12030;

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: 1 for an early launch.
const SERIALIZATION: u32 = 6;

/// The kernel's target decides: the JIT also turns PTX for 7.5 into code for 9.0.
fn waits(compute_capability: (u32, u32), compiled_for: i32) -> bool {
    compute_capability >= (9, 0) && compiled_for >= WAITS
}

fn possible(driver: i32, capturing: bool) -> bool {
    !capturing || driver >= IN_GRAPHS
}

impl CudaGpu {
    pub(super) fn note_waiting(&self, f: CUfunction) {
        let mut compiled_for = 0;
        let what = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: a kernel of this device, whose context is current; the pointer is to a live integer.
        let asked = self.check(unsafe { sys::cuFuncGetAttribute(&mut compiled_for, what, f) });
        let handle = f.expose_provenance() as u64;
        let mut waiting = self.waiting.lock();
        match asked.is_ok() && waits(self.info.compute_capability, compiled_for) {
            true => waiting.insert(handle),
            // An unloaded kernel may have had the same handle.
            false => waiting.remove(&handle),
        };
    }

    /// `None` if an early launch is not possible.
    pub(super) fn early(&self, f: RawFunction, s: RawStream) -> Option<LaunchEx> {
        let launch = self.optional.launch_ex?;
        let can = possible(self.optional.version, self.is_capturing(s)) && self.waiting.lock().contains(&f.0);
        can.then_some(launch)
    }
}

/// Returns the driver's code.
///
/// # Safety
/// As for `cuLaunchKernel`; and the kernel waits for the previous kernel before it touches memory.
pub(super) unsafe fn launch(
    launch: LaunchEx,
    f: RawFunction,
    dims: LaunchDims,
    s: RawStream,
    args: *mut *mut c_void,
) -> i32 {
    let mut early = Attribute { id: SERIALIZATION, pad: 0, value: [0; 16] };
    early.value[0] = 1;
    let (grid, block, shared_bytes) = (dims.grid.into(), dims.block.into(), dims.shared_bytes);
    let config = Config { grid, block, shared_bytes, stream: stream(s), attributes: &early, count: 1 };
    // SAFETY: the symbol's own type; the structures have the driver's layout and live across the call; the rest is the
    // caller's promise.
    unsafe { launch(&config, function(f), args, ptr::null_mut()) }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/early_tests.rs"]
mod tests;
