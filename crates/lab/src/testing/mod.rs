//! Tests of programs for several GPUs, without GPUs.
//!
//! A software GPU has asynchronous streams, events, copy engines and directed peer rights, and runs your kernels as
//! Rust functions. So mistakes of multi-GPU programs also happen on software GPUs, and `cargo test` can find them:
//!
//! * [`explore()`] and [`Explorer`] run a program in many orders, each drawn from a seed, and shorten a failing one to
//!   the few switches that matter. `GPU_POOL_SEED` runs one seed again.
//! * [`FaultPlan`] makes calls of a device fail: out of memory, a failed launch, a lost device, a slow or lying link, a
//!   stuck stream. `GPU_POOL_FAULTS` takes the same text.
//! * [`Builder::check`](crate::Builder::check) refuses unordered accesses, and finds writes out of bounds.
//!   `GPU_POOL_CHECK` does so for an unchanged program. [`Kind`](crate::driver::check::Kind) lists the reports.
//! * [`Topology`](crate::Topology) lets software GPUs run in virtual time, on models of machines.
//! * [`Builder::share_gpus`](crate::Builder::share_gpus) makes several devices of one GPU.
//! * If every device waits, [`Error::Deadlock`](crate::Error::Deadlock) is reported at once, not after the deadline.
//!
//! ```
//! use gpu_pool::{ReduceOp, testing::explore};
//!
//! explore(3, |pool| {                                // 3 seeds, 4 software GPUs
//!     let sums = pool.run(|dev, shard| {
//!         let mut x = dev.upload(&[shard.index() as f32])?;
//!         dev.all_reduce(&mut x, ReduceOp::Sum)?;
//!         dev.download(&x)
//!     })?;
//!     assert!(sums.iter().all(|sum| sum[0] == 6.0));
//!     Ok(())
//! });
//! ```
//!
//! The book's page "Testing without GPUs" (`docs/src/guide/testing.md`) shows all of it.

mod explore;
#[cfg(test)]
pub(crate) mod texts;

pub use crate::driver::faulty::plan::{BadFaultPlan, FaultOp, FaultPlan, FaultRule, Fired, Injected};
pub use explore::{Explored, Explorer, Failure, Why, explore};

use crate::{GpuPool, builder::signal_pad, error::Result};

/// Sets the meeting counters of the pool's devices, as if their kernels had met so many times: for tests of counters
/// that wrap around. False if the pool's devices do not meet in kernels. No scope of the pool may be running.
#[doc(hidden)]
pub fn count_meetings_from(pool: &GpuPool, epoch: u32) -> Result<bool> {
    let Some(signals) = pool.shared.signals.get() else { return Ok(false) };
    signal_pad::restart(signals, pool, epoch).map(|()| true)
}
