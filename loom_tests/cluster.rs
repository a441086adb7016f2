//! The loom models of `gpu-pool-cluster`: the threads of one process in a cluster. Its `lib.rs` includes this file, so
//! that the tested code can be private. `cargo loom world` runs them.

mod support;
mod table;
mod world;

use crate::runtime::sync::{shim, site::flag};
