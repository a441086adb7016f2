//! The user's own driver calls, kept apart from collectives whose kernels wait for each other.

use crate::Device;

impl Device {
    /// Runs `f`, in which driver calls may be made that wait for running kernels: to allocate, free, map or register
    /// memory, to load modules, to instantiate graphs, to set up cuBLAS or cuDNN. Kernels of collectives wait for each
    /// other on the devices, and CUDA runs such calls under a lock that launches need, so the two could wait for each
    /// other for ever (nccl#744); here they take turns. The crate's own calls do so by themselves.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// pool.run(|dev, _| {
    ///     dev.blocking(|| { /* cudarc: ctx.load_module(..), CudaBlas::new(..) */ });
    ///     Ok(())
    /// })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// A collective within `f` is [`Error::InvalidArgument`] where its kernels would wait for each other.
    pub fn blocking<R>(&self, f: impl FnOnce() -> R) -> R {
        #[cfg(feature = "cuda")]
        let _guard = (!self.worker.is_software()).then(crate::driver::gate::blocking);
        let _blocked = self.worker.spinning.block();
        f()
    }
}
