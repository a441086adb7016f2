//! The operations on buffers: each against a plain loop in `f64` with a stated bound, steps back by finite differences,
//! in graphs, on parts of buffers, with wrong sizes; on software GPUs and on CUDA devices.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod derivatives;
mod embedding;
mod general;
mod long;
mod number;
mod places;
mod pointwise;
mod random;
#[path = "../../../../tests/ops/rig.rs"]
mod rig;
mod rows;
mod shape;
#[path = "../../../../tests/faults/told.rs"]
mod told;
