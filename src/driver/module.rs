//! A module: device code in the forms in which a driver can load it.

use super::ModuleImage;

/// Device code. A pool that is built with it ([`Builder::module`](crate::Builder::module)) loads it on every device at
/// once. Each pool loads a copy of its own, so pools do not share a module's variables.
///
/// ```
/// # use gpu_pool::Module;
/// static MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");
/// ```
#[derive(Debug)]
pub struct Module {
    pub(crate) image: ModuleImage,
}

/// No type implements it.
#[cfg(not(feature = "nvrtc"))]
#[diagnostic::on_unimplemented(
    message = "`Module::cuda` needs the feature `nvrtc` of gpu-pool",
    label = "not in this build",
    note = "in Cargo.toml: `gpu-pool = {{ version = \"..\", features = [\"nvrtc\"] }}`"
)]
pub trait FeatureNvrtc {}

impl Module {
    /// PTX text, as from `nvcc -ptx`. The driver compiles it for the GPU, and caches the result.
    pub const fn ptx(ptx: &'static str) -> Self {
        Module { image: ModuleImage { ptx: Some(ptx), cubins: &[], source: None, shared: false } }
    }

    /// Adds compiled images: `(10 * major + minor, cubin)`. A pool prefers an image that fits the GPU to the PTX.
    pub const fn with_cubins(self, cubins: &'static [(u32, &'static [u8])]) -> Self {
        Module { image: ModuleImage { cubins, ..self.image } }
    }

    /// For the crate's own modules. They have no variables, so all pools of a process may share them.
    pub(crate) const fn shared(self) -> Self {
        Module { image: ModuleImage { shared: true, ..self.image } }
    }

    /// For the compiler's message alone: the condition never holds.
    #[cfg(not(feature = "nvrtc"))]
    #[doc(hidden)]
    pub const fn cuda(source: &'static str) -> Self
    where
        for<'never> str: FeatureNvrtc,
    {
        Module::ptx(source)
    }

    /// CUDA C++ source. NVRTC compiles it when it is loaded. Kernels must be `extern "C"`.
    #[cfg(feature = "nvrtc")]
    pub const fn cuda(source: &'static str) -> Self {
        Module { image: ModuleImage { ptx: None, cubins: &[], source: Some(source), shared: false } }
    }
}
