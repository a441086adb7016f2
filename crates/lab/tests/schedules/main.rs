//! Software GPUs as simulators: deadlocks that are certain, one operation at a time, and virtual time.

#[path = "../../../../tests/support/mod.rs"]
mod support;

mod deadlock;
mod stepping;
mod virtual_time;
