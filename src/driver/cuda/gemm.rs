//! The matrix product, by cuBLAS.
//!
//! cuBLAS counts in columns: a row-major matrix is the transpose of the column-major one of the same bytes, and
//! `C^T = op(B)^T op(A)^T`. So the operands change places and nothing is moved.
//!
//! Work spaces are made once, with the handle, so that no later call allocates. A kernel of one stream must not share
//! one with a kernel of another stream: each stream takes its own while there are some, and when they are used up, it
//! waits for the last product of the stream that it takes one from. A graph gets one of its own: it runs whenever it is
//! launched.

use std::{ffi::c_int, ptr};

use cudarc::cublas::sys::{self, cublasHandle_t, cublasOperation_t, cublasStatus_t};

use super::{CudaGpu, fault, library, stream::stream};
use crate::driver::{Address, DriverResult, Fault, FaultKind, Gemm, RawEvent, RawStream, gate};

/// Streams that multiply without waiting for each other.
const SPACES: usize = 4;

/// A piece of device memory for cuBLAS, one stream's at a time.
struct Space {
    address: Address,
    /// After the last product that used it.
    done: RawEvent,
    owner: Option<RawStream>,
    /// When it was last used, in products.
    used: u64,
}

/// The handle and what belongs to it; behind the device's lock, since a handle is not for two threads at once.
pub(super) struct Blas {
    handle: cublasHandle_t,
    spaces: Vec<Space>,
    space_bytes: usize,
    /// The space and stream that the handle is set to.
    set: Option<(usize, RawStream)>,
    count: u64,
}

// SAFETY: a cuBLAS handle may move between threads as long as one at a time uses it, which the lock sees to.
unsafe impl Send for Blas {}

