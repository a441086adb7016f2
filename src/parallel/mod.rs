//! Ways to spread the training of one model over several devices.
//!
//! Users call this module. It may use every room below it, and no room below may use it. It holds
//! [`Schedule`], the order in which the devices of a pipeline work (plain data, which touches no device), and the
//! layers of tensor parallel: [`part_of`] says how they are cut.

mod schedule;
mod tensor;

pub use schedule::{Action, Blocked, Costs, MAX_ACTIONS, Peer, Schedule, ScheduleError, Span, Step, Timeline, Work};
#[cfg(feature = "blas")]
pub use tensor::{ColumnLinear, LinearPart, RowLinear};
pub use tensor::{
    Indices, NormSaved, SequenceNorm, VocabularyEmbedding, gather_rows, part_of, scatter_rows, vocabulary_cross_entropy,
};
