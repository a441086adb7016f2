//! Launches of the user's kernels.

use crate::{
    Device,
    driver::{KernelArg, Launch, LaunchDims},
    error::{Error, Result},
    kernel::{Args, Kernel, Signature},
};
use smallvec::SmallVec;

impl Device {
    /// Launches a kernel on the current stream. What its signature declares is ordered by the library.
    ///
    /// A tuple takes its parts by value. So a variable that is a `&mut` itself moves into it, and is gone:
    ///
    /// ```compile_fail,E0382
    /// # use gpu_pool::*;
    /// # static MODULE: Module = Module::ptx("");
    /// # kernel! { static STEP: "step" in MODULE, fn(y: &mut [f32], n: u64); }
    /// unsafe fn steps(dev: &Device, y: &mut DeviceBuffer<f32>) -> Result<()> {
    ///     let n = y.len() as u64;
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (y, n))? };
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (y, n)) } // use of moved value: `y`
    /// }
    /// ```
    ///
    /// Give `&mut *y`, which borrows it for the call:
    ///
    /// ```
    /// # use gpu_pool::*;
    /// # static MODULE: Module = Module::ptx("");
    /// # kernel! { static STEP: "step" in MODULE, fn(y: &mut [f32], n: u64); }
    /// unsafe fn steps(dev: &Device, y: &mut DeviceBuffer<f32>) -> Result<()> {
    ///     let n = y.len() as u64;
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (&mut *y, n))? };
    ///     unsafe { dev.launch(&STEP, LaunchDims::cover(n as usize), (&mut *y, n)) }
    /// }
    /// ```
    ///
    /// # Safety
    /// The device code (and its host kernel) fits the signature and, for these dimensions and arguments, touches nothing
    /// outside the given slices and writes through no `&[T]`.
    ///
    /// # Errors
    /// [`Error::KernelNotFound`] when the module was not given to the pool's builder, has no such function, or there is
    /// no host kernel on a software GPU; [`Error::WrongDevice`] for another device's buffer that did not come through
    /// [`peer()`](crate::DeviceBuffer::peer); [`Error::PeerDenied`] for a peer's memory that this device may not touch;
    /// [`Error::Aborted`]; the driver's.
    #[track_caller]
    pub unsafe fn launch<S: Signature, A: Args<S>>(&self, kernel: &Kernel<S>, dims: LaunchDims, args: A) -> Result<()> {
        let args = args.pack();
        let mut op = self.op_in_graph("launch")?;
        let function = self.worker.function(kernel.module, kernel.name)?;
        let mut raw: SmallVec<[KernelArg; 8]> = SmallVec::new();
        for packed in args {
            if let Some(touch) = &packed.touch {
                op.argument(touch)?;
                let peer = touch.block.device().unwrap_or(self.index());
                if !self.worker.shared.is_direct(self.index(), peer) {
                    return Err(Error::PeerDenied { device: self.index(), peer, op: "launch" });
                }
            }
            raw.push(packed.arg);
        }
        if kernel.host.is_none() && self.worker.is_software() {
            return Err(Error::KernelNotFound {
                device: self.index(),
                kernel: kernel.name.to_owned(),
                why: "it has no host kernel, which a software GPU needs".to_owned(),
            });
        }
        let launch = Launch { name: kernel.name, function, host: kernel.host, dims, args: &raw, early: false };
        // SAFETY: the arguments are live memory, ordered and noted by `op`; that they fit the kernel is the caller's
        // promise.
        op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
    }
}
