use gpu_pool::extend::sync::*;
use std::{sync::Arc, thread};

#[test]
fn each_senders_elements_come_in_order_and_once() {
    const EACH: usize = crate::rounds(20_000);
    let inbox = Inbox::new();
    let mut next = [0; 3];
    thread::scope(|s| {
        for sender in 0..3 {
            let inbox = &inbox;
            s.spawn(move || (0..EACH).for_each(|i| inbox.push((sender, i))));
        }
        while next.iter().sum::<usize>() < 3 * EACH {
            for (sender, i) in inbox.take() {
                assert_eq!(i, next[sender]);
                next[sender] += 1;
            }
        }
    });
    assert_eq!(next, [EACH; 3]);
    assert!(inbox.take().next().is_none());
}

#[test]
fn what_nobody_takes_is_dropped_once() {
    let token = Arc::new(());
    let inbox = Inbox::new();
    (0..10).for_each(|_| inbox.push(token.clone()));
    let mut drain = inbox.take();
    assert!(drain.next().is_some());
    (0..5).for_each(|_| inbox.push(token.clone()));
    assert_eq!(Arc::strong_count(&token), 1 + 9 + 5);
    drop(drain);
    assert_eq!(Arc::strong_count(&token), 1 + 5);
    drop(inbox);
    assert_eq!(Arc::strong_count(&token), 1);
}

#[test]
fn many_takers_share_without_loss() {
    const ALL: usize = crate::rounds(30_000);
    let inbox = Inbox::new();
    let taken: usize = thread::scope(|s| {
        s.spawn(|| (0..ALL).for_each(|i| inbox.push(i)));
        let takers: Vec<_> = (0..2)
            .map(|_| {
                s.spawn(|| {
                    let mut sum = 0;
                    for _ in 0..ALL {
                        sum += inbox.take().map(|i| i + 1).sum::<usize>();
                    }
                    sum
                })
            })
            .collect();
        takers.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(taken + inbox.take().map(|i| i + 1).sum::<usize>(), ALL * (ALL + 1) / 2);
}
