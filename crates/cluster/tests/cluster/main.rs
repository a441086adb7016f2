//! Several processes of one host or of many.
#![cfg(target_os = "linux")]

#[macro_use]
#[path = "../../../../tests/support/mod.rs"]
mod support;

mod environment;
mod failures;
mod fleet;
#[cfg(feature = "nccl")]
#[allow(dead_code, reason = "some of it is for the tests of `gpu-pool-train`")]
mod gpus;
mod gradients;
mod hand_over;
mod ipc;
mod meeting;
#[cfg(feature = "nccl")]
mod own_cuda;
mod places;
mod random;
mod scopes;
mod seen;
mod start;
#[path = "../../../../tests/faults/told.rs"]
mod told;

/// The task of one process of a fleet.
fn run(builder: gpu_pool::Builder, what: &str, more: &[&str]) -> gpu_pool::Result<()> {
    match what {
        "sum" => scopes::sum(builder),
        "names" => scopes::names(builder),
        "early" => scopes::early(builder),
        "value" => hand_over::child(builder),
        "gradients" => gradients::child(builder),
        "start" => start::child(builder, more),
        "join" => meeting::child(builder, more[0]),
        #[cfg(feature = "nccl")]
        "own" => own_cuda::child(builder, more[0]),
        "random" => random::child(builder, more),
        "trace" => seen::child(builder, more[0]),
        _ => failures::child(builder, what, more),
    }
}
