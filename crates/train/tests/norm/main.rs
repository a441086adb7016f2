//! `all_reduce_norm`, with what the tests of collectives share.

#[path = "../../../../tests/collectives/cases.rs"]
#[allow(dead_code)]
mod cases;
#[path = "../../../../tests/collectives/numbers.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
mod numbers;
#[path = "../../../../tests/collectives/rig.rs"]
#[allow(dead_code)]
mod rig;
mod rows;
#[path = "../../../../tests/support/mod.rs"]
mod support;
