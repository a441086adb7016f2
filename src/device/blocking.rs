//! The user's own driver calls, kept apart from collectives whose kernels wait for each other.

use crate::Device;

/// Calls of other libraries that may block.
impl Device {
    /// Runs `f`, which may make driver calls that wait for running kernels: calls that allocate, free, map or register
    /// memory, load modules, instantiate graphs, or set up cuBLAS or cuDNN.
    ///
    /// CUDA makes such calls under a lock that launches need, too, and kernels of collectives wait for each other on
    /// the devices. So the call and the kernels could wait for each other for ever (nccl#744). Within `blocking` such
    /// calls and collectives take turns. The crate's own driver calls take turns without it.
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
    /// A collective within `f` is [`Error::InvalidArgument`](crate::Error::InvalidArgument) if its kernels would wait
    /// for each other.
    pub fn blocking<R>(&self, f: impl FnOnce() -> R) -> R {
        #[cfg(feature = "cuda")]
        let _guard = (!self.worker.is_software()).then(crate::driver::gate::blocking);
        let _blocked = self.worker.barrier_state.block();
        f()
    }
}
