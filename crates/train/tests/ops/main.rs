//! The operations on buffers: each against a plain loop in `f64` with a stated bound, steps back by finite differences,
//! in graphs, on parts of buffers, with wrong sizes; on software GPUs and on CUDA devices.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod cast;
mod derivatives;
mod embedding;
#[cfg(feature = "blas")]
mod gemm;
mod general;
mod long;
mod pointwise;
mod random;
mod rig;
mod rows;
mod shape;
