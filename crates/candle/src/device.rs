//! candle's device for a device of the pool, and the token that candle's operations find.
//!
//! candle's operations have no argument for a token. [`enter`] lends it to them for a closure, on this thread only: no
//! `current device` is left behind.

use crate::{Error, Result};
use candle_core::Device as Candle;
use gpu_pool::Device;

scoped_tls::scoped_thread_local!(static TOKEN: Device);

/// candle's device for this device: its tensors live there. A software GPU's tensors are candle's CPU tensors.
///
/// There is one for each device, for as long as the program runs: the same call gives the same device, and tensors of
/// two calls work together. On a GPU it has the primary context, which gpu-pool has too, and a stream of its own, which
/// [`enter`] makes the token's stream. candle needs its CUDA kernels: build with the feature `cuda`.
///
/// # Errors
/// [`Error::Candle`] where candle cannot open the GPU, or was built without the feature `cuda`.
pub fn candle_device(dev: &Device) -> Result<Candle> {
    Ok(gpu::candle_device(dev)?.map_or(Candle::Cpu, Candle::Cuda))
}

/// Runs `f` with candle's device. In it the operations of this crate find the token, and on a GPU they are on candle's
/// stream, so that both are in order. Operations of `dev` itself stay on its own stream: on an adopted buffer they come
/// after candle's work, and need a wait before candle goes on ([`adopt`](crate::adopt)). The guide's page "With candle"
/// has programs. Errors: those of [`candle_device`] and of `f`.
pub fn enter<R>(dev: &Device, f: impl FnOnce(&Candle) -> Result<R>) -> Result<R> {
    match gpu::candle_device(dev)? {
        None => TOKEN.set(dev, || f(&Candle::Cpu)),
        Some(device) => {
            let stream = gpu::stream(dev, &device)?;
            TOKEN.set(&dev.on(&stream), || f(&Candle::Cuda(device)))
        }
    }
}

/// Calls `f` with the token that [`enter`] has lent to this thread.
pub(crate) fn with_token<R>(op: &'static str, f: impl FnOnce(&Device) -> Result<R>) -> Result<R> {
    if TOKEN.is_set() { TOKEN.with(f) } else { Err(Error::NoDevice { op, also: "" }) }
}

#[cfg(feature = "cuda")]
pub(crate) mod gpu {
    use crate::Result;
    use candle_core::{
        CudaDevice,
        cuda_backend::{
            WrapErr as _,
            cudarc::driver::{
                result::{device, mem_pool},
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            },
        },
    };
    use gpu_pool::{Device, Stream};
    use std::sync::{Arc, LazyLock, Mutex, PoisonError};

    /// By GPU and ordinal in the pool: devices that share a GPU have streams of their own. Each has a lock of its own,
    /// so that devices open at the same time: that takes a good part of a second.
    type Opened = Vec<((usize, usize), Arc<Mutex<Option<CudaDevice>>>)>;

    /// Never dropped: streams that a pool has adopted must outlive it.
    static OPENED: LazyLock<Mutex<Opened>> = LazyLock::new(Mutex::default);

    /// None on a software GPU.
    pub fn candle_device(dev: &Device) -> Result<Option<CudaDevice>> {
        if dev.info().compute_capability == (0, 0) {
            return Ok(None);
        }
        let key = (dev.info().ordinal, dev.index());
        let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            all.push((key, Arc::default()));
            all.len() - 1
        });
        let own = all[at].1.clone();
        drop(all);
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        if own.is_none() {
            // It waits for kernels, and so for kernels that wait for this device.
            *own = Some(dev.blocking(|| CudaDevice::new_with_stream(key.0))?);
            keep_freed_memory(key.0)?;
        }
        Ok(own.clone())
    }

    /// candle allocates from the driver's pool. By default that pool unmaps what is free at each synchronisation.
    fn keep_freed_memory(ordinal: usize) -> Result<()> {
        let (gpu, mut all) = (device::get(ordinal as i32).w()?, u64::MAX);
        // SAFETY: the driver has just named the GPU, and this attribute is a number of 64 bits.
        unsafe {
            let pool = device::get_default_mem_pool(gpu).w()?;
            Ok(mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut all).cast()).w()?)
        }
    }

    pub fn stream(dev: &Device, device: &CudaDevice) -> Result<Stream> {
        // SAFETY: the stream belongs to a device in `OPENED`, so it is never destroyed.
        Ok(unsafe { dev.adopt_stream(device.cuda_stream().cu_stream() as u64)? })
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) mod gpu {
    use crate::Result;
    use candle_core::CudaDevice;
    use gpu_pool::{Device, Stream};

    /// None on a software GPU.
    pub fn candle_device(dev: &Device) -> Result<Option<CudaDevice>> {
        // Another crate may have asked for gpu-pool's feature.
        match dev.info().compute_capability {
            (0, 0) => Ok(None),
            _ => Err(candle_core::Error::NotCompiledWithCudaSupport.into()),
        }
    }

    pub fn stream(dev: &Device, _: &CudaDevice) -> Result<Stream> {
        Ok(dev.stream()?)
    }
}
