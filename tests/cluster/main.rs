//! Several processes of one host or of many: see `src/cluster`.
#![cfg(feature = "cluster")]

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

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
#[cfg(target_os = "linux")]
mod random;

/// The task of one process of a fleet.
#[cfg(target_os = "linux")]
fn run(builder: gpu_pool::Builder, what: &str, more: &[&str]) -> gpu_pool::Result<()> {
    match what {
        "value" => hand_over::child(builder),
        "gradients" => gradients::child(builder),
        "join" => meeting::child(builder, more[0]),
        "random" => random::child(builder, more),
        _ => failures::child(builder, what, more),
    }
}
