//! Models of the event count: no wake-up is lost in any order of waiter and notifier. The condition is a relaxed load
//! on purpose, so that only the event count's own fences order the two threads.

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

/// A waiter and one notification; `look` comes before the waiter is joined.
fn one_notification(look: fn(&EventCount)) {
    check(move || {
        let state = Arc::new((AtomicUsize::new(0), EventCount::new()));
        let waiting = waiter(&state, 1);
        state.0.store(1, Relaxed);
        state.1.notify();
        look(&state.1);
        waiting.join().unwrap();
    });
}

#[test]
fn one_waiter() {
    one_notification(|_| ());
}

/// A notified waiter does not count as asleep any more.
#[test]
fn asleep_ends_with_the_notification() {
    one_notification(|events| assert_eq!(events.asleep(), None));
}

/// One call wakes both waiters. A waiter that was woken without a change sleeps again and is woken again.
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

/// Two threads notify one waiter that needs both: the second call may find that the first one has already removed it
/// from the count.
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

/// Two threads wake each other in turn: each is notifier and waiter of one event count.
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

/// Two waiters with separate conditions; one call notifies both.
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

/// A thread notifies two peers and must wait for room in between. It wakes the first peer before it waits, because the
/// room may depend on that peer (as in `Group::put` of the collectives).
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
