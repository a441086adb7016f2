//! Helpers that the calls of a checked driver (`checked`) share.

use super::judge::{Operand, refusal};
use super::{Kind, checked::Checked, heap::Source, note::Call, shadow::Manner};
use gpu_pool::extend::driver::{Address, DriverResult, FaultKind, RawStream};

pub(super) fn read(address: Address, bytes: usize) -> Operand {
    Operand { address, bytes, manner: Manner::READ }
}

pub(super) fn write(address: Address, bytes: usize) -> Operand {
    Operand { address, bytes, manner: Manner::WRITE }
}

/// Whether a free has released the memory. It has, also on a lost device.
pub(super) fn is_gone(result: &DriverResult) -> bool {
    result.as_ref().map_or_else(|fault| fault.kind == FaultKind::DeviceLost, |()| true)
}

impl Checked {
    pub(super) fn submit(
        &self,
        stream: RawStream,
        call: Call,
        operands: &[Operand],
        forward: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        let (mut state, by) = self.checker.enter();
        state.submit(by, (self.index, stream.0), call, operands, forward)
    }

    pub(super) fn added(&self, address: Address, bytes: usize, source: Source) {
        self.checker.state.lock().mem_added(address..address.saturating_add(bytes as u64), source);
    }

    /// Whether the device is lost: nothing runs on it any more, and no call can wait for it.
    pub(super) fn is_lost(&self) -> bool {
        self.inner.bind().is_err_and(|fault| fault.kind == FaultKind::DeviceLost)
    }

    /// Frees memory. It leaves the account first: another thread may get it, and must not find the old entry.
    pub(super) fn free(
        &self,
        call: &'static str,
        address: Address,
        source: Source,
        forward: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        let (mut state, by) = self.checker.enter();
        let removed = match state.free(by, Call::new(call, ""), address, source) {
            Err(report) if report.kind == Kind::FreeInUse && self.is_lost() => state.free_unasked(address, source),
            judged => judged.map_err(refusal)?,
        };
        drop(state);
        let freed = forward();
        if let Some(removed) = removed.filter(|_| !is_gone(&freed)) {
            self.checker.state.lock().mem_restored(removed);
        }
        freed
    }
}

/// Whether the awaited work has ended: also if the wait reports a lost device, or a mistake of work that has run.
pub(super) fn is_over(waited: &DriverResult<bool>) -> bool {
    match waited {
        Ok(done) => *done,
        Err(fault) => matches!(fault.kind, FaultKind::DeviceLost | FaultKind::Misuse),
    }
}
