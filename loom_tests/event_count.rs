//! The event count: no wake-up is lost, whoever comes first. The condition is a relaxed load on purpose, so that
//! nothing but the event count's own fences stands between the two threads.

use super::support::{bite, check, check_within, spawn};
use crate::sync::{
    EventCount,
    shim::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        thread,
    },
    site::flag,
};

fn waiter(state: &Arc<(AtomicUsize, EventCount)>, at_least: usize) -> thread::JoinHandle<()> {
    let state = state.clone();
    thread::spawn(move || {
        state.1.wait_until(None, || (state.0.load(Relaxed) >= at_least).then_some(())).unwrap();
    })
}

#[test]
fn one_waiter() {
    check(|| {
        let state = Arc::new((AtomicUsize::new(0), EventCount::new()));
        let waiting = waiter(&state, 1);
        state.0.store(1, Relaxed);
        state.1.notify();
        waiting.join().unwrap();
    });
}

/// Who has been notified of what he waits for is not seen asleep any more.
#[test]
fn asleep_ends_with_the_notification() {
    check(|| {
        let state = Arc::new((AtomicUsize::new(0), EventCount::new()));
        let waiting = waiter(&state, 1);
        state.0.store(1, Relaxed);
        state.1.notify();
        assert_eq!(state.1.asleep(), None);
        waiting.join().unwrap();
    });
}

/// One call wakes both; and a waiter that was woken for nothing sleeps again and is woken again.
#[test]
fn two_waiters_two_epochs() {
    check_within(2, || {
        let state = Arc::new((AtomicUsize::new(0), EventCount::new()));
        let waiting = [waiter(&state, 1), waiter(&state, 2)];
        for step in 1..=2 {
            state.0.store(step, Relaxed);
            state.1.notify();
        }
        waiting.into_iter().for_each(|w| w.join().unwrap());
    });
}

/// Two threads notify one that waits for both: the second call may find that the first one has taken it off the count.
#[test]
fn two_notifiers() {
    check(|| {
        let state = Arc::new((AtomicUsize::new(0), EventCount::new()));
        let notifier = spawn(&state, move |state| {
            state.0.fetch_add(1, Relaxed);
            state.1.notify();
        });
        let waiting = waiter(&state, 2);
        state.0.fetch_add(1, Relaxed);
        state.1.notify();
        waiting.join().unwrap();
        notifier.join().unwrap();
    });
}

/// They wake each other in turn: each is notifier and waiter of the same event count.
#[test]
fn ping_pong() {
    check(|| {
        let state = Arc::new((AtomicUsize::new(0), EventCount::new()));
        let play = |state: &(AtomicUsize, EventCount), me: usize| {
            for round in 0..2 {
                let mine = 2 * round + me;
                state.1.wait_until(None, || (state.0.load(Relaxed) == mine).then_some(())).unwrap();
                state.0.store(mine + 1, Relaxed);
                state.1.notify();
            }
        };
        let other = spawn(&state, move |state| play(state, 1));
        play(&state, 0);
        other.join().unwrap();
    });
}

/// Each of two waits for its own condition, and one call is for both.
#[test]
fn one_call_for_two() {
    check_within(2, || {
        let states = [(); 2].map(|()| Arc::new((AtomicUsize::new(0), EventCount::new())));
        let waiting = [waiter(&states[0], 1), waiter(&states[1], 1)];
        let early = flag("model.event_count.notifies_between");
        states[0].0.store(1, Relaxed);
        if !early {
            states[1].0.store(1, Relaxed);
        }
        EventCount::notify_all(states.iter().map(|state| &state.1));
        if early {
            states[1].0.store(1, Relaxed);
        }
        waiting.into_iter().for_each(|w| w.join().unwrap());
    });
}

/// One that tells two, and has to wait for room between the two, wakes the first before: the room may depend on that
/// one (`Group::put` of the collectives' board).
#[test]
fn who_waits_for_room_has_woken_whom_it_told() {
    check_within(2, || {
        let [told, room] = [(); 2].map(|()| Arc::new((AtomicUsize::new(0), EventCount::new())));
        let first = thread::spawn({
            let (told, room) = (told.clone(), room.clone());
            move || {
                told.1.wait_until(None, || (told.0.load(Relaxed) == 1).then_some(())).unwrap();
                room.0.store(1, Relaxed);
                room.1.notify();
            }
        });
        told.0.store(1, Relaxed);
        if !flag("model.event_count.waits_before_waking") {
            EventCount::notify_all([&told.1]);
        }
        room.1.wait_until(None, || (room.0.load(Relaxed) == 1).then_some(())).unwrap();
        EventCount::notify_all([&told.1]);
        first.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("event_count");
}
