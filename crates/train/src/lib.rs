#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod book;
#[cfg(feature = "checkpoints")]
mod checkpoint;
mod data_parallel;
mod optim;
mod pipeline;
mod schedule;
mod sharded;
mod tensor;

#[cfg(feature = "checkpoints")]
pub use checkpoint::Checkpoint;
pub use data_parallel::{DataParallel, Gradients, Model};
pub use optim::{LearningRate, Optimizer};
pub use pipeline::{At, Pipeline, Stage};
pub use schedule::{
    Action, Blocked, Costs, MAX_ACTIONS, Peer, PipelineSchedule, ScheduleError, Span, Step, Timeline, Work,
};
pub use sharded::{ShardedOptimizer, ShardedState};
#[cfg(feature = "blas")]
pub use tensor::{ColumnLinear, LinearPart, RowLinear};
pub use tensor::{
    Indices, NormSaved, SequenceNorm, VocabularyEmbedding, gather_rows, part_of, scatter_rows, vocabulary_cross_entropy,
};
