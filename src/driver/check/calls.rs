//! What the calls of a checked driver have in common.

use super::checked::Checked;
use super::{
    Kind,
    heap::Source,
    judge::{Operand, refusal},
    note::Call,
    shadow::Manner,
};
use crate::driver::{Address, DriverResult, FaultKind, RawStream};

pub(super) fn read(address: Address, bytes: usize) -> Operand {
    Operand { address, bytes, manner: Manner::READ }
}

pub(super) fn write(address: Address, bytes: usize) -> Operand {
    Operand { address, bytes, manner: Manner::WRITE }
}

/// Whether what was to be given back is gone: it also is where the device is lost.
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
        let range = address..address.saturating_add(bytes as u64);
        self.checker.state.lock().mem_added(range, source);
    }

    /// Nothing runs on a lost device any more, and nothing can be waited for.
    pub(super) fn is_lost(&self) -> bool {
        self.inner.bind().is_err_and(|fault| fault.kind == FaultKind::DeviceLost)
    }

    /// Takes the memory out of the account first: whoever gets it next from the driver must not find it there.
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

/// Whether what was waited for has come to an end: also on a lost device, whose loss a wait reports only when what it
/// was running has ended.
pub(super) fn is_over(waited: &DriverResult<bool>) -> bool {
    match waited {
        Ok(done) => *done,
        Err(fault) => fault.kind == FaultKind::DeviceLost,
    }
}
