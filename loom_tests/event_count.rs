//! The event count: no wake-up is lost, whoever comes first. The condition is a relaxed load on purpose, so that nothing
//! but the event count's own fences stands between the two threads.

mod support;

#[cfg(loom)]
mod models {
    use super::support::{bite, check, check_within};
    use gpu_pool::sync::{
        EventCount,
        shim::{
            Arc,
            atomic::{AtomicUsize, Ordering::Relaxed},
            thread,
        },
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
            let notifier = thread::spawn({
                let state = state.clone();
                move || {
                    state.0.fetch_add(1, Relaxed);
                    state.1.notify();
                }
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
            let other = thread::spawn({
                let state = state.clone();
                move || play(&state, 1)
            });
            play(&state, 0);
            other.join().unwrap();
        });
    }

    #[test]
    fn teeth() {
        bite("event_count");
    }
}
