//! Data parallel, pipelines, tensor parallel, checkpoints; and tasks with matrix products.

#[path = "../../../../tests/support/mod.rs"]
mod support;

#[path = "../../../../tests/attacks/bomb.rs"]
mod bomb;
#[cfg(feature = "checkpoints")]
mod checkpoint;
#[cfg(all(feature = "checkpoints", feature = "blas"))]
mod checkpoint_parts;
mod data_parallel;
mod local;
#[cfg(feature = "blas")]
mod perceptron;
mod pipeline;
#[cfg(feature = "blas")]
mod places;
mod sharded;
mod tensor;
#[cfg(feature = "blas")]
#[path = "../../../../tests/faults/told.rs"]
mod told;
mod user_code;