impl Blas {
    fn new(gpu: &CudaGpu) -> DriverResult<Self> {
        if !library::cublas_present() {
            return Err(fault::unsupported("libcublas was not found; it comes with the CUDA toolkit"));
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the context is current; the pointer is to a live handle.
        gpu.blas(unsafe { sys::cublasCreate_v2(&mut handle) })?;
        // What NVIDIA recommends for Hopper, and more than it does for what came before.
        let space_bytes = if gpu.info.compute_capability.0 >= 9 { 32 << 20 } else { 8 << 20 };
        let mut blas = Blas { handle, spaces: Vec::new(), space_bytes, set: None, count: 0 };
        match blas.fill(gpu) {
            Ok(()) => Ok(blas),
            Err(f) => {
                blas.destroy(gpu);
                Err(f)
            }
        }
    }

    fn fill(&mut self, gpu: &CudaGpu) -> DriverResult {
        // Full single precision: TF32 stays off.
        // SAFETY: a live handle.
        gpu.blas(unsafe { sys::cublasSetMathMode(self.handle, sys::cublasMath_t::CUBLAS_DEFAULT_MATH) })?;
        for _ in 0..SPACES {
            let done = gpu.event_create(false)?;
            let address = gpu.mem_alloc(self.space_bytes);
            // Kept at once, so that `destroy` finds the event also when the memory was not to be had.
            self.spaces.push(Space { address: *address.as_ref().unwrap_or(&0), done, owner: None, used: 0 });
            address?;
        }
        Ok(())
    }

    /// The space for a stream: its own, else the one that was idle longest, whose last product it then waits for.
    fn space(&mut self, gpu: &CudaGpu, s: RawStream) -> DriverResult<usize> {
        self.count += 1;
        let own = self.spaces.iter().position(|p| p.owner == Some(s));
        let oldest = || (0..self.spaces.len()).min_by_key(|&i| self.spaces[i].used).unwrap_or(0);
        let i = own.unwrap_or_else(oldest);
        let space = &mut self.spaces[i];
        if own.is_none() {
            gpu.stream_wait_event(s, space.done)?;
            space.owner = Some(s);
        }
        space.used = self.count;
        Ok(i)
    }

    /// Points the handle to the stream and its space.
    fn select(&mut self, gpu: &CudaGpu, s: RawStream) -> DriverResult<usize> {
        let i = self.space(gpu, s)?;
        if self.set != Some((i, s)) {
            self.set = None;
            // SAFETY: a live handle and a live stream of its device.
            gpu.blas(unsafe { sys::cublasSetStream_v2(self.handle, stream(s).cast()) })?;
            // `cublasSetStream` has taken the space away, so it is given again.
            let space = ptr::with_exposed_provenance_mut(self.spaces[i].address as usize);
            // SAFETY: memory of this device that lives as long as the handle.
            gpu.blas(unsafe { sys::cublasSetWorkspace_v2(self.handle, space, self.space_bytes) })?;
            self.set = Some((i, s));
        }
        Ok(i)
    }

    /// Points the handle to a stream that captures, and to the work space of its graph.
    fn select_captured(&mut self, gpu: &CudaGpu, s: RawStream) -> DriverResult {
        let address = gpu.graph_space(s, self.space_bytes)?;
        self.set = None;
        // SAFETY: a live handle and a live stream of its device.
        gpu.blas(unsafe { sys::cublasSetStream_v2(self.handle, stream(s).cast()) })?;
        let space = ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: memory of this device that lives as long as the graph.
        gpu.blas(unsafe { sys::cublasSetWorkspace_v2(self.handle, space, self.space_bytes) })
    }

    /// A stream is about to be destroyed, and a new one may get its handle.
    pub(super) fn forget(&mut self, s: RawStream) {
        self.spaces.iter_mut().filter(|p| p.owner == Some(s)).for_each(|p| p.owner = None);
        self.set = self.set.filter(|&(_, t)| t != s);
    }

    /// All goes; the context is current.
    pub(super) fn destroy(mut self, gpu: &CudaGpu) {
        // SAFETY: made by `cublasCreate`, destroyed once; waits for the device.
        let _ = unsafe { sys::cublasDestroy_v2(self.handle) };
        for space in self.spaces.drain(..) {
            // SAFETY: made in `fill`; the device has done what used them.
            let _ = unsafe { gpu.event_destroy(space.done) };
            if space.address != 0 {
                // SAFETY: as above.
                let _ = unsafe { gpu.mem_free(space.address) };
            }
        }
    }
}

impl CudaGpu {
    /// # Safety
    /// See [`Driver::gemm`](crate::driver::Driver::gemm).
    pub(super) unsafe fn gemm(&self, g: &Gemm, s: RawStream) -> DriverResult {
        self.enter()?;
        let (m, n, k) = (dim(g.m)?, dim(g.n)?, dim(g.k)?);
        let captures = self.is_capturing(s);
        let mut lock = self.blas.lock();
        let blas = match &mut *lock {
            Some(blas) => blas,
            None if captures => {
                return Err(fault::unsupported(
                    "the first matrix product loads cuBLAS, which a graph cannot hold: multiply once before",
                ));
            }
            none => {
                let _blocking = gate::blocking();
                none.insert(Blas::new(self)?)
            }
        };
        // The handle is there now, also after a product of nothing.
        if m == 0 || n == 0 || (k == 0 && g.beta == 1.0) {
            return Ok(());
        }
        if k == 0 && g.beta == 0.0 {
            // SAFETY: the caller's promise for C.
            return unsafe { self.fill_u32(g.c, 0, g.m * g.n, s) };
        }
        let op = |t| if t { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N };
        // The length of a row as it is stored.
        let (row_a, row_b) = (if g.transpose_a { m } else { k }, if g.transpose_b { k } else { n });
        let i = match captures {
            true => blas.select_captured(self, s).map(|()| None)?,
            false => Some(blas.select(self, s)?),
        };
        let at = |a: Address| ptr::with_exposed_provenance_mut::<f32>(a as usize);
        // SAFETY: the caller's promise: three live matrices of these sizes, which this device may touch; the factors
        // are on the host, where the default pointer mode looks, and are read before the call returns.
        let status = unsafe {
            sys::cublasSgemm_v2(
                blas.handle,
                op(g.transpose_b),
                op(g.transpose_a),
                n,
                m,
                k,
                &g.alpha,
                at(g.b),
                row_b.max(1),
                at(g.a),
                row_a.max(1),
                &g.beta,
                at(g.c),
                n,
            )
        };
        let submitted = self.blas(status);
        // Also after a failure: part of the product may be in flight.
        let recorded = i.map_or(Ok(()), |i| self.event_record(blas.spaces[i].done, s));
        submitted.and(recorded)
    }

    /// Turns cuBLAS's status into a result.
    fn blas(&self, status: cublasStatus_t) -> DriverResult {
        let kind = match status {
            cublasStatus_t::CUBLAS_STATUS_SUCCESS => return Ok(()),
            cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => FaultKind::OutOfMemory,
            cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE => FaultKind::InvalidArgument,
            cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH | cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => {
                FaultKind::Unsupported
            }
            _ => FaultKind::Other,
        };
        // cuBLAS does not say that the context is dead; the driver does.
        if kind == FaultKind::Other {
            self.memory_info()?;
        }
        Err(Fault {
            kind,
            code: status as u32 as i32,
            name: format!("{status:?}"),
            detail: String::new(),
            report: None,
        })
    }
}

fn dim(n: usize) -> DriverResult<c_int> {
    c_int::try_from(n).map_err(|_| fault::invalid("a matrix of more than 2^31 - 1 rows or columns"))
}
