//! Pipelines: the executor against one device.

#[cfg(feature = "blas")]
mod bits;
#[cfg(feature = "blas")]
mod failures;
#[cfg(feature = "blas")]
mod model;
mod plain;
#[cfg(feature = "blas")]
mod pytorch;
mod time;

use gpu_pool::parallel::Schedule;

/// Each kind of schedule. Those of the last four have two stages on each rank.
fn schedules(ranks: usize, micros: usize) -> Vec<(&'static str, Schedule)> {
    vec![
        ("gpipe", Schedule::gpipe(ranks, micros).unwrap()),
        ("1f1b", Schedule::one_f_one_b(ranks, micros).unwrap()),
        ("zero bubble", Schedule::zero_bubble(ranks, 1, micros).unwrap()),
        ("interleaved", Schedule::interleaved(ranks, 2, micros).unwrap()),
        ("looped bfs", Schedule::looped_bfs(ranks, 2, micros).unwrap()),
        ("interleaved zero bubble", Schedule::zero_bubble(ranks, 2, micros).unwrap()),
        ("zero bubble v", Schedule::zero_bubble_v(ranks, micros).unwrap()),
    ]
}

/// Ranks and micro-batches of the tests.
#[cfg(feature = "blas")]
const SHAPES: [(usize, usize); 3] = [(2, 4), (4, 8), (3, 6)];
