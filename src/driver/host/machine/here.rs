//! Brief operations on the thread that submits them.
//!
//! To wake a worker for a copy of some kilobytes takes several times as long as the copy. So an operation that is soon
//! over is performed within the call, if nothing is in front of it in its stream; it waits for operations that use its
//! memory, and occupies its engine.
//!
//! Invariant: only operations that cannot wait, and that call no code of the user's. Not where operations run one at a
//! time: there a worker chooses the order.

use super::{Machine, Owner, State};
use crate::driver::{
    DriverResult,
    host::{Job, Key, Next, Op, sched::Start, stream::State as StreamState},
};
use parking_lot::MutexGuard;
use std::{sync::Arc, thread};

/// Bytes of all operands of a brief operation, at most: what a core copies in the time that it takes to wake another.
const BRIEF: usize = 256 << 10;

impl Owner {
    /// [`push`](Self::push), or performs the operation. The lock may be released meanwhile.
    pub fn submit(&self, state: &mut MutexGuard<'_, State>, stream: Key, op: Op) -> DriverResult {
        let idle = || state.core.streams.get(stream).is_some_and(|stream| stream.state == StreamState::Idle);
        if state.core.stepped || !op.is_brief(BRIEF) || !idle() {
            return self.push(state, stream, op);
        }
        if state.crew.alive == 0 {
            self.hire(state)?;
        }
        state.threads.acts(thread::current().id());
        state.core.push_active(stream, op);
        self.machine().perform_here(state, stream);
        Ok(())
    }
}

impl Machine {
    fn perform_here(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, stream: Key) {
        let mut job = Job::default();
        let next = match state.core.start(stream, &mut job) {
            Start::Done => Next::Continue,
            Start::Left => Next::Left,
            Start::Run => self.perform(state, &mut job).0,
        };
        self.bury(state);
        if next != Next::Left {
            state.core.rest_or_requeue(stream);
        }
        if state.core.has_ready() || (state.core.awaits_values() && !state.crew.polling) {
            self.wake_worker(state);
        }
    }
}
