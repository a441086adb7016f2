//! Several processes of one host or of many: see `src/cluster`.
#![cfg(feature = "cluster")]

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

#[cfg(all(target_os = "linux", feature = "checkpoints"))]
mod checkpoint;
#[cfg(target_os = "linux")]
mod failures;
#[cfg(target_os = "linux")]
mod fleet;
#[cfg(target_os = "linux")]
mod gradients;
#[cfg(target_os = "linux")]
mod hand_over;
#[cfg(target_os = "linux")]
mod ipc;
#[cfg(target_os = "linux")]
mod meeting;
#[cfg(all(target_os = "linux", feature = "blas"))]
mod pipeline;
#[cfg(target_os = "linux")]
mod random;
