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

use gpu_pool_train::PipelineSchedule;

/// Each kind of schedule. Those of the last four have two stages on each rank.
fn schedules(ranks: usize, micros: usize) -> Vec<(&'static str, PipelineSchedule)> {
    vec![
        ("gpipe", PipelineSchedule::gpipe(ranks, micros).unwrap()),
        ("1f1b", PipelineSchedule::one_f_one_b(ranks, micros).unwrap()),
        ("zero bubble", PipelineSchedule::zero_bubble(ranks, 1, micros).unwrap()),
        ("interleaved", PipelineSchedule::interleaved(ranks, 2, micros).unwrap()),
        ("looped bfs", PipelineSchedule::looped_bfs(ranks, 2, micros).unwrap()),
        ("interleaved zero bubble", PipelineSchedule::zero_bubble(ranks, 2, micros).unwrap()),
        ("zero bubble v", PipelineSchedule::zero_bubble_v(ranks, micros).unwrap()),
    ]
}

/// Ranks and micro-batches of the tests.
#[cfg(feature = "blas")]
const SHAPES: [(usize, usize); 3] = [(2, 4), (4, 8), (3, 6)];
