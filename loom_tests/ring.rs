//! Models of the ring: elements arrive once and in order, slots are not reused too early.

use super::support::{bite, check};
use crate::sync::{ring::channel_from, shim::thread};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts its drops. A std atomic: it does not belong to the model, and is read after all threads have been joined.
struct Token(usize, std::sync::Arc<AtomicUsize>);

impl Drop for Token {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

/// Neither side waits for the other, so all orders of successes and failures occur, also pushes into a slot that was
/// just freed. Pushed elements come out in order; each element is dropped once; the indices wrap on the way.
fn order_and_drops(capacity: usize, start: usize, attempts: usize) {
    let drops = std::sync::Arc::new(AtomicUsize::new(0));
    let (mut producer, mut consumer) = channel_from(capacity, start);
    let pushing = thread::spawn({
        let drops = drops.clone();
        move || (0..attempts).filter(|&i| producer.push(Token(i, drops.clone())).is_ok()).collect::<Vec<_>>()
    });
    let mut popped: Vec<_> = (0..attempts).filter_map(|_| consumer.pop()).map(|token| token.0).collect();
    let pushed = pushing.join().unwrap();
    // One element stays in the ring, if there is one, so that the ring drops it.
    while consumer.len() > 1 {
        popped.push(consumer.pop().unwrap().0);
    }
    assert_eq!(popped, pushed[..popped.len()]);
    assert!(pushed.len() - popped.len() <= 1);
    drop(consumer);
    assert_eq!(drops.load(Ordering::Relaxed), attempts, "each element, pushed or rejected, is dropped once");
}

#[test]
fn one_slot() {
    check(|| order_and_drops(1, usize::MAX, 3));
}

#[test]
fn two_slots_wrapping() {
    check(|| order_and_drops(2, usize::MAX - 1, 4));
}

#[test]
fn batches() {
    check(|| {
        let (mut producer, mut consumer) = channel_from(2, usize::MAX);
        let pushing = thread::spawn(move || {
            let mut items = (0..4).map(Box::new);
            producer.push_batch(&mut items.by_ref().take(2)) + producer.push_batch(&mut items)
        });
        let mut popped = Vec::new();
        for _ in 0..3 {
            consumer.pop_batch(2, |item| popped.push(*item));
        }
        let pushed = pushing.join().unwrap();
        consumer.pop_batch(2, |item| popped.push(*item));
        assert_eq!(popped, (0..pushed).collect::<Vec<_>>());
    });
}

#[test]
fn teeth() {
    bite("ring");
}
