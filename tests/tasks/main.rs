//! Tasks: order follows from what they read and write.
//!
//! Sources of the ported tests: MXNet's tests/cpp/engine/threaded_engine_test.cc, tests/python/unittest/
//! {test_exc_handling,test_model_parallel,test_multi_device_exec,test_kvstore}.py.
#![cfg(feature = "tasks")]

#[path = "../support/mod.rs"]
mod support;

mod failures;
mod order;
mod threads;
