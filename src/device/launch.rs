//! Launches of the user's kernels.

use crate::{
    Device,
    driver::{KernelArg, Launch, LaunchDims},
    error::{Error, Result},
    kernel::{Args, Kernel, Signature},
};
use smallvec::SmallVec;

impl Device {
    /// Launches a kernel on the current stream. The library orders the accesses that the kernel's signature declares.
    ///
    /// A tuple takes its parts by value. So a variable that is a `&mut` moves into the tuple, and a second launch with
    /// `y` is a "use of moved value". Pass `&mut *y`, which borrows the variable for the call:
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
    /// The device code and its host kernel fit the signature. For these dimensions and arguments they access only the
    /// given slices, and do not write through a `&[T]`.
    ///
    /// # Errors
    /// [`Error::KernelNotFound`] when the pool's builder did not get the module, when the module has no such function,
    /// or when a software GPU finds no host kernel; [`Error::WrongDevice`] for another device's buffer that was not
    /// passed as [`peer()`](crate::DeviceBuffer::peer); [`Error::PeerDenied`] for a peer's memory that this device may
    /// not access; [`Error::Aborted`]; the driver's.
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
                    return Err(Error::PeerDenied { device: self.index(), peer, op: op.name, site: op.site });
                }
            }
            raw.push(packed.arg);
        }
        if kernel.host.is_none() && self.worker.is_software() {
            let why = "it has no host kernel, which a software GPU needs".to_owned();
            let (device, kernel) = (self.index(), kernel.name.to_owned());
            return Err(Error::KernelNotFound { op: op.name, site: op.site, device, kernel, why });
        }
        let launch = Launch { name: kernel.name, function, host: kernel.host, dims, args: &raw, early: false };
        // SAFETY: the arguments are live memory that `op` orders and records. The caller promises they fit the kernel.
        op.submit(|driver, stream| unsafe { driver.launch(&launch, stream) })
    }
}
