//! What `gpu-pool-train` needs: training: operations, optimizers, models over several devices.

pub use crate::{
    collective::algorithm::{
        norm::threads_of_row,
        norm_call::{NormSaved, RowNorm, check_eps, sum_and_norm},
    },
    kernel::{builtin::pairwise, real::Real},
    ops::{as_type, as_type_mut, fours_of_packs, lanes, rows_of, same_len, tiles},
};
use crate::{
    Args, Device, DeviceBuffer, DeviceCopy, Group, Kernel, LaunchDims, Module, Result, Signature,
    error::op_site::{OpGuard, OpSite},
};

/// Device code of a crate above, as `kernels/build.py` packs it: its PTX and its cubins. Nobody has to give it to a
/// pool's builder: a device loads it at its first launch.
pub const fn module(ptx: &'static [u8], cubins: &'static [(u32, &'static [u8])]) -> Module {
    Module::own(ptx, cubins)
}

/// [`LaunchDims::cover`] for kernels with a grid-stride loop, which take any number of elements.
pub fn stride(threads: usize) -> LaunchDims {
    LaunchDims::stride(threads)
}

/// What an operation on a [`Device`] does first: the base of the traits that give it operations.
pub trait Operations {
    /// The device.
    fn device(&self) -> &Device;

    /// Until the guard is dropped, errors and reports attribute this thread's work to the user's call of `op`.
    #[track_caller]
    fn enter(&self, op: &'static str) -> OpGuard {
        OpSite::here(op)
    }

    /// `len` elements with unspecified contents: old bytes of this process's earlier buffers, or of none.
    #[track_caller]
    fn allocate<T: DeviceCopy>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>>;

    /// As [`Device::launch`].
    ///
    /// # Safety
    /// As for [`Device::launch`].
    #[track_caller]
    unsafe fn launch<S: Signature, A: Args<S>>(&self, kernel: &Kernel<S>, dims: LaunchDims, args: A) -> Result<()>;

    /// The group of all devices of the scope.
    fn everyone(&self) -> Group<'_>;
}

impl Operations for Device {
    fn device(&self) -> &Device {
        self
    }

    #[track_caller]
    fn allocate<T: DeviceCopy>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        self.allocate(op, len)
    }

    #[track_caller]
    unsafe fn launch<S: Signature, A: Args<S>>(&self, kernel: &Kernel<S>, dims: LaunchDims, args: A) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.launch(kernel, dims, args) }
    }

    fn everyone(&self) -> Group<'_> {
        self.everyone()
    }
}
