#![doc = include_str!("../README.md")]

mod kernels;
pub mod ops;

pub use ops::{Activation, BiasedActivation, Index, NormSaved, RowNorm};

/// What this crate adds to the methods of [`gpu_pool`]'s types: `use gpu_pool_train::prelude::*;`.
pub mod prelude {
    pub use crate::ops::{
        Activations as _, AllReduceNorm as _, Embeddings as _, Norms as _, Pointwise as _, Random as _, Rows as _,
        Shapes as _, Softmax as _,
    };
}
