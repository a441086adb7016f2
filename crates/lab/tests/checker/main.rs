//! The checker on software GPUs, at the level of the driver: each mistake is caught, and its mended twin is silent.
//!
//! Knowledge of the pool's own hooks (blocks, host accesses) is tested beside them, in
//! `src/driver/check/pool_tests.rs`; the account as a whole against a graph search in `src/driver/check/model.rs`.

mod events;
mod flags;
mod hooks;
mod knowledge;
mod memory;
mod pytorch;
mod races;
mod reports;
mod rig;
mod silence;
mod waits;
