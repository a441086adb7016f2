//! Tests of [`LaunchGate`].

use super::*;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize},
    },
    thread,
};

/// The situation of nccl#744: windows of two gangs, whose members close from their own threads, against threads that
/// allocate. Whoever is inside counts himself, and looks at the other class.
#[test]
fn spinning_kernels_and_blocking_calls_exclude_each_other() {
    static GATE: LaunchGate = LaunchGate::new();
    static LAUNCHING: AtomicUsize = AtomicUsize::new(0);
    static BLOCKED: AtomicUsize = AtomicUsize::new(0);
    // Counted, since a panic in there would leave the others waiting.
    static OVERLAPS: AtomicUsize = AtomicUsize::new(0);
    const MEMBERS: usize = 2;
    let gangs = [Barrier::new(MEMBERS), Barrier::new(MEMBERS)];
    thread::scope(|s| {
        for met in &gangs {
            for member in 0..MEMBERS {
                s.spawn(move || {
                    for _ in 0..crate::sync::rounds(300) {
                        if member == 0 {
                            GATE.open(MEMBERS);
                            LAUNCHING.fetch_add(MEMBERS, SeqCst);
                        }
                        met.wait();
                        OVERLAPS.fetch_add(BLOCKED.load(SeqCst), SeqCst);
                        LAUNCHING.fetch_sub(1, SeqCst);
                        GATE.close(1);
                    }
                });
            }
        }
        for _ in 0..2 {
            s.spawn(|| {
                for _ in 0..crate::sync::rounds(300) {
                    let blocking = GATE.block();
                    BLOCKED.fetch_add(1, SeqCst);
                    OVERLAPS.fetch_add(LAUNCHING.load(SeqCst), SeqCst);
                    let nested = GATE.block();
                    OVERLAPS.fetch_add(LAUNCHING.load(SeqCst), SeqCst);
                    drop(nested);
                    BLOCKED.fetch_sub(1, SeqCst);
                    drop(blocking);
                    thread::yield_now();
                }
            });
        }
    });
    assert_eq!(OVERLAPS.load(SeqCst), 0);
    assert_eq!(GATE.word.load(Relaxed), 0);
}

/// Collectives back to back do not keep an allocation waiting: once it has announced itself no window opens, though one
/// is open and stays so.
#[test]
fn a_waiting_call_stops_new_windows() {
    let (gate, entered) = (LaunchGate::new(), AtomicBool::new(false));
    gate.open(2);
    thread::scope(|s| {
        s.spawn(|| {
            let blocking = gate.block();
            entered.store(true, SeqCst);
            drop(blocking);
        });
        while !gate.is_blocked() {
            thread::yield_now();
        }
        assert!(!gate.try_open(1));
        gate.close(1);
        assert!(!gate.try_open(1) && !entered.load(SeqCst), "one launch still lacks");
        gate.close(1);
        gate.open(1);
        assert!(entered.load(SeqCst), "the call was first");
        gate.close(1);
    });
}

/// A module load that maps memory, with a window waiting outside: the second call of the thread does not wait for the
/// window that waits for the first.
#[test]
fn a_call_inside_a_call_goes_straight_through() {
    let gate = LaunchGate::new();
    let load = gate.block();
    thread::scope(|s| {
        let opener = s.spawn(|| {
            gate.open(1);
            gate.close(1);
        });
        // Long enough for it to fall asleep, mostly; either way the test must pass.
        thread::sleep(std::time::Duration::from_millis(2));
        let map = gate.block();
        drop(load); // in the wrong order, as guards in a struct may be
        assert!(gate.is_blocked() && !gate.try_open(1));
        assert!(!opener.is_finished());
        drop(map);
    });
    assert_eq!(gate.word.load(Relaxed), 0);
}

/// Calls of many threads are in progress at once: each waits for all others to have begun.
#[test]
fn blocking_calls_do_not_exclude_each_other() {
    let (gate, all) = (LaunchGate::new(), Barrier::new(4));
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let _blocking = gate.block();
                all.wait();
            });
        }
    });
    assert!(gate.try_open(1));
}

/// A gang that fails after the commit: who calls the others off closes for them, and a panic inside a blocking call
/// ends it.
#[test]
fn failures_leave_the_gate_open() {
    let gate = LaunchGate::new();
    gate.open(8);
    gate.close(3);
    gate.close(5);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        let _blocking = gate.block();
        let _nested = gate.block();
        panic!("inside a driver call");
    }));
    assert!(panic.is_err());
    assert_eq!(gate.word.load(Relaxed), 0);
    assert!(gate.try_open(1));
}

#[test]
fn windows_of_two_gangs_are_open_at_once() {
    let gate = LaunchGate::new();
    assert!(gate.try_open(8));
    assert!(gate.try_open(4), "the other gang's");
    gate.close(12);
    assert_eq!(gate.word.load(Relaxed), 0);
}

/// Nothing to launch is no window: it does not keep blocking calls out.
#[test]
fn a_window_without_launches_is_none() {
    let gate = LaunchGate::new();
    gate.open(0);
    drop(gate.block());
    gate.close(0);
    assert_eq!(gate.word.load(Relaxed), 0);
}
