//! How far a step is: which gradients are there, and which buckets may be started.
//!
//! Nothing here knows of devices. All members start buckets in the order of their numbers, whatever the order in which
//! gradients become ready, so members that differ in that cannot mismatch.

use super::layout::Layout;
use crate::error::{Error, Result};

/// What a gradient is within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing yet, in this step.
    Idle,
    /// Written in a step whose exchange was left out.
    Held,
    /// Written; its bucket is under way, or waits for others.
    Ready,
    /// Its bucket is over, for the stream that has asked for it.
    Over,
}

/// The readiness of a step.
#[derive(Debug)]
pub(super) struct Readiness {
    states: Vec<State>,
    /// Whether this member has added to a gradient since the last exchange.
    used: Vec<bool>,
    /// Gradients that a bucket still waits for.
    missing: Vec<usize>,
    /// The first bucket that was not started.
    next: usize,
    /// In which order they were ready.
    order: Vec<usize>,
    /// Whether anything was said since the last step.
    begun: bool,
    /// Nothing more gets ready.
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

    /// `Err` unless there is such a gradient.
    #[track_caller]
    pub fn check(&self, op: &'static str, gradient: usize) -> Result<State> {
        match self.states.get(gradient) {
            Some(state) => Ok(*state),
            None => Err(Error::invalid(op, format_args!("gradient {gradient} of {}", self.states.len()))),
        }
    }

    /// `Err` unless its memory is the caller's to write.
    #[track_caller]
    pub fn check_open(&self, op: &'static str, gradient: usize) -> Result<()> {
        match self.check(op, gradient)? {
            State::Idle | State::Held => Ok(()),
            State::Ready => Err(under_way(op, gradient)),
            State::Over => Err(Error::invalid(op, format_args!("gradient {gradient}: `finish` ends the step first"))),
        }
    }

    /// `Err` while its exchange is under way.
    #[track_caller]
    pub fn check_there(&self, op: &'static str, gradient: usize) -> Result<()> {
        match self.check(op, gradient)? {
            State::Ready => Err(under_way(op, gradient)),
            _ => Ok(()),
        }
    }

    /// A gradient is there.
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

    /// This member has nothing for this step.
    pub fn nothing(&mut self) {
        self.begun = true;
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Whether a bucket has all it waits for.
    pub fn is_complete(&self, bucket: usize) -> bool {
        self.missing[bucket] == 0
    }

    /// The next bucket to start, if it is complete, or in any case.
    pub fn start_next(&mut self, in_any_case: bool) -> Option<usize> {
        let next = self.next;
        let may = next < self.missing.len() && (in_any_case || self.is_complete(next));
        may.then(|| {
            self.next += 1;
            next
        })
    }

    /// Whether `bucket` must wait for an earlier one.
    pub fn is_behind(&self, bucket: usize) -> bool {
        bucket > self.next
    }

    /// What is not ready never will be, in this step: it is under way like the rest.
    pub fn close(&mut self) {
        self.closed = true;
        self.states.iter_mut().filter(|state| **state != State::Over).for_each(|state| *state = State::Ready);
    }

    pub fn over(&mut self, bucket: usize, layout: &Layout) {
        layout.buckets[bucket].gradients.iter().for_each(|&gradient| self.states[gradient] = State::Over);
    }

    /// What it holds has gone elsewhere.
    pub fn forget(&mut self, gradient: usize) {
        if self.states[gradient] == State::Held {
            self.states[gradient] = State::Idle;
            self.used[gradient] = false;
        }
    }

    /// Whether this member has added to it since the last exchange.
    pub fn is_used(&self, gradient: usize) -> bool {
        self.used[gradient]
    }

    pub fn used(&self) -> &[bool] {
        &self.used
    }

    /// In which order gradients were ready in this step; what was not, in the order of `otherwise`.
    pub fn order(&self, otherwise: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut seen = vec![false; self.states.len()];
        self.order.iter().for_each(|&gradient| seen[gradient] = true);
        self.order.iter().copied().chain(otherwise.filter(|&gradient| !seen[gradient])).collect()
    }

    /// The step is over; with `held`, nothing was exchanged and what was written stays.
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
mod tests {
    use super::{super::layout::Unit, *};
    use proptest::prelude::*;

    fn layout(count: usize, bytes: usize) -> Layout {
        let order: Vec<usize> = (0..count).rev().collect();
        Layout::new(Unit::of::<f32>(), &vec![4; count], &order, (bytes, bytes)).unwrap()
    }

    proptest! {
        /// Any order of readiness starts all buckets, in the order of their numbers, each when it and all before it are
        /// complete.
        #[test]
        fn buckets_start_in_order(order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle(), unused in 0..12usize) {
            let layout = layout(12, 32);
            let mut readiness = Readiness::new(&layout);
            let mut started = Vec::new();
            for &gradient in &order[unused..] {
                readiness.ready("ready", gradient, &layout).unwrap();
                prop_assert!(readiness.ready("ready", gradient, &layout).is_err());
                while let Some(bucket) = readiness.start_next(false) {
                    prop_assert!(layout.buckets[..=bucket].iter().flat_map(|b| &b.gradients).all(|&g| readiness.is_used(g)));
                    started.push(bucket);
                }
            }
            prop_assert!(unused > 0 || started.len() == layout.buckets.len());
            readiness.close();
            while let Some(bucket) = readiness.start_next(true) {
                started.push(bucket);
            }
            prop_assert_eq!(started, (0..layout.buckets.len()).collect::<Vec<_>>());
            let recorded = readiness.order((0..12).rev());
            prop_assert_eq!(&recorded[..12 - unused], &order[unused..]);
            readiness.end(false, &layout);
            prop_assert!(!readiness.has_begun() && readiness.used().iter().all(|used| !used));
        }
    }

    #[test]
    fn what_is_held_counts_in_the_next_step() {
        let layout = layout(3, 16);
        let mut readiness = Readiness::new(&layout);
        readiness.ready("ready", 1, &layout).unwrap();
        readiness.end(true, &layout);
        assert_eq!([0, 1, 2].map(|g| readiness.check("state", g).unwrap()), [State::Idle, State::Held, State::Idle]);
        assert!(readiness.is_used(1) && readiness.check_open("grad_mut", 1).is_ok());
        readiness.ready("ready", 0, &layout).unwrap();
        assert_eq!(readiness.used(), [true, true, false]);
        readiness.end(false, &layout);
        assert_eq!(readiness.used(), [false; 3]);
    }
}
