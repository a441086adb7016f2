//! The matrix product, by cuBLAS.
//!
//! cuBLAS is column-major. The bytes of a row-major matrix are its transpose in column-major order, and `C^T = op(B)^T
//! op(A)^T`. So the operands are swapped, and no data moves. Sums of half types are `f32` throughout, also where cuBLAS
//! splits `k`; TF32 is used for [`GemmType::Tf32`] alone.
//!
//! Workspaces are allocated once, with the handle. Kernels of different streams must not share one, so a stream without
//! a free workspace takes another stream's and waits for that stream's last product. Each graph has a workspace of its
//! own, since it can be launched at any time.

use std::{collections::HashSet, ffi::c_int, ptr};

use cudarc::cublas::sys::{
    self, cublasComputeType_t, cublasGemmAlgo_t, cublasHandle_t, cublasMath_t, cublasOperation_t, cublasStatus_t,
    cudaDataType,
};

use super::{CudaGpu, fault, library, stream::stream};
use crate::driver::{self, Address, DriverResult, FaultKind, Gemm, GemmMatrix, GemmType, RawEvent, RawStream, gate};

/// Number of streams that can multiply without waiting for each other.
const SPACES: usize = 4;

/// A cuBLAS workspace in device memory; one stream uses it at a time.
struct Space {
    address: Address,
    done: RawEvent,
    owner: Option<RawStream>,
    used: u64,
}

/// The cuBLAS handle with its workspaces. It is behind a lock, since only one thread at a time may use a handle.
pub(super) struct Blas {
    handle: cublasHandle_t,
    spaces: Vec<Space>,
    space_bytes: usize,
    /// The workspace and stream that are set in the handle.
    set: Option<(usize, RawStream)>,
    count: u64,
    /// The kinds of products whose kernels cuBLAS has loaded.
    loaded: HashSet<Kind>,
}

/// What cuBLAS may choose a kernel by: type, dimensions, which operands are transposed, whether factors are 0 or 1,
/// distances in a batch, and the alignment of the addresses.
type Kind = (GemmType, [c_int; 7], [bool; 5], [usize; 3], [u8; 3]);

/// More kinds than a program has; each is about 100 bytes.
const KINDS: usize = 4096;

// SAFETY: threads may use a cuBLAS handle one at a time, and the lock guarantees that.
unsafe impl Send for Blas {}

