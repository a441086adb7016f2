//! Ways to spread the training of one model over several devices.
//!
//! Users call this module. It may use every room below it, and no room below may use it.
//!
//! * [`DataParallel`]: a replica of a model on each device, and one [`Optimizer`]. `Checkpoint` (feature
//!   `checkpoints`): its state in a file.
//! * [`ShardedOptimizer`]: the step of an optimizer whose state is divided among devices, without the model.
//! * [`Pipeline`]: a model in stages. [`Schedule`]: the order in which its devices work, plain data that touches no
//!   device.
//! * `ColumnLinear`, `RowLinear` (feature `blas`) and the functions beside them: layers whose weights lie on several
//!   devices.
//! * `Tasks` (feature `tasks`): work whose order follows from what it reads and writes.

#[cfg(feature = "checkpoints")]
mod checkpoint;
#[cfg(feature = "insight")]
mod chrome_trace;
mod data_parallel;
mod optim;
mod pipeline;
mod schedule;
mod sharded;
#[cfg(feature = "tasks")]
mod tasks;
mod tensor;

use crate::{
    error::{Error, Result},
    scope,
    thread::worker::Shared,
};
use std::sync::Arc;

/// The end of a call that is refused before its scope. Where there are other processes, they have begun theirs, and
/// would wait in it: so a scope fails here, too, which they hear of. It touches nothing.
#[track_caller]
fn refuse<R>(shared: &Arc<Shared>, error: Error) -> Result<R> {
    if shared.world.is_some() {
        let _ = scope::run(shared, "refuse", None, |_, _| Err::<(), _>(error.clone()), scope::as_it_is);
    }
    Err(error)
}

pub use crate::Hop;
#[cfg(feature = "checkpoints")]
pub use checkpoint::Checkpoint;
pub use data_parallel::{DataParallel, Gradients, Model};
pub use optim::{LearningRate, Optimizer};
pub use pipeline::{At, Pipeline, Stage};
pub use schedule::{Action, Blocked, Costs, MAX_ACTIONS, Peer, Schedule, ScheduleError, Span, Step, Timeline, Work};
pub use sharded::{ShardedOptimizer, ShardedState};
#[cfg(feature = "tasks")]
pub use tasks::{
    CpuTasks, GpuTasks, HostData, TaskArg, TaskArgs, TaskCell, TaskCells, TaskPanicked, TaskTrace, Tasks, Value,
};
#[cfg(feature = "blas")]
pub use tensor::{ColumnLinear, LinearPart, RowLinear};
pub use tensor::{
    Indices, NormSaved, SequenceNorm, VocabularyEmbedding, gather_rows, part_of, scatter_rows, vocabulary_cross_entropy,
};
