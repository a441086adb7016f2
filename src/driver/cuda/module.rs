//! Modules: loads a cubin for the device, or else PTX (the driver compiles it), or else source (NVRTC compiles it).

use std::{
    ffi::{CString, c_void},
    ptr,
};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUjit_option, CUmodule};

use super::{CudaGpu, fault};
use crate::driver::{DriverResult, ModuleImage, RawFunction, RawModule, module::unpack};

fn module(m: RawModule) -> CUmodule {
    ptr::with_exposed_provenance_mut(m.0 as usize)
}

pub(super) fn function(f: RawFunction) -> CUfunction {
    ptr::with_exposed_provenance_mut(f.0 as usize)
}

impl CudaGpu {
    pub(super) fn module_load(&self, image: &ModuleImage) -> DriverResult<RawModule> {
        self.enter()?;
        if image.shared { self.shared.load(image, || self.load(image)) } else { self.load(image) }
    }

    fn load(&self, image: &ModuleImage) -> DriverResult<RawModule> {
        let m = self.load_best(image)?;
        let loaded = self.load_kernels(m);
        if let Err(f) = loaded {
            // SAFETY: no other code uses the module.
            let _ = unsafe { sys::cuModuleUnload(m) };
            return Err(f);
        }
        Ok(RawModule(m.expose_provenance() as u64))
    }

    fn load_best(&self, image: &ModuleImage) -> DriverResult<CUmodule> {
        let cc = self.info.compute_capability;
        let mut failed = None;
        if let Some(cubin) = best_cubin(image.cubins, cc) {
            match self.load_image(cubin, image.packed) {
                // A cubin of the right major version may still not run on this GPU (for example sm_90a). PTX may work.
                Err(f) if matches!(f.code, 200 | 209) => failed = Some(f),
                other => return other,
            }
        }
        if let Some(ptx) = image.ptx {
            // The driver would read the text only up to there.
            let end = ptx.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
            fail_if!(!image.packed && ptx[..end].contains(&0), fault::invalid("a NUL within PTX text"));
            return self.load_image(ptx, image.packed);
        }
        #[cfg(feature = "nvrtc")]
        if let Some(source) = image.source {
            return self.load_image(&super::nvrtc::compile(source, cc)?, false);
        }
        Err(failed.unwrap_or_else(|| {
            let source = if image.source.is_some() { " (there is source: feature `nvrtc` is off)" } else { "" };
            fault::fault(209, format!("no cubin for sm_{}{} and no PTX{source}", cc.0, cc.1))
        }))
    }

    /// The JIT's error log becomes the fault's detail.
    fn load_image(&self, image: &[u8], packed: bool) -> DriverResult<CUmodule> {
        let aligned = unpack(image, packed).map_err(fault::invalid)?;
        let mut log = vec![0_u8; 8192];
        let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The value of the second option is a number, passed as a pointer.
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
        let mut m = ptr::null_mut();
        // SAFETY: the context is current; image, log and options live across the call. The image contains its length
        // (an ELF header, or the NUL that `unpack` leaves at the end).
        let r = unsafe {
            sys::cuModuleLoadDataEx(&mut m, aligned.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
        };
        self.check_code(fault::code(r), || fault::text(&log))?;
        Ok(m)
    }

    /// Makes every kernel resident: with lazy loading, the default, a first launch would load the kernel and could wait
    /// for a spinning one. Before CUDA 12.4 kernels cannot be enumerated; then [`CudaGpu::function`] loads them.
    fn load_kernels(&self, m: CUmodule) -> DriverResult {
        let o = self.optional;
        let (Some(count), Some(enumerate), Some(load)) = (o.module_function_count, o.module_enumerate, o.func_load)
        else {
            return Ok(());
        };
        let mut n = 0;
        // SAFETY: the symbol's own type; the pointer is to a live integer.
        self.check_code(unsafe { count(&mut n, m) }, String::new)?;
        let mut functions = vec![ptr::null_mut(); n as usize];
        if n > 0 {
            // SAFETY: the symbol's own type; room for `n` handles.
            self.check_code(unsafe { enumerate(functions.as_mut_ptr(), n, m) }, String::new)?;
        }
        for f in functions.into_iter().filter(|f| !f.is_null()) {
            // SAFETY: the symbol's own type; a kernel of this module.
            self.check_code(unsafe { load(f) }, String::new)?;
        }
        Ok(())
    }

    pub(super) unsafe fn module_unload(&self, m: RawModule) -> DriverResult {
        // A later kernel may get the handle of a kernel of this module.
        self.big_shared.lock().clear();
        self.enter()?;
        self.shared.unload(m, || {
            // SAFETY: the caller's promise: a module of this device with no kernel in flight and no other user.
            self.check(unsafe { sys::cuModuleUnload(module(m)) })
        })
    }

    pub(super) fn function(&self, m: RawModule, name: &str) -> DriverResult<RawFunction> {
        self.enter()?;
        let c_name = CString::new(name).map_err(|_| fault::invalid("a NUL in a kernel's name"))?;
        let mut f = ptr::null_mut();
        // SAFETY: a live module of this device; the name ends with NUL; the pointer is to a live handle.
        let r = unsafe { sys::cuModuleGetFunction(&mut f, module(m), c_name.as_ptr()) };
        self.check_code(fault::code(r), || format!("kernel `{name}`"))?;
        let mut registers = 0;
        let what = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // This query loads the kernel in every loading mode.
        // SAFETY: the kernel just found; the pointer is to a live integer.
        self.check(unsafe { sys::cuFuncGetAttribute(&mut registers, what, f) })?;
        self.note_waiting(f);
        Ok(RawFunction(f.expose_provenance() as u64))
    }
}

/// The newest of the device's major version that its minor version can run.
fn best_cubin(cubins: &[(u32, &'static [u8])], (major, minor): (u32, u32)) -> Option<&'static [u8]> {
    let runs = cubins.iter().filter(|(cc, _)| cc / 10 == major && cc % 10 <= minor);
    runs.max_by_key(|(cc, _)| *cc).map(|(_, image)| *image)
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/cuda/module_tests.rs"]
mod tests;
