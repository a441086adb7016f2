//! Compiles CUDA C++ source with NVRTC: to a cubin for one compute capability, or to see whether it compiles.

use std::{
    ffi::{CString, c_char},
    ptr,
};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use super::{
    fault::{self, text},
    library,
};
use crate::driver::{self, DriverResult, FaultKind};

struct Program(nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram`, destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// The compiler's log becomes the detail of the fault.
pub(super) fn compile(source: &str, (major, minor): (u32, u32)) -> DriverResult<Vec<u8>> {
    fail_if!(!library::nvrtc_present(), fault::unsupported("libnvrtc was not found; it comes with the CUDA toolkit"));
    let program = compiled(source, &format!("sm_{major}{minor}"))?;
    let mut size = 0;
    // SAFETY: a compiled program; the pointer is to a live integer.
    check(unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }, String::new)?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: the buffer is as long as NVRTC said.
    check(unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }, String::new)?;
    Ok(cubin)
}

/// For the newest GPUs that NVRTC knows. `None` without NVRTC.
pub(in crate::driver) fn try_compile(source: &str) -> Option<DriverResult> {
    library::nvrtc_present().then(|| {
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        check(unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }, String::new)?;
        let mut known = vec![0; count as usize];
        // SAFETY: room for as many integers as NVRTC said.
        check(unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }, String::new)?;
        compiled(source, &format!("compute_{}", known.iter().max().unwrap_or(&75))).map(drop)
    })
}

fn compiled(source: &str, architecture: &str) -> DriverResult<Program> {
    let source = CString::new(source.trim_end_matches('\0')).map_err(|_| fault::invalid("a NUL within CUDA source"))?;
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()]
        .map(|o| CString::new(o).unwrap_or_default());
    let options: [*const c_char; 2] = [options[0].as_ptr(), options[1].as_ptr()];
    let mut program = Program(ptr::null_mut());
    let (name, none) = (c"module.cu".as_ptr(), ptr::null());
    // SAFETY: source and name end with NUL, and the source outlives the program; no headers.
    let status = unsafe { sys::nvrtcCreateProgram(&mut program.0, source.as_ptr(), name, 0, none, none) };
    check(status, String::new)?;
    // SAFETY: a live program; two NUL-terminated options.
    check(unsafe { sys::nvrtcCompileProgram(program.0, 2, options.as_ptr()) }, || log(&program))?;
    Ok(program)
}

fn log(program: &Program) -> String {
    let mut size = 0;
    // SAFETY: a live program; the pointer is to a live integer.
    if unsafe { sys::nvrtcGetProgramLogSize(program.0, &mut size) } != nvrtcResult::NVRTC_SUCCESS {
        return String::new();
    }
    let mut buffer = vec![0_u8; size];
    // SAFETY: the buffer is as long as NVRTC said.
    let _ = unsafe { sys::nvrtcGetProgramLog(program.0, buffer.as_mut_ptr().cast()) };
    text(&buffer)
}

fn check(status: nvrtcResult, detail: impl FnOnce() -> String) -> DriverResult {
    let kind = match status {
        nvrtcResult::NVRTC_SUCCESS => return Ok(()),
        nvrtcResult::NVRTC_ERROR_OUT_OF_MEMORY => FaultKind::OutOfMemory,
        nvrtcResult::NVRTC_ERROR_COMPILATION | nvrtcResult::NVRTC_ERROR_INVALID_INPUT => FaultKind::InvalidArgument,
        // NVRTC is older than the GPU.
        nvrtcResult::NVRTC_ERROR_INVALID_OPTION => FaultKind::Unsupported,
        _ => FaultKind::Other,
    };
    Err(driver::fault::fault(kind, status as u32 as i32, format!("{status:?}"), detail()))
}
