//! The floor `parallel`: hand-over, data parallel, pipelines, tensor parallel, tasks, checkpoints.

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "checkpoints")]
mod checkpoint;
mod data_parallel;
mod hand_over;
mod pipeline;
mod sharded;
mod tasks;
mod tensor;
