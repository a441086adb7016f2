//! Training over several processes: checkpoints, norms, divided optimizers and pipelines.
#![cfg(target_os = "linux")]

#[macro_use]
#[path = "../../../../tests/support/mod.rs"]
mod support;

#[cfg(feature = "checkpoints")]
mod checkpoint;
#[path = "../../../cluster/tests/cluster/fleet.rs"]
#[allow(dead_code, reason = "some of it is for the tests of `gpu-pool-cluster`")]
mod fleet;
#[path = "../../../cluster/tests/cluster/gpus.rs"]
mod gpus;
mod norm;
#[cfg(feature = "blas")]
mod pipeline;
mod sharded;

/// The task of one process of a fleet.
fn run(builder: gpu_pool::Builder, what: &str, more: &[&str]) -> gpu_pool::Result<()> {
    match what {
        #[cfg(feature = "checkpoints")]
        "checkpoint" => checkpoint::child(builder, more[0], more[1]),
        "norm" => norm::child(builder, more[0]),
        "sharded" => sharded::child(builder, more[0]),
        #[cfg(feature = "blas")]
        what if what.contains("pipeline") => pipeline::child(builder, what, more),
        _ => panic!("no task is called {what}"),
    }
}
