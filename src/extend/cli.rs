//! The interface for `gpu-pool-cli`: what `doctor` tells of the environment.

pub use crate::{builder::environment::unknown as unknown_variables, variables::os as variable};
