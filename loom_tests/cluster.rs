//! The loom models of `gpu-pool-cluster`: the threads of one process in a cluster. Its `lib.rs` includes this file, so
//! that the tested code can be private. `cargo loom world` runs them.

#[allow(dead_code, reason = "the runtime's models use the rest")]
mod support;
mod table;
mod world;

use crate::runtime::sync::{shim, site::flag};
