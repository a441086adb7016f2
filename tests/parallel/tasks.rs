//! Tasks: order follows from what they read and write.
//!
//! Sources of the ported tests: MXNet's tests/cpp/engine/threaded_engine_test.cc, tests/python/unittest/
//! {test_exc_handling,test_model_parallel,test_multi_device_exec,test_kvstore}.py; D2L, chapter "Automatic
//! Parallelism", whose figure is a perceptron of two layers on a CPU and two GPUs.
#![cfg(feature = "tasks")]

mod failures;
mod order;
#[cfg(feature = "blas")]
mod perceptron;
mod threads;
