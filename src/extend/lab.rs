//! The interface for `gpu-pool-lab`: observers such as the checker, fault plans, machines.

use crate::{
    Builder, GpuPool, Result,
    builder::{environment, signal_pad},
    driver::host::{MachineConfig, Trace},
    error::{self, Allocation, Operation, Report, Site},
    memory::calls::{self, Kind},
};
pub use crate::{
    contain::{discard, payload_text},
    driver::{
        host::timing::{Clock, Cost, HostCall, Machine, Side, Time},
        layer::forward,
        observe::{FailPoint, HappensBefore, Knowledge, Observer, Token, Watch, install},
    },
    error::{misuse::edge, op_site::annotate},
    panics::{SilencedPanics, silence_panics},
    sync::unique_id,
};
use std::time::{Duration, Instant};
use std::{fmt, ops::Range, panic::Location, sync::Arc};

internals! {
    trait BuilderInternals [] () for Builder {
        fn observer[](self: &Self) -> Option<Arc<dyn Observer>>;
        /// The pools of this builder have this observer.
        fn observed_by[](self: Self, observer: Arc<dyn Observer>) -> Self = {
            let mut builder = self;
            builder.observer = Some(observer);
            builder
        };
        fn machine_config[](self: &mut Self) -> &mut MachineConfig = &mut self.machine;
    }
}

pub fn report(
    kind: error::Kind,
    now: Operation,
    before: Option<Operation>,
    bytes: Range<usize>,
    allocation: Option<Allocation>,
    missing: String,
) -> Report {
    Report { kind, now, before, bytes, allocation, missing }
}

/// For benches: the time of so many calls in a flight recorder, with their submissions and ends, and nothing else.
#[track_caller]
pub fn time_recorder(calls: u64) -> Duration {
    let ((log, _), site) = (calls::new(None), Location::caller());
    let start = Instant::now();
    (0..calls).for_each(|number| log.begin(Kind::Call, "bench", site, 1).submitted(number, 64));
    start.elapsed()
}

pub fn write_steps(trace: &Trace, range: Range<usize>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    trace.write(range, f)
}

/// An environment variable, parsed. An empty value counts as unset. Errors name `site`.
pub fn variable<T, E: fmt::Display>(
    name: &'static str,
    site: Site,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>> {
    environment::variable_at(name, site, parse)
}

/// The seed in the environment.
#[track_caller]
pub fn seed() -> Result<Option<u64>> {
    environment::seed()
}

/// Sets the meeting counters of the pool's devices, as if their kernels had met so many times: for tests of counters
/// that wrap around. False if the pool's devices do not meet in kernels. No scope of the pool may be running.
pub fn count_meetings_from(pool: &GpuPool, epoch: u32) -> Result<bool> {
    let Some(signals) = pool.shared.signals.get() else { return Ok(false) };
    signal_pad::restart(signals, pool, epoch).map(|()| true)
}
