//! D2L, "Automatic Parallelism": the perceptron of `examples/sources` equals a plain loop, on both backends and in many
//! interleavings.

use crate::{
    on_both,
    support::{cases, guarded},
};
use gpu_pool::{GpuPool, testing::Explorer};
use std::io::sink;

#[path = "../../../examples/sources/perceptron.rs"]
#[allow(dead_code, reason = "`main`")]
mod program;

/// Compares the loss of each step, so the updates of all but the last.
fn train(pool: &GpuPool) {
    program::run(pool, &mut sink(), 4).unwrap();
}

on_both! {
    2: fn it_equals_the_computation_by_hand(gpus) {
        train(&gpus.pool(2));
    }
}

#[test]
fn in_many_interleavings() {
    guarded(|| {
        let run = Explorer::new().devices(2).seeds(cases(5, 100)).run(|pool| {
            train(pool);
            Ok(())
        });
        run.unwrap_or_else(|failure| panic!("{failure}"));
    });
}
