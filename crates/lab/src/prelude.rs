//! The laboratory's methods on types of `gpu-pool`: `use gpu_pool_lab::prelude::*;`

pub use super::{check::CheckedDriver, observer::LabBuilder};
