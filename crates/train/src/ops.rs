//! The operations that perceptrons, transformers and their optimizers need, beyond the runtime's basic ones: by family,
//! each a trait that adds methods to [`Device`](gpu_pool::Device). The [`prelude`](crate::prelude) has them all.
//!
//! All are asynchronous on the current stream and can be captured, unless they say that they wait. Errors of all:
//! [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for lengths, shapes and arguments that do not fit,
//! [`Error::WrongDevice`](gpu_pool::Error::WrongDevice), [`Error::Aborted`](gpu_pool::Error::Aborted),
//! [`Error::OutOfMemory`](gpu_pool::Error::OutOfMemory) where a buffer is returned, and the driver's.

mod activation;
mod embedding;
mod family;
mod number;
mod order;
mod pointwise;
mod random;
mod rows;
mod shape;
pub(crate) mod vocabulary;

pub use self::{
    activation::{Activation, Activations, BiasedActivation},
    embedding::{Embeddings, Index},
    number::{Number, Numbers},
    order::Orders,
    pointwise::Pointwise,
    random::Random,
    rows::{AllReduceNorm, Norms, Rows, Softmax},
    shape::Shapes,
};
pub use gpu_pool::extend::train::{NormSaved, RowNorm};
