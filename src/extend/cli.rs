//! The interface for `gpu-pool-cli`: the environment's variables, for `doctor`.

pub use crate::{builder::environment::unknown as unknown_variables, variables::os as variable};
