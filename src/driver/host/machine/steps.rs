//! The worker of a machine whose operations run one at a time.

use super::{LOOKS, Machine, PAUSE, POLL, Start, State, StreamState};
use crate::driver::host::{Job, Key};
use parking_lot::MutexGuard;
use std::{thread, time::Instant};

impl Machine {
    pub(super) fn run_steps(&self, state: &mut MutexGuard<'_, State>, job: &mut Job) {
        loop {
            if !state.core.can_go_on() {
                if state.crew.shutdown {
                    return;
                }
                self.rest_between(state, job);
            } else if self.may_step(state) {
                // The candidates are collected only now: more may have come while the program was running.
                let candidates = state.core.candidates();
                if candidates.is_empty() {
                    continue;
                }
                let State { core, stepper, threads, .. } = &mut **state;
                let Some(stepper) = stepper else { return };
                let key = stepper.choose(core, candidates);
                threads.stepped();
                if !self.take(state, key, job)
                    && let Some(stepper) = &mut state.stepper
                {
                    stepper.attempted();
                }
            }
        }
    }

    /// Before `false` is returned, this worker has slept for a moment.
    fn may_step(&self, state: &mut MutexGuard<'_, State>) -> bool {
        for look in 0..=LOOKS {
            let State { core, crew, threads, stepper, .. } = &mut **state;
            let Some(stepper) = stepper else { return true };
            if crew.shutdown || threads.is_quiet(core) {
                stepper.rests();
                return true;
            }
            if stepper.has_waited(core.submissions, || threads.someone_works()) {
                return true;
            }
            if look < LOOKS {
                let start = Instant::now();
                MutexGuard::unlocked(state, thread::yield_now);
                if start.elapsed() > PAUSE {
                    // Other threads want the core: a thread that sleeps gets it back sooner than one that yields.
                    break;
                }
            }
        }
        self.work.wait_for(state, PAUSE);
        false
    }

    /// Until something is submitted. If a stream waits for a word or a kernel spins, it also looks from time to time,
    /// since the host may have written a word.
    fn rest_between(&self, state: &mut MutexGuard<'_, State>, job: &mut Job) {
        if !state.core.has_work() {
            self.work.wait(state);
            return;
        }
        if self.work.wait_for(state, POLL).timed_out() && !state.core.can_go_on() {
            for key in state.core.spinners() {
                // Failed attempts are not recorded in the trace: their number depends on time.
                let Some(step) = state.core.forced_step(key) else { continue };
                if self.take(state, key, job)
                    && let Some(stepper) = &mut state.stepper
                {
                    stepper.was_forced(key, step);
                    return;
                }
            }
        }
    }

    /// False if the operation must be tried again.
    fn take(&self, state: &mut MutexGuard<'_, State>, key: Key, job: &mut Job) -> bool {
        state.core.set_state(key, StreamState::Active);
        let ended = match state.core.start(key, job) {
            Start::Done | Start::Left => true,
            Start::Run => self.perform(state, job).1,
        };
        if !ended {
            state.core.unbook();
        }
        state.core.settle(key);
        self.bury(state);
        ended
    }
}
