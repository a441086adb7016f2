use super::*;
use crate::sync::rounds;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::AtomicBool,
    thread,
};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn one_notify_wakes_all_waiters() {
    for _ in 0..rounds(50) {
        let (go, event) = (AtomicBool::new(false), EventCount::new());
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| assert!(event.wait_until(Some(LONG), || go.load(Acquire).then_some(())).is_some()));
            }
            thread::sleep(Duration::from_millis(1));
            go.store(true, Release);
            event.notify();
        });
        assert_eq!(event.word.load(Relaxed) & WAITERS, 0, "nobody is left on the count");
    }
}

#[test]
fn a_limit_ends_the_wait_and_takes_the_announcement_back() {
    let event = EventCount::new();
    let start = Instant::now();
    assert_eq!(event.wait_until(Some(Duration::from_millis(20)), || None::<()>), None);
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(event.word.load(Relaxed) & WAITERS, 0);
    let mut looks = 0;
    assert_eq!(
        event.wait_until(Some(Duration::ZERO), || {
            looks += 1;
            None::<()>
        }),
        None
    );
    assert!(looks >= 1);
}

#[test]
fn a_condition_may_notify_and_may_panic() {
    let event = EventCount::new();
    let mut looks = 0;
    let result = event.wait_until(None, || {
        event.notify();
        looks += 1;
        (looks == 100).then_some(looks)
    });
    assert_eq!(result, Some(100));
    let panicking = || {
        event.wait_until(None, || {
            // The condition holds at the first look after the announcement.
            assert_eq!(event.word.load(Relaxed) & WAITERS, 0, "enough");
            None::<()>
        })
    };
    assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
    assert_eq!(event.word.load(Relaxed) & WAITERS, 0, "the announcement was taken back");
}
