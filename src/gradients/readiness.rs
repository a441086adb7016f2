//! Readiness: which gradients of a step are ready, and which buckets may start. Pure bookkeeping, without devices.
//! Invariant: buckets start in the order of their numbers, so members whose orders differ cannot mismatch.

use super::layout::Layout;
use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not written in this step yet.
    Idle,
    /// Written in an earlier step that exchanged nothing.
    Held,
    /// Written. Its bucket is being exchanged, or waits for others.
    Ready,
    /// Its bucket is complete for the stream that has waited for it.
    Over,
}

#[derive(Debug)]
pub(super) struct Readiness {
    states: Vec<State>,
    used: Vec<bool>,
    missing: Vec<usize>,
    next: usize,
    order: Vec<usize>,
    /// Whether a gradient was ready, or `nothing` was called, since the last step.
    begun: bool,
    closed: bool,
}

impl Readiness {
    pub fn new(layout: &Layout) -> Self {
        let count = layout.extents.len();
        let missing = layout.buckets.iter().map(|bucket| bucket.gradients.len()).collect();
        let order = Vec::with_capacity(count);
        let (states, used) = (vec![State::Idle; count], vec![false; count]);
        Readiness { states, used, missing, next: 0, order, begun: false, closed: false }
    }

    #[track_caller]
    pub fn check(&self, op: &'static str, gradient: usize) -> Result<State> {
        match self.states.get(gradient) {
            Some(state) => Ok(*state),
            None => Err(Error::invalid(op, format_args!("gradient {gradient} of {}", self.states.len()))),
        }
    }

    /// `Err` unless the caller may write the gradient.
    #[track_caller]
    pub fn check_open(&self, op: &'static str, gradient: usize) -> Result<()> {
        match self.check(op, gradient)? {
            State::Idle | State::Held => Ok(()),
            State::Ready => Err(under_way(op, gradient)),
            State::Over => Err(Error::invalid(op, format_args!("gradient {gradient}: `finish` ends the step first"))),
        }
    }

    pub fn check_there(&self, op: &'static str, gradient: usize) -> Result<()> {
        match self.check(op, gradient)? {
            State::Ready => Err(under_way(op, gradient)),
            _ => Ok(()),
        }
    }

    #[track_caller]
    pub fn ready(&mut self, op: &'static str, gradient: usize, layout: &Layout) -> Result<()> {
        match self.check(op, gradient)? {
            State::Idle | State::Held => {}
            State::Ready if self.closed => {
                let why = format_args!("gradient {gradient}: `finish_bucket` has said that nothing more gets ready");
                return Err(Error::invalid(op, why));
            }
            State::Ready => {
                return Err(Error::invalid(op, format_args!("gradient {gradient} was ready already")));
            }
            State::Over => {
                return Err(Error::invalid(op, format_args!("gradient {gradient} comes after its exchange")));
            }
        }
        self.states[gradient] = State::Ready;
        self.used[gradient] = true;
        self.missing[layout.extents[gradient].bucket] -= 1;
        self.order.push(gradient);
        self.begun = true;
        Ok(())
    }

    pub fn nothing(&mut self) {
        self.begun = true;
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    pub fn is_complete(&self, bucket: usize) -> bool {
        self.missing[bucket] == 0
    }

    pub fn has_ready(&self, bucket: usize, layout: &Layout) -> bool {
        self.missing[bucket] < layout.buckets[bucket].gradients.len()
    }

    /// The next bucket to start: if it is complete, or in any case.
    pub fn start_next(&mut self, in_any_case: bool) -> Option<usize> {
        let next = self.next;
        let may = next < self.missing.len() && (in_any_case || self.is_complete(next));
        may.then(|| {
            self.next += 1;
            next
        })
    }

    pub fn is_behind(&self, bucket: usize) -> bool {
        bucket > self.next
    }

    /// Closes the step: gradients that are not ready are exchanged like the rest.
    pub fn close(&mut self) {
        self.closed = true;
        self.states.iter_mut().filter(|state| **state != State::Over).for_each(|state| *state = State::Ready);
    }

    pub fn over(&mut self, bucket: usize, layout: &Layout) {
        layout.buckets[bucket].gradients.iter().for_each(|&gradient| self.states[gradient] = State::Over);
    }

    pub fn forget(&mut self, gradient: usize) {
        if self.states[gradient] == State::Held {
            self.states[gradient] = State::Idle;
            self.used[gradient] = false;
        }
    }

    pub fn is_used(&self, gradient: usize) -> bool {
        self.used[gradient]
    }

    pub fn used(&self) -> &[bool] {
        &self.used
    }

    /// The gradients in the order of their readiness in this step; the others follow in the order of `otherwise`.
    pub fn order(&self, otherwise: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut seen = vec![false; self.states.len()];
        self.order.iter().for_each(|&gradient| seen[gradient] = true);
        self.order.iter().copied().chain(otherwise.filter(|&gradient| !seen[gradient])).collect()
    }

    /// Ends the step. With `held` nothing was exchanged, and gradients keep their values.
    pub fn end(&mut self, held: bool, layout: &Layout) {
        for (state, used) in self.states.iter_mut().zip(&mut self.used) {
            *state = if held && *used { State::Held } else { State::Idle };
            *used = held && *used;
        }
        let full = layout.buckets.iter().map(|bucket| bucket.gradients.len());
        self.missing.clear();
        self.missing.extend(full);
        (self.next, self.begun, self.closed) = (0, false, false);
        self.order.clear();
    }
}

#[track_caller]
fn under_way(op: &'static str, gradient: usize) -> Error {
    Error::invalid(op, format_args!("gradient {gradient} is being exchanged; it is there again after `finish`"))
}

#[cfg(test)]
#[path = "../../tests/unit/gradients/readiness_tests.rs"]
mod tests;
