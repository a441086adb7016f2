//! The peer: the driver's stream-ordered allocator, with the default pool of each device.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute, CUresult};
use gpu_pool::Device;

use crate::sides::Source;

/// Its name in tables.
pub const NAME: &str = "cuMemAllocAsync";

/// The default pool of one device, and a stream to use it on. Calls are made on the device's thread, where the device's
/// context is current.
pub struct DriverPool {
    pool: sys::CUmemoryPool,
    stream: sys::CUstream,
    /// The device's context, for other threads.
    pub context: sys::CUcontext,
}

pub fn check(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

impl DriverPool {
    /// Empties the pool, makes it keep freed memory, and resets its counters.
    pub fn new(dev: &Device) -> Self {
        let cuda = dev.cuda().expect("a GPU");
        let (mut pool, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the pointers are to live values; the context is current, because of `cuda`.
        unsafe {
            check(sys::cuDeviceGetDefaultMemPool(&mut pool, cuda.context().cu_device()));
            check(sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
        }
        let this = DriverPool { pool, stream, context: cuda.context().cu_ctx() };
        // The threshold means: give back what is above it when somebody synchronises. So never.
        this.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
        this.trim();
        this.set(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0);
        this.set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0);
        this
    }

    /// Gives free memory back.
    fn trim(&self) {
        // SAFETY: the stream belongs to this value, and the pool to the device.
        unsafe {
            check(sys::cuStreamSynchronize(self.stream));
            check(sys::cuMemPoolTrimTo(self.pool, 0));
        }
    }

    fn set(&self, attribute: Attribute, mut value: u64) {
        // SAFETY: these attributes are 64 bits wide.
        check(unsafe { sys::cuMemPoolSetAttribute(self.pool, attribute, (&raw mut value).cast::<c_void>()) });
    }

    fn get(&self, attribute: Attribute) -> u64 {
        let mut value = 0u64;
        // SAFETY: these attributes are 64 bits wide.
        check(unsafe { sys::cuMemPoolGetAttribute(self.pool, attribute, (&raw mut value).cast::<c_void>()) });
        value
    }

    /// Maximum of the bytes that it has held.
    pub fn peak_reserved(&self) -> u64 {
        self.get(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
    }

    /// Maximum of the bytes in use, as the driver rounds them.
    pub fn peak_used(&self) -> u64 {
        self.get(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    }

    /// Memory for work on any stream, in that stream's order.
    pub fn take_on(stream: sys::CUstream, bytes: usize) -> Option<sys::CUdeviceptr> {
        let mut address = 0;
        // SAFETY: the pointer is to a live integer; the stream is live, and its context current.
        match unsafe { sys::cuMemAllocAsync(&mut address, bytes, stream) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => None,
            result => {
                check(result);
                Some(address)
            }
        }
    }

    pub fn give_on(stream: sys::CUstream, address: sys::CUdeviceptr) {
        // SAFETY: it came from `take_on`, and nobody uses it after the stream gets here.
        check(unsafe { sys::cuMemFreeAsync(address, stream) });
    }

    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }
}

impl Source for DriverPool {
    type Block = sys::CUdeviceptr;

    #[inline]
    fn take(&self, _: &Device, bytes: usize) -> Option<sys::CUdeviceptr> {
        Self::take_on(self.stream, bytes)
    }

    #[inline]
    fn give(&self, address: sys::CUdeviceptr) {
        Self::give_on(self.stream, address);
    }
}

impl Drop for DriverPool {
    fn drop(&mut self) {
        // SAFETY: the stream belongs to this value, and all its work is over.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream);
            let _ = sys::cuMemPoolTrimTo(self.pool, 0);
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}
