//! Models of the launch gate: windows and blocking calls never overlap, they see each other's work, and no thread
//! sleeps for ever.

use super::support::{Watched, bite, check, check_within, spawn};
use crate::sync::{
    LaunchGate,
    shim::{Arc, thread},
};

struct State {
    gate: LaunchGate,
    /// Plays the part of the driver: a window and a blocking call that overlap race on it.
    data: [Watched<u32>; 2],
}

impl State {
    fn new() -> Arc<Self> {
        Arc::new(State { gate: LaunchGate::new(), data: [Watched::new(0), Watched::new(0)] })
    }

    fn add(&self, at: usize) {
        self.data[at].set(self.data[at].get() + 1);
    }

    /// A whole window of one member.
    fn window(&self, at: usize) {
        self.gate.open(1);
        self.add(at);
        self.gate.close(1);
    }

    /// The threads come to an end, and each access has added one.
    fn ends(&self, threads: [thread::JoinHandle<()>; 2], sum: u32) {
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(self.sum(), sum);
    }

    fn sum(&self) -> u32 {
        self.data.iter().map(Watched::get).sum()
    }
}

/// Either may be first. The other one waits, is woken, and sees the work of the first.
#[test]
fn a_window_against_a_blocking_call() {
    check(|| {
        let state = State::new();
        let member = spawn(&state, |s| s.window(0));
        let blocking = state.gate.block();
        state.add(0);
        drop(blocking);
        member.join().unwrap();
        assert_eq!(state.sum(), 2);
        assert!(state.gate.try_open(1), "nothing is left behind");
    });
}

/// Members of one window launch and close separately; the call waits for both, and sees both.
#[test]
fn each_member_closes_for_itself() {
    check(|| {
        let state = State::new();
        state.gate.open(2);
        let member = spawn(&state, |s| {
            s.add(1);
            s.gate.close(1);
        });
        let call = spawn(&state, |s| {
            let _blocking = s.gate.block();
            assert_eq!(s.sum(), 2);
        });
        state.add(0);
        state.gate.close(1);
        member.join().unwrap();
        call.join().unwrap();
    });
}

/// Windows of two gangs may overlap each other, but not the call.
#[test]
fn two_openers_one_blocking_call() {
    check_within(2, || {
        let state = State::new();
        let openers = [0, 1].map(|i| spawn(&state, move |s| s.window(i)));
        let blocking = state.gate.block();
        state.add(0);
        state.add(1);
        drop(blocking);
        state.ends(openers, 4);
    });
}

/// Calls may overlap each other, but not the window; the end of the last call wakes the opener.
#[test]
fn two_blocking_calls_one_opener() {
    check(|| {
        let state = State::new();
        let calls = [0, 1].map(|i| {
            spawn(&state, move |s| {
                let _blocking = s.gate.block();
                s.add(i);
            })
        });
        state.gate.open(1);
        state.add(0);
        state.add(1);
        state.gate.close(1);
        state.ends(calls, 4);
    });
}

/// A nested call does not wait, also if a window waits for the outer call.
#[test]
fn a_call_inside_a_call_does_not_wait_for_itself() {
    check(|| {
        let state = State::new();
        let member = spawn(&state, |s| s.window(0));
        let load = state.gate.block();
        state.add(0);
        let map = state.gate.block();
        drop(load);
        state.add(0); // still inside
        drop(map);
        member.join().unwrap();
        assert_eq!(state.sum(), 3);
    });
}

/// A model of starvation would be endless. This model has the step that excludes it: while a call waits, no window
/// opens, not even beside the window that the call waits for.
#[test]
fn no_window_opens_past_a_call_that_waits() {
    check(|| {
        let state = State::new();
        state.gate.open(1);
        let call = spawn(&state, |s| {
            let _blocking = s.gate.block();
            s.add(0);
        });
        if state.gate.is_blocked() {
            assert!(!state.gate.try_open(1), "overtaken");
        } else if state.gate.try_open(1) {
            state.add(1);
            state.gate.close(1);
        }
        state.add(0);
        state.gate.close(1);
        call.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("launch_gate");
}
