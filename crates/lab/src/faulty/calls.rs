//! Helpers that the calls of a driver with faults (`device`) share.

use super::common::{Common, fault};
use super::plan::{FaultOp, FaultPlan, Injected, Release, Verdict};
use super::{device::Faulty, lie::Liar, stuck::Stuck};
use gpu_pool::extend::driver::{Address, Driver, DriverRef, DriverResult, FaultKind, KernelArg, Launch, RawStream};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

impl Faulty {
    pub fn new(inner: DriverRef, index: usize, plan: &FaultPlan, common: &Arc<Common>) -> Self {
        let stuck = Arc::new(Stuck::new(&inner));
        let release: Weak<dyn Release> = Arc::<Stuck>::downgrade(&stuck);
        plan.holds(release);
        let liar = Liar::new(&inner, index, plan);
        Faulty { inner, index, plan: plan.clone(), common: common.clone(), stuck, captures: Mutex::default(), liar }
    }

    /// Which may arrive damaged or not at all. `copy` submits a number of bytes. It is called also if nothing is to
    /// arrive: without peer access the copy must still fail.
    ///
    /// # Safety
    pub(super) unsafe fn deliver(
        &self,
        lie: Option<Injected>,
        (dst, bytes): (Address, usize),
        stream: RawStream,
        copy: impl FnOnce(usize) -> DriverResult,
    ) -> DriverResult {
        copy(if lie == Some(Injected::Drop) { 0 } else { bytes })?;
        match lie {
            // SAFETY: the caller's promise.
            Some(Injected::Corrupt) => unsafe { self.liar.damage(dst, bytes, stream) },
            _ => Ok(()),
        }
    }

    pub(super) fn alive(&self) -> DriverResult {
        self.common.alive(self.index)
    }

    /// Asks the plan about a call. `Err` if the call must fail; else the faults that it must show.
    pub(super) fn begin(&self, op: FaultOp, peers: &[usize]) -> DriverResult<Verdict> {
        self.alive()?;
        let verdict = self.plan.decide(self.index, op, peers);
        let mut fails = Ok(());
        for &(injected, _) in &verdict {
            let Some(fault) = fault(injected) else { continue };
            if injected.is_sticky() {
                self.common.lose(self.index, fault.clone());
            }
            // A sticky fault stays on the device, so the caller gets it rather than another fault.
            if fails.is_ok() || injected.is_sticky() {
                fails = Err((injected, fault));
            }
        }
        match fails {
            Ok(()) => Ok(verdict),
            Err((Injected::LaunchFailed, _)) if op == FaultOp::Launch => {
                Ok(std::iter::once((Injected::LaunchFailed, None)).collect())
            }
            Err((_, fault)) => Err(fault),
        }
    }

    pub(super) fn asks<R>(&self, op: FaultOp, call: impl FnOnce() -> DriverResult<R>) -> DriverResult<R> {
        self.begin(op, &[])?;
        call()
    }

    /// A call that frees or destroys something: it is made in any case.
    pub(super) fn give_back(&self, op: FaultOp, call: impl FnOnce() -> DriverResult) -> DriverResult {
        let begun = self.begin(op, &[]);
        let done = call();
        begun.and(done)
    }

    /// A call that waits. On a lost device it waits for the running work before it reports the loss.
    pub(super) fn waits(&self, op: FaultOp, call: impl FnOnce() -> DriverResult<bool>) -> DriverResult<bool> {
        match self.begin(op, &[]) {
            Err(fault) if fault.kind != FaultKind::DeviceLost => Err(fault),
            begun => {
                let done = call();
                begun.and_then(|_| self.alive()).and(done)
            }
        }
    }

    /// Asks the plan about an operation of a stream, and submits injected delays and blocks before it.
    pub(super) fn submit(
        &self,
        op: FaultOp,
        peers: &[usize],
        bytes: usize,
        stream: RawStream,
    ) -> DriverResult<Verdict> {
        let verdict = self.begin(op, peers)?;
        let mut pause = Duration::ZERO;
        if self.captures.lock().contains(&stream) {
            return Ok(verdict);
        }
        for (injected, _) in &verdict {
            match *injected {
                Injected::Stuck => self.stuck.hold(stream)?,
                Injected::Slow { per_copy, per_megabyte } => {
                    pause = pause.saturating_add(slowed(per_copy, per_megabyte, bytes));
                }
                _ => {}
            }
        }
        if !pause.is_zero() {
            self.inner.launch_host(stream, Box::new(move || thread::sleep(pause)))?;
        }
        Ok(verdict)
    }

    pub(super) fn sends(
        &self,
        op: FaultOp,
        bytes: usize,
        stream: RawStream,
        call: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        self.submit(op, &[], bytes, stream)?;
        call()
    }

    pub(super) fn peer(&self, op: FaultOp, peer: &dyn Driver) -> DriverResult<Verdict> {
        self.begin(op, self.common.index(peer).as_slice())
    }

    pub(super) fn peers(&self, launch: &Launch<'_>) -> SmallVec<[usize; 2]> {
        let mut peers = SmallVec::new();
        for arg in launch.args {
            if let KernelArg::Slice { address, bytes: 1.., .. } = *arg
                && let Some(owner) = self.common.owner(address)
                && owner != self.index
                && !peers.contains(&owner)
            {
                peers.push(owner);
            }
        }
        peers
    }
}

/// The delay of a copy. A sum that overflows becomes the longest time.
fn slowed(per_copy: Duration, per_megabyte: Duration, bytes: usize) -> Duration {
    let megabytes = bytes as f64 / f64::from(1 << 20);
    let moving = Duration::try_from_secs_f64(per_megabyte.as_secs_f64() * megabytes).unwrap_or(Duration::MAX);
    per_copy.saturating_add(moving)
}

#[cfg(test)]
#[path = "../../tests/unit/faulty/calls_tests.rs"]
mod tests;
