use crate::rounds;
use gpu_pool::extend::sync::Gate;
use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::Duration,
};

#[test]
fn nobody_is_inside_after_the_drain() {
    for _ in 0..rounds(300) {
        let gate = Gate::new();
        let drained = AtomicBool::new(false);
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while let Some(pass) = gate.enter() {
                        assert!(!drained.load(SeqCst));
                        drop(pass);
                    }
                });
            }
            thread::yield_now();
            assert!(gate.close());
            assert!(gate.wait_drained(None));
            drained.store(true, SeqCst);
        });
    }
}

#[test]
fn a_pass_keeps_the_drain_waiting() {
    let gate = Gate::new();
    let pass = gate.enter();
    assert!(pass.is_some() && !gate.is_closed());
    assert!(gate.close() && gate.is_closed());
    assert!(gate.enter().is_none());
    assert!(!gate.wait_drained(Some(Duration::from_millis(1))));
    drop(pass);
    assert!(gate.wait_drained(Some(Duration::from_millis(1))));
}

#[test]
fn one_of_many_closers_is_first() {
    let gate = Gate::new();
    let firsts: usize = thread::scope(|s| {
        let closers: Vec<_> = (0..4).map(|_| s.spawn(|| usize::from(gate.close()))).collect();
        closers.into_iter().map(|c| c.join().unwrap()).sum()
    });
    assert_eq!(firsts, 1);
}

#[test]
#[should_panic = "open gate"]
fn draining_an_open_gate_is_a_bug() {
    Gate::new().wait_drained(None);
}
