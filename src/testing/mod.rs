//! Tests of programs for several GPUs, without GPUs.
//!
//! A software GPU has asynchronous streams, events, copy engines and directed peer rights, and runs the Rust functions
//! of your kernels. So the mistakes of such programs happen on it, too, and can be found in `cargo test`:
//!
//! * [`explore`] and [`Explorer`] run a program in many orders, each drawn from a seed, and shorten a failing one to
//!   the few switches that matter. `GPU_POOL_SEED` runs one seed again.
//! * [`FaultPlan`] makes calls of a device fail: out of memory, a failed launch, a lost device, a slow or lying link, a
//!   stuck stream. `GPU_POOL_FAULTS` takes the same text.
//! * [`Builder::check`](crate::Builder::check) refuses accesses that nothing orders, and finds what was written out of
//!   bounds. `GPU_POOL_CHECK` does it for a program as it is. [`Kind`](crate::driver::check::Kind) lists what is
//!   reported.
//! * [`Topology`](crate::Topology) lets software GPUs run in virtual time, on machines that need not be there.
//! * [`Builder::share_gpus`](crate::Builder::share_gpus) makes several devices of one GPU.
//! * A state in which every device waits is [`Error::Deadlock`](crate::Error::Deadlock) at once, not after the
//!   deadline.
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

/// Every pair of the pool's devices goes on as if its kernels had met so many times. Whether they can: for tests of
/// counters that wrap around. No scope of the pool may be under way.
#[doc(hidden)]
pub fn count_meetings_from(pool: &GpuPool, epoch: u32) -> Result<bool> {
    let Some(signals) = pool.shared.signals.get() else { return Ok(false) };
    signal_pad::restart(signals, pool, epoch).map(|()| true)
}
