//! The basic operations on buffers: each against a plain loop in `f64` with a stated bound; on software GPUs and on
//! CUDA devices.

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "blas")]
mod batches;
mod cast;
#[cfg(feature = "blas")]
mod gemm;
#[allow(dead_code, unused_macros, reason = "the tests of `gpu-pool-train` use it, too")]
mod rig;
