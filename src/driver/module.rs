//! A module: device code in the forms in which a driver can load it.

use super::ModuleImage;

/// Device code, loaded eagerly on every device when a pool is built with it
/// ([`Builder::module`](crate::Builder::module)). Each pool loads its own, so a module's variables are the pool's.
///
/// ```
/// # use gpu_pool::Module;
/// static MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");
/// ```
#[derive(Debug)]
pub struct Module {
    pub(crate) image: ModuleImage,
}

impl Module {
    /// PTX text, as from `nvcc -ptx`. The driver compiles it for the GPU at hand (and caches that).
    pub const fn ptx(ptx: &'static str) -> Self {
        Module { image: ModuleImage { ptx: Some(ptx), cubins: &[], source: None, shared: false } }
    }

    /// Adds compiled images: `(10 * major + minor, cubin)`. One that fits the GPU is preferred to the PTX.
    pub const fn with_cubins(self, cubins: &'static [(u32, &'static [u8])]) -> Self {
        Module { image: ModuleImage { cubins, ..self.image } }
    }

    /// One of the crate's own, which have no variables: all pools of a process may have it in common.
    pub(crate) const fn shared(self) -> Self {
        Module { image: ModuleImage { shared: true, ..self.image } }
    }

    /// CUDA C++ source, compiled by NVRTC when it is loaded. Kernels must be `extern "C"`.
    #[cfg(feature = "nvrtc")]
    pub const fn cuda(source: &'static str) -> Self {
        Module { image: ModuleImage { ptx: None, cubins: &[], source: Some(source), shared: false } }
    }
}