impl Blas {
    fn new(gpu: &CudaGpu) -> DriverResult<Self> {
        if !library::cublas_present() {
            let there = "the CUDA toolkit has it, and PyPI's nvidia-cublas-cu12 (its `lib` into LD_LIBRARY_PATH)";
            return Err(fault::unsupported(format!("libcublas was not found: {there}")));
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the context is current; the pointer is to a live handle.
        gpu.blas(unsafe { sys::cublasCreate_v2(&mut handle) })?;
        // NVIDIA recommends 32 MiB for Hopper; 8 MiB is more than it recommends for older GPUs.
        let space_bytes = if gpu.info.compute_capability.0 >= 9 { 32 << 20 } else { 8 << 20 };
        let mut blas = Blas { handle, spaces: Vec::new(), space_bytes, set: None, count: 0, loaded: HashSet::new() };
        match blas.fill(gpu) {
            Ok(()) => Ok(blas),
            Err(f) => {
                blas.destroy(gpu);
                Err(f)
            }
        }
    }

    fn fill(&mut self, gpu: &CudaGpu) -> DriverResult {
        // The default, which leaves TF32 to the type of a product, with sums that are never rounded to a half type.
        let math = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: a live handle.
        gpu.blas(unsafe { sys::cublasSetMathMode(self.handle, math) })?;
        for _ in 0..SPACES {
            let done = gpu.event_create(false)?;
            let address = gpu.mem_alloc(self.space_bytes);
            // Stored before the memory is checked, so that `destroy` finds the event also if the allocation has failed.
            self.spaces.push(Space { address: *address.as_ref().unwrap_or(&0), done, owner: None, used: 0 });
            address?;
        }
        Ok(())
    }

    /// The stream's own one, or else the least recently used one, after a wait for that one's last product.
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

    fn select(&mut self, gpu: &CudaGpu, s: RawStream) -> DriverResult<usize> {
        let i = self.space(gpu, s)?;
        if self.set != Some((i, s)) {
            self.set = None;
            // SAFETY: a live handle and a live stream of its device.
            gpu.blas(unsafe { sys::cublasSetStream_v2(self.handle, stream(s).cast()) })?;
            // `cublasSetStream` has reset the workspace, so it is set again.
            let space = ptr::with_exposed_provenance_mut(self.spaces[i].address as usize);
            // SAFETY: memory of this device that lives as long as the handle.
            gpu.blas(unsafe { sys::cublasSetWorkspace_v2(self.handle, space, self.space_bytes) })?;
            self.set = Some((i, s));
        }
        Ok(i)
    }

    fn select_captured(&mut self, gpu: &CudaGpu, s: RawStream) -> DriverResult {
        let address = gpu.graph_space(s, self.space_bytes)?;
        self.set = None;
        // SAFETY: a live handle and a live stream of its device.
        gpu.blas(unsafe { sys::cublasSetStream_v2(self.handle, stream(s).cast()) })?;
        let space = ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: memory of this device that lives as long as the graph.
        gpu.blas(unsafe { sys::cublasSetWorkspace_v2(self.handle, space, self.space_bytes) })
    }

    /// Forgets a stream that is about to be destroyed: a new stream may get the same handle.
    pub(super) fn forget(&mut self, s: RawStream) {
        self.spaces.iter_mut().filter(|p| p.owner == Some(s)).for_each(|p| p.owner = None);
        self.set = self.set.filter(|&(_, t)| t != s);
    }

    /// The context is current.
    pub(super) fn destroy(mut self, gpu: &CudaGpu) {
        // SAFETY: made by `cublasCreate`, destroyed once; waits for the device.
        let _ = unsafe { sys::cublasDestroy_v2(self.handle) };
        for space in self.spaces.drain(..) {
            // SAFETY: made in `fill`; the device has completed all work that used them.
            let _ = unsafe { gpu.event_destroy(space.done) };
            if space.address != 0 {
                // SAFETY: as above.
                let _ = unsafe { gpu.mem_free(space.address) };
            }
        }
    }
}

impl CudaGpu {
    pub(super) unsafe fn gemm(&self, g: &Gemm, s: RawStream) -> DriverResult {
        self.enter()?;
        let call = Call::new(g)?;
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
        // The handle is created first, so that it exists also after a product of size zero.
        if g.count == 0 || g.m == 0 || g.n == 0 || (g.k == 0 && g.beta == 1.0) {
            return Ok(());
        }
        if g.k == 0 && g.beta == 0.0 {
            let [.., c] = g.spans();
            // SAFETY: the caller's promise for C.
            return c.pieces().try_for_each(|(address, bytes)| unsafe { self.fill_u8(address, 0, bytes, s) });
        }
        let i = match captures {
            true => blas.select_captured(self, s).map(|()| None)?,
            false => Some(blas.select(self, s)?),
        };
        // The first product of a kind loads a kernel. With driver 580 that waited for all kernels of the GPU, and other
        // threads' launches there waited for it (openxla/xla#38932).
        let kind = call.kind(g);
        let loads = (!blas.loaded.contains(&kind)).then(gate::blocking);
        // SAFETY: the caller's promise: live matrices of these sizes that this device may access.
        let status = unsafe { call.submit(blas.handle, g) };
        let submitted = self.blas(status);
        if loads.is_some() && submitted.is_ok() {
            if blas.loaded.len() == KINDS {
                blas.loaded.clear();
            }
            blas.loaded.insert(kind);
        }
        // The event is recorded also after a failure: a part of the product may be in flight.
        let recorded = i.map_or(Ok(()), |i| self.event_record(blas.spaces[i].done, s));
        submitted.and(recorded)
    }

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
        // cuBLAS does not report a dead context; the driver does.
        if kind == FaultKind::Other {
            self.memory_info()?;
        }
        Err(driver::fault::fault(kind, status as u32 as i32, format!("{status:?}"), ""))
    }
}

