//! Graphs: their operations are recorded at capture and judged at each launch.

use super::{
    OpSite,
    judge::{Operand, refusal},
    note::Call,
    state::{HostId, Key, State},
};
use gpu_pool::extend::driver::{Address, DriverResult};
use smallvec::SmallVec;
use std::{mem, ops::Range};

pub(super) struct Noted {
    call: Call,
    place: Option<OpSite>,
    operands: SmallVec<[Operand; 3]>,
}

impl State {
    pub fn note_captured(&mut self, key: Key, call: Call, operands: &[Operand]) {
        if let Some(noted) = self.captures.get_mut(&key) {
            noted.push(Noted { call, place: OpSite::current(), operands: operands.into() });
        }
    }

    pub fn replay(
        &mut self,
        by: HostId,
        key: Key,
        graph: &[Noted],
        forward: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        if !self.streams.contains_key(&key) {
            return forward();
        }
        let judge =
            |state: &State, op: &Noted| OpSite::revisit(op.place, || state.judge(by, key, op.call, &op.operands));
        let mut judged = Ok(());
        for op in graph {
            judged = judge(self, op).map(drop);
            if judged.is_err() {
                break;
            }
            let written = op.operands.iter().filter(|operand| operand.manner.write);
            written.filter_map(Operand::range).for_each(|range| self.ahead.add(range));
        }
        mem::take(&mut self.ahead);
        judged.map_err(refusal)?;
        forward()?;
        for op in graph {
            // The account has not changed since the first judgement, except for the graph's earlier operations.
            if let Ok(plan) = judge(self, op) {
                self.enter(by, key, plan);
            }
        }
        Ok(())
    }

    /// The first bytes of a live buffer's range that neither earlier operations nor the graph so far have written.
    pub fn unwritten(&self, range: &Range<Address>) -> Option<Range<Address>> {
        let mut rest = range.clone();
        while let Some(gap) = self.heap.unwritten(&rest) {
            if let Some(bytes) = self.ahead.first_gap(&gap) {
                return Some(bytes);
            }
            rest.start = gap.end;
        }
        None
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check/replay_tests.rs"]
mod tests;
