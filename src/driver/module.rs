//! A module: device code in the forms in which a driver can load it.

use super::ModuleImage;
#[cfg(feature = "nvrtc")]
use crate::{Error, Result};
#[cfg(any(feature = "cuda", test))]
use lz4_flex::block;
#[cfg(any(feature = "cuda", test))]
use std::io::Read;

/// Device code. A pool that is built with it ([`Builder::module`](crate::Builder::module)) loads it on every device in
/// parallel. Each pool loads a copy of its own, so pools do not share a module's variables.
///
/// | from | by | compiled | feature |
/// |---|---|---|---|
/// | CUDA C++ | [`Module::cuda`] | by NVRTC, when the pool is built | `nvrtc` |
/// | PTX | [`Module::ptx`] | by `nvcc -ptx`; by the driver, when the pool is built | `cuda` (default) |
/// | PTX and machine code | [`Module::with_cubins`] | by `nvcc -ptx`, `nvcc -cubin` | `cuda` (default) |
///
/// ```
/// # use gpu_pool::Module;
/// static MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");
/// ```
///
/// Without the feature `cuda`, and on software GPUs, a pool does not look at modules.
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
    /// For the compiler's message alone: the condition never holds.
    #[cfg(not(feature = "nvrtc"))]
    #[doc(hidden)]
    pub const fn cuda(source: &'static str) -> Self
    where
        for<'never> str: FeatureNvrtc,
    {
        Module::ptx(source)
    }

    /// CUDA C++ source. NVRTC compiles it when it is loaded. Kernels must be `extern "C"`. It needs the feature
    /// `nvrtc`; [`ptx`](Self::ptx) does not.
    ///
    /// ```
    /// # use gpu_pool::Module;
    /// static MODULE: Module = Module::cuda(r#"extern "C" __global__ void one(float* x) { *x = 1.0f; }"#);
    /// ```
    #[cfg(feature = "nvrtc")]
    pub const fn cuda(source: &'static str) -> Self {
        Module { image: ModuleImage { ptx: None, cubins: &[], packed: false, source: Some(source), shared: false } }
    }

    /// PTX text, as from `nvcc -ptx`. The driver compiles it for the GPU, and caches the result.
    pub const fn ptx(ptx: &'static str) -> Self {
        Module {
            image: ModuleImage { ptx: Some(ptx.as_bytes()), cubins: &[], packed: false, source: None, shared: false },
        }
    }

    /// Compiles CUDA C++ by NVRTC for the newest GPUs that NVRTC knows, and forgets the result. It needs NVRTC and no
    /// GPU, so that `cargo test` finds mistakes in device code on any machine with a CUDA toolkit. False if nothing was
    /// compiled: NVRTC was not found, or the module has no source.
    ///
    /// ```
    /// # use gpu_pool::{Error, Module};
    /// static WRONG: Module = Module::cuda(r#"extern "C" __global__ void one(float* x) { *y = 1.0f; }"#);
    /// match WRONG.check() {
    ///     Ok(compiled) => assert!(!compiled), // no NVRTC here
    ///     Err(error) => assert!(error.to_string().contains("identifier \"y\" is undefined"), "{error}"),
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with NVRTC's log.
    #[cfg(feature = "nvrtc")]
    #[track_caller]
    pub fn check(&self) -> Result<bool> {
        match self.image.source.and_then(super::cuda::nvrtc::try_compile) {
            Some(Err(fault)) => Err(Error::invalid("check", fault)),
            compiled => Ok(compiled.is_some()),
        }
    }

    /// Adds compiled images: `(10 * major + minor, cubin)`. A pool prefers an image that fits the GPU to the PTX.
    pub const fn with_cubins(self, cubins: &'static [(u32, &'static [u8])]) -> Self {
        Module { image: ModuleImage { cubins, ..self.image } }
    }

    /// A module of this workspace's crates, as `kernels/build.py` packs them. It has no variables, so all pools of a
    /// process may share it. A device loads it at its first launch, unless every pool loads it.
    pub(crate) const fn own(ptx: &'static [u8], cubins: &'static [(u32, &'static [u8])]) -> Self {
        Module { image: ModuleImage { ptx: Some(ptx), cubins, packed: true, source: None, shared: true } }
    }
}

/// One form of a module, as the CUDA driver reads it: unpacked; with a NUL behind it, which ends PTX; aligned, since a
/// cubin is read in place as ELF.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn unpack(image: &[u8], packed: bool) -> Result<Vec<u64>, String> {
    let aligned = |bytes: usize| vec![0_u64; bytes / 8 + 1];
    if !packed {
        let mut words = aligned(image.len());
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..image.len()].copy_from_slice(image);
        return Ok(words);
    }
    fn damaged(e: impl std::fmt::Display) -> String {
        format!("packed device code is damaged: {e}")
    }
    // PTX, by Zstandard: half of LZ4's bytes in ten times its time, which is little beside the driver's compiler.
    if image.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let mut ptx = Vec::new();
        ruzstd::decoding::StreamingDecoder::new(image).map_err(damaged)?.read_to_end(&mut ptx).map_err(damaged)?;
        return unpack(&ptx, false);
    }
    let (size, block) = block::uncompressed_size(image).map_err(damaged)?;
    let mut words = aligned(size);
    block::decompress_into(block, &mut bytemuck::cast_slice_mut(&mut words)[..size]).map_err(damaged)?;
    Ok(words)
}

#[cfg(any(feature = "cuda", test))]
impl Module {
    pub(crate) fn ptx_text(&self) -> String {
        let ptx = unpack(self.image.ptx.unwrap(), self.image.packed).unwrap();
        String::from_utf8(bytemuck::cast_slice(&ptx).to_vec()).unwrap().trim_end_matches('\0').to_owned()
    }

    pub(crate) fn parameters(&self, entry: &str) -> Vec<usize> {
        let ptx = self.ptx_text();
        let (_, rest) = ptx.split_once(&format!(".entry {entry}(")).unwrap_or_else(|| panic!("no entry {entry}"));
        let (list, _) = rest.split_once(")\n").unwrap();
        let number = |text: &str| text.trim_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().unwrap();
        let size = |line: &str| match line.split_once('[') {
            Some((_, bytes)) => number(bytes),
            None => number(line.split_whitespace().nth(1).unwrap()) / 8,
        };
        list.lines().map(str::trim).filter(|line| !line.is_empty()).map(size).collect()
    }
}

#[cfg(test)]
#[path = "../../tests/unit/driver/module_tests.rs"]
mod tests;