struct Call {
    data: cudaDataType,
    compute: cublasComputeType_t,
    dims: [c_int; 7],
}

impl Call {
    fn new(g: &Gemm) -> DriverResult<Self> {
        use {cublasComputeType_t as compute, cudaDataType as data};
        let (data, compute) = match g.of {
            GemmType::F32 => (data::CUDA_R_32F, compute::CUBLAS_COMPUTE_32F),
            GemmType::Tf32 => (data::CUDA_R_32F, compute::CUBLAS_COMPUTE_32F_FAST_TF32),
            GemmType::F64 => (data::CUDA_R_64F, compute::CUBLAS_COMPUTE_64F),
            GemmType::F16 => (data::CUDA_R_16F, compute::CUBLAS_COMPUTE_32F),
            GemmType::Bf16 => (data::CUDA_R_16BF, compute::CUBLAS_COMPUTE_32F),
        };
        let mut dims = [0; 7];
        // A leading dimension of a single row may be anything; cuBLAS demands at least the length of the row.
        let (row_a, row_b) = (if g.a.transposed { g.m } else { g.k }, if g.b.transposed { g.k } else { g.n });
        let leads = [g.b.lead.max(row_b).max(1), g.a.lead.max(row_a).max(1), g.c.lead.max(g.n)];
        for (to, from) in dims.iter_mut().zip([g.n, g.m, g.k].into_iter().chain(leads).chain([g.count])) {
            *to = dim(from)?;
        }
        Ok(Call { data, compute, dims })
    }

    fn kind(&self, g: &Gemm) -> Kind {
        let alignment = |x: &GemmMatrix| x.address.trailing_zeros().min(8) as u8;
        let flags = [g.a.transposed, g.b.transposed, g.alpha == 0.0, g.beta == 0.0, g.beta == 1.0];
        (g.of, self.dims, flags, [g.a.stride, g.b.stride, g.c.stride], [&g.a, &g.b, &g.c].map(alignment))
    }

    /// # Safety
    /// The handle is live and set to a stream; the matrices of `g` are live, and the device may access them.
    unsafe fn submit(&self, handle: cublasHandle_t, g: &Gemm) -> cublasStatus_t {
        let op = |t| if t { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N };
        let at = |a: Address| ptr::with_exposed_provenance_mut(a as usize);
        let [n, m, k, lead_b, lead_a, lead_c, count] = self.dims;
        let (op_a, op_b, a, b, c) =
            (op(g.a.transposed), op(g.b.transposed), at(g.a.address), at(g.b.address), at(g.c.address));
        // The factors have the type of the sums.
        let (narrow, wide) = ([g.alpha as f32, g.beta as f32], [g.alpha, g.beta]);
        let [alpha, beta] = match g.of {
            GemmType::F64 => [ptr::from_ref(&wide[0]).cast(), ptr::from_ref(&wide[1]).cast()],
            _ => [ptr::from_ref(&narrow[0]).cast(), ptr::from_ref(&narrow[1]).cast()],
        };
        let (data, compute, algorithm) = (self.data, self.compute, cublasGemmAlgo_t::CUBLAS_GEMM_DFALT);
        // SAFETY: the caller's promise. The factors are on the host, as the default pointer mode demands, and are read
        // before the call returns.
        unsafe {
            if count == 1 {
                return sys::cublasGemmEx(
                    handle, op_b, op_a, n, m, k, alpha, b, data, lead_b, a, data, lead_a, beta, c, data, lead_c,
                    compute, algorithm,
                );
            }
            let [step_a, step_b, step_c] = [g.a.stride, g.b.stride, g.c.stride].map(|x| x as i64);
            sys::cublasGemmStridedBatchedEx(
                handle, op_b, op_a, n, m, k, alpha, b, data, lead_b, step_b, a, data, lead_a, step_a, beta, c, data,
                lead_c, step_c, count, compute, algorithm,
            )
        }
    }
}

fn dim(n: usize) -> DriverResult<c_int> {
    c_int::try_from(n)
        .map_err(|_| fault::invalid("a product with a number of rows, columns or matrices of more than 2^31 - 1"))
}
