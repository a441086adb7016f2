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
/// allocate. Each thread inside increments its class's counter, and checks the other class's counter.
#[test]
fn spinning_kernels_and_blocking_calls_exclude_each_other() {
    static GATE: LaunchGate = LaunchGate::new();
    static LAUNCHING: AtomicUsize = AtomicUsize::new(0);
    static BLOCKED: AtomicUsize = AtomicUsize::new(0);
    // Overlaps are counted, since a panic inside would leave the other threads waiting.
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

/// Back-to-back collectives do not starve an allocation: after its announcement no window opens, even while another
/// window stays open.
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

/// A module load that maps memory, while a window waits: the thread's second call does not wait for the window, which
/// waits for the first call.
#[test]
fn a_call_inside_a_call_goes_straight_through() {
    let gate = LaunchGate::new();
    let load = gate.block();
    thread::scope(|s| {
        let opener = s.spawn(|| {
            gate.open(1);
            gate.close(1);
        });
        // Mostly long enough for the thread to fall asleep; the test passes in both cases.
        thread::sleep(std::time::Duration::from_millis(2));
        let map = gate.block();
        drop(load); // in the wrong order, as guards in a struct may be
        assert!(gate.is_blocked() && !gate.try_open(1));
        assert!(!opener.is_finished());
        drop(map);
    });
    assert_eq!(gate.word.load(Relaxed), 0);
}

/// Blocking calls of many threads run at the same time: each waits until all others have begun.
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

/// A gang fails after the commit: the member that gives up closes for the others. A panic inside a blocking call ends
/// that call.
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

/// A window of zero launches does not block blocking calls.
#[test]
fn a_window_without_launches_is_none() {
    let gate = LaunchGate::new();
    gate.open(0);
    drop(gate.block());
    gate.close(0);
    assert_eq!(gate.word.load(Relaxed), 0);
}
