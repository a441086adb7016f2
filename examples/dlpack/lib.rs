//! A library that Python loads: tensors of numpy or torch go to a device and back by DLPack, without a copy.
//!
//! ```sh
//! cargo build --example dlpack --features dlpack
//! python3 examples/dlpack/demo.py target/debug/examples/libdlpack.so
//! ```
//!
//! `demo.py` makes capsules of the pointers; a real extension would leave that to `dlpark`'s feature `pyo3`. Software
//! GPUs take tensors of the CPU, GPUs take tensors of torch on CUDA.

use gpu_pool::{
    GpuPool, Result,
    dlpack::dlpark::{ffi::DLManagedTensorVersioned, versioned::Dlpack},
};
use std::{ptr, sync::Arc};

/// Runs `f`. An error is printed, and is `failed` for the caller.
fn told<T>(failed: T, f: impl FnOnce() -> Result<T>) -> T {
    f().unwrap_or_else(|error| {
        eprintln!("{error}");
        failed
    })
}

/// The numbers `0, 1, 4, 9, ..` as a tensor of `rows` rows of `columns`, made on device 0. Null after an error.
#[unsafe(no_mangle)]
pub extern "C" fn squares(rows: usize, columns: usize) -> *mut DLManagedTensorVersioned {
    told(ptr::null_mut(), || {
        let tensor = GpuPool::global()?.on_device(0).run(move |dev| {
            let numbers: Vec<f32> = (0..rows * columns).map(|i| (i * i) as f32).collect();
            dev.to_dlpack(dev.upload(&numbers)?, &[rows, columns])
        })?;
        Ok(tensor.into_raw())
    })
}

/// One row of such a tensor, read-only: a part of a buffer. Null after an error.
#[unsafe(no_mangle)]
pub extern "C" fn row(rows: usize, columns: usize, row: usize) -> *mut DLManagedTensorVersioned {
    told(ptr::null_mut(), || {
        let tensor = GpuPool::global()?.on_device(0).run(move |dev| {
            let numbers: Vec<f32> = (0..rows * columns).map(|i| (i * i) as f32).collect();
            dev.to_dlpack_part(&Arc::new(dev.upload(&numbers)?), row * columns..(row + 1) * columns, &[columns])
        })?;
        Ok(tensor.into_raw())
    })
}

/// Multiplies a tensor of `f32` on device 0, in place. False after an error. The tensor is released.
///
/// # Safety
/// A live tensor of which the caller gives up its reference, and which no other code uses until the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn scale(tensor: *mut DLManagedTensorVersioned, factor: f32) -> bool {
    // SAFETY: the caller's promise.
    let Ok(tensor) = (unsafe { Dlpack::from_raw(tensor) }) else { return false };
    told(false, || {
        GpuPool::global()?.on_device(0).run(move |dev| {
            // SAFETY: the caller's promise; `synchronize` ends the use.
            let mut x = unsafe { dev.from_dlpack::<f32>(tensor)? }.into_buffer()?;
            dev.scale(&mut x, factor)?;
            dev.synchronize()?;
            Ok(true)
        })
    })
}
