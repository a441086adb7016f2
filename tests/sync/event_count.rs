//! Tests of [`EventCount`].

use crate::rounds;
use gpu_pool::extend::sync::EventCount;
use std::{
    sync::atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
    thread,
    time::Duration,
};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn ping_pong_loses_no_wake_up() {
    let (turn, event) = (AtomicUsize::new(0), EventCount::new());
    let play = |me: usize| {
        for round in 0..rounds(5000) {
            let mine = round * 2 + me;
            assert!(event.wait_until(Some(LONG), || (turn.load(Acquire) == mine).then_some(())).is_some());
            if round % 64 == 0 {
                thread::sleep(Duration::from_micros(200)); // long enough for the peer to block
            }
            turn.store(mine + 1, Release);
            event.notify();
        }
    };
    thread::scope(|s| {
        s.spawn(|| play(1));
        play(0);
    });
}

#[test]
fn who_sleeps_is_seen_to_until_he_is_notified() {
    let (turn, event) = (AtomicUsize::new(0), EventCount::new());
    assert_eq!(event.asleep(), None);
    thread::scope(|s| {
        s.spawn(|| {
            for round in 1..=3 {
                event.wait_until(Some(LONG), || (turn.load(Acquire) == round).then_some(())).unwrap();
            }
        });
        let mut epochs = Vec::new();
        for round in 1..=3 {
            epochs.push(loop {
                if let Some(epoch) = event.asleep() {
                    break epoch;
                }
                thread::yield_now();
            });
            // A notification without a change also ends the epoch. The waiter counts as asleep only after another look.
            event.notify();
            epochs.push(loop {
                if let Some(epoch) = event.asleep() {
                    break epoch;
                }
                thread::yield_now();
            });
            turn.store(round, Release);
            event.notify();
        }
        assert!(epochs.windows(2).all(|pair| pair[0] < pair[1]), "{epochs:?}");
    });
    assert_eq!(event.asleep(), None);
}

#[test]
fn an_endless_limit_is_no_limit() {
    let (go, event) = (AtomicBool::new(false), EventCount::new());
    thread::scope(|s| {
        s.spawn(|| event.wait_until(Some(Duration::MAX), || go.load(Acquire).then_some(())).unwrap());
        thread::sleep(Duration::from_millis(5));
        go.store(true, Release);
        event.notify();
    });
}

/// A thread that looks for deadlocks instead of sleeping counts as asleep, but not after a notification. Once, such a
/// thread kept its note after its answer had come, and its peers got a false deadlock report.
#[test]
fn who_looks_around_is_asleep_until_notified() {
    let event = EventCount::new();
    let there = AtomicBool::new(false);
    let cond = || there.load(Relaxed).then_some(());
    let found = event.while_asleep(cond, || {
        let asleep = event.asleep();
        assert!(asleep.is_some() && asleep == event.asleep());
        there.store(true, Relaxed);
        event.notify();
        assert_eq!(event.asleep(), None);
    });
    assert_eq!((found, event.asleep()), (Some(()), None));
    assert_eq!(event.while_asleep(cond, || panic!("there was no need")), Some(()));
    assert_eq!(event.while_asleep(|| None::<()>, || {}), None);
    assert_eq!(event.asleep(), None);
}

/// A peer comes later than the usual yields of a waiter and does not notify: only a lingering waiter sees it.
#[test]
#[cfg_attr(miri, ignore = "each yield takes long there, and a long one ends it")]
fn who_lingers_meets_without_being_woken() {
    let looks_in = |linger| {
        let (event, mut looks) = (EventCount::new(), 0);
        let met = event.wait_lingering(Some(Duration::from_millis(10)), linger, || {
            looks += 1;
            (looks == 400).then_some(())
        });
        met.map(|()| looks)
    };
    // A long yield ends the lingering, so on a busy computer not every try succeeds.
    assert!((0..1000).any(|_| looks_in(Duration::from_secs(1)).is_some()));
    assert_eq!(looks_in(Duration::ZERO), None, "some rounds, some yields, and to sleep");
}

#[test]
fn one_call_wakes_the_waiters_of_all() {
    for _ in 0..rounds(50) {
        let (go, events) = (AtomicBool::new(false), [const { EventCount::new() }; 3]);
        thread::scope(|s| {
            for event in &events {
                s.spawn(|| assert!(event.wait_until(Some(LONG), || go.load(Acquire).then_some(())).is_some()));
            }
            thread::sleep(Duration::from_millis(1));
            go.store(true, Release);
            EventCount::notify_all(&events);
        });
    }
}
