#![doc = include_str!("../../docs/testing.md")]

mod explore;
#[cfg(test)]
pub(crate) mod texts;

pub use crate::driver::faulty::plan::{BadFaultPlan, FaultOp, FaultPlan, FaultRule, Fired, Injected};
pub use explore::{Explored, Explorer, Failure, Why, explore};

use crate::{GpuPool, error::Result};

/// Every pair of the pool's devices goes on as if its kernels had met so many times. Whether they can: for tests of counters that
/// wrap around. No scope of the pool may be under way.
#[doc(hidden)]
pub fn count_meetings_from(pool: &GpuPool, epoch: u32) -> Result<bool> {
    let Some(signals) = pool.shared.signals.get() else { return Ok(false) };
    signals.restart(pool, epoch).map(|()| true)
}
