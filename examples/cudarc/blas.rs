//! Buffers of this crate go into a call of cudarc: its cuBLAS multiplies on the device's stream, between operations of
//! this crate, without a wait.
//!
//! ```sh
//! cargo run --release --example cudarc_blas
//! ```

use anyhow::{Result, ensure};
use gpu_pool::{
    Error, GpuPool, ReduceOp,
    cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys::cublasOperation_t::CUBLAS_OP_N},
};

/// Rows and columns.
const N: usize = 512;

fn main() -> Result<()> {
    let pool = match GpuPool::builder().cuda().build() {
        Err(Error::NoDevice { .. }) => {
            println!("skipped: no CUDA device");
            return Ok(());
        }
        pool => pool?,
    };
    let products = pool.run(|dev, shard| {
        let cuda = dev.cuda()?;
        // It allocates: a call that waits for running kernels takes turns with collectives.
        let blas = dev.blocking(|| CudaBlas::new(cuda.stream().clone())).map_err(Error::custom)?;
        let ones = dev.upload(&vec![1.0f32; N * N])?;
        let mut product = dev.zeros::<f32>(N * N)?;
        let n = N as i32;
        let config = GemmConfig {
            transa: CUBLAS_OP_N,
            transb: CUBLAS_OP_N,
            m: n,
            n,
            k: n,
            alpha: 1.0 + shard.index() as f32,
            lda: n,
            ldb: n,
            beta: 0.0,
            ldc: n,
        };
        let multiply = || -> gpu_pool::Result<()> {
            // SAFETY: three matrices of N x N.
            unsafe { blas.gemm(config, &cuda.read(&ones)?, &cuda.read(&ones)?, &mut cuda.write(&mut product)?) }
                .map_err(Error::custom)
        };
        // So does the first product, which loads a kernel.
        dev.blocking(multiply)?;
        dev.all_reduce(&mut product, ReduceOp::Sum)?; // behind the product
        dev.download(&product)
    })?;
    let devices = products.len();
    let expected = (N * devices * (devices + 1) / 2) as f32;
    ensure!(products.iter().flatten().all(|&x| x == expected), "a wrong product");
    println!("products by cudarc's cuBLAS on {devices} GPUs, summed by this crate: {expected}");
    Ok(pool.close()?)
}
