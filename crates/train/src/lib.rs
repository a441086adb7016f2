#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use(debug_as, display_as, fail_if, invalid_if, setters)]
extern crate gpu_pool;

#[cfg(doctest)]
#[path = "../tests/unit/book.rs"]
mod book;
#[cfg(feature = "checkpoints")]
mod checkpoint;
mod data_parallel;
mod kernels;
mod local;
pub mod ops;
mod optim;
mod pipeline;
mod schedule;
mod sharded;
mod tensor;
mod update;

#[cfg(feature = "checkpoints")]
pub use checkpoint::{Checkpoint, Cut};
pub use data_parallel::{DataParallel, Gradients, Model};
pub use local::{LocalOptimizer, ParameterGroup};
pub use ops::{Activation, BiasedActivation, Index, NormSaved, Number, RowNorm};
pub use optim::{LearningRate, Optimizer};
pub use pipeline::{Pipeline, Stage, StageContext};
pub use schedule::{
    Action, Costs, MAX_ACTIONS, Peer, PipelineSchedule, ScheduleError, Span, Step, StuckAction, Timeline, Work,
};
pub use sharded::{ShardedOptimizer, ShardedState};
#[cfg(feature = "blas")]
pub use tensor::{ColumnLinear, LinearPart, RowLinear};
pub use tensor::{
    Indices, SequenceNorm, VocabularyEmbedding, gather_rows, part_of, scatter_rows, vocabulary_cross_entropy,
};

pub use update::Parameter;

/// The runtime's items for this crate besides its public interface.
mod runtime {
    pub(crate) use gpu_pool::extend::{ErrorInternals, OpSite, train::*};
}

/// The frame of the examples in the documentation: a closure on one software GPU.
#[doc(hidden)]
#[macro_export]
macro_rules! example {
    ($closure:expr) => {{
        use $crate::{Activation, prelude::*};
        ::gpu_pool::extend::example($closure)
    }};
}

/// The methods that this crate adds to [`gpu_pool`]'s types: `use gpu_pool_train::prelude::*;`.
pub mod prelude {
    pub use crate::ops::{
        Activations as _, AllReduceNorm as _, Embeddings as _, Norms as _, Numbers as _, Orders as _, Pointwise as _,
        Random as _, Rows as _, Shapes as _, Softmax as _,
    };
}
