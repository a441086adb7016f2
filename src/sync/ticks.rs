//! A clock for records: the processor's counter where it is steady, else the system's clock, which takes twice as long.
//!
//! Invariant: [`Scale`] is exact at the moment when it was made, and at the first use of the clock. Between the two, a
//! time is off by less than a microsecond.

#![cfg_attr(loom, allow(clippy::disallowed_types, reason = "a clock orders nothing: models need not see it"))]

use once_cell::sync::Lazy;
use std::time::{Duration, Instant};

/// The first use of the clock.
static START: Lazy<(u64, Instant)> = Lazy::new(|| (count(), Instant::now()));

/// The time in units that only [`Scale`] knows. It costs some nanoseconds.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if *STEADY {
        return count();
    }
    START.1.elapsed().as_nanos() as u64
}

/// Whether the counter has one rate on all cores, also when they sleep ("invariant TSC"). The first stamp asks, so it
/// sets [`START`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
static STEADY: Lazy<bool> = Lazy::new(|| {
    use std::arch::x86_64::__cpuid;
    Lazy::force(&START);
    // Safe from Rust 1.94 on.
    #[allow(unused_unsafe)]
    // SAFETY: every processor of this architecture has the instruction.
    let has = |leaf| unsafe { __cpuid(leaf) };
    has(0x8000_0000).eax >= 0x8000_0007 && has(0x8000_0007).edx & 1 << 8 != 0
});

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn count() -> u64 {
    // SAFETY: every processor of this architecture has the instruction, which reads a counter.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn count() -> u64 {
    0
}

/// Turns ticks into time since the first use of the clock in this process.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    start: u64,
    nanos_per_tick: f64,
}

impl Scale {
    /// Measured between the first use of the clock and now.
    pub fn now() -> Self {
        let (start, at) = *START;
        let (now, elapsed) = (ticks(), at.elapsed());
        let past = now.saturating_sub(start);
        Scale { start, nanos_per_tick: elapsed.as_nanos() as f64 / past.max(1) as f64 }
    }

    /// Ticks that are nanoseconds already.
    pub fn nanos() -> Self {
        Scale { start: 0, nanos_per_tick: 1.0 }
    }

    /// The time since the first use of the clock.
    pub fn time(self, ticks: u64) -> Duration {
        Duration::from_nanos((ticks.saturating_sub(self.start) as f64 * self.nanos_per_tick) as u64)
    }
}
