//! The ring against a `VecDeque`, against another thread, and against panics.

use gpu_pool::extend::sync::ring::*;
use proptest::prelude::*;
use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

#[derive(Clone, Debug)]
enum Step {
    Push,
    Pop,
    PushBatch(usize),
    PopBatch(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        Just(Step::Push),
        Just(Step::Pop),
        (0usize..12).prop_map(Step::PushBatch),
        (0usize..12).prop_map(Step::PopBatch),
    ];
    proptest::collection::vec(step, 0..200)
}

proptest! {
    /// Any sequence of operations behaves as on a bounded `VecDeque`, also if the indices wrap, and each element is
    /// dropped once.
    #[test]
    fn behaves_as_a_bounded_deque(steps in steps(), capacity in 1usize..10, behind in 0usize..40) {
        let (mut producer, mut consumer) = channel_from(capacity, 0usize.wrapping_sub(behind));
        let capacity = capacity.next_power_of_two();
        prop_assert_eq!(producer.capacity(), capacity);
        let token = Arc::new(());
        let mut model = VecDeque::new();
        let mut names = 0u32..;
        for step in steps {
            match step {
                Step::Push => {
                    let name = names.next().unwrap();
                    let pushed = producer.push((name, token.clone())).is_ok();
                    prop_assert_eq!(pushed, model.len() < capacity);
                    if pushed {
                        model.push_back(name);
                    }
                }
                Step::Pop => prop_assert_eq!(consumer.pop().map(|(name, _)| name), model.pop_front()),
                Step::PushBatch(count) => {
                    let mut items = names.by_ref().take(count).collect::<Vec<_>>().into_iter();
                    let fits = count.min(capacity - model.len());
                    model.extend(items.as_slice()[..fits].iter().copied());
                    let pushed = producer.push_batch(&mut items.by_ref().map(|name| (name, token.clone())));
                    prop_assert_eq!(pushed, fits);
                    prop_assert_eq!(items.len(), count - fits, "an element that does not fit stays in the iterator");
                }
                Step::PopBatch(max) => {
                    let mut got = Vec::new();
                    let popped = consumer.pop_batch(max, |(name, _)| got.push(name));
                    prop_assert_eq!(popped, max.min(model.len()));
                    prop_assert_eq!(got, model.drain(..popped).collect::<Vec<_>>());
                }
            }
            prop_assert_eq!(consumer.len(), model.len());
            prop_assert_eq!(producer.slots(), capacity - model.len());
            prop_assert_eq!(Arc::strong_count(&token), 1 + model.len());
        }
        drop((producer, consumer));
        prop_assert_eq!(Arc::strong_count(&token), 1, "what was left was dropped");
    }
}

#[test]
fn two_threads_keep_order_and_drop_each_element_once() {
    let token = Arc::new(());
    for capacity in [1, 2, 64] {
        // Beside busy threads each full ring costs a time slice, so a small one carries fewer elements.
        let count = crate::rounds(200_000).min(5_000 * capacity);
        let (mut producer, mut consumer) = channel_from::<(usize, Arc<()>)>(capacity, usize::MAX - count / 2);
        let sender = thread::spawn({
            let token = token.clone();
            move || {
                let mut items = (0..count).map(|i| (i, token.clone())).peekable();
                while items.peek().is_some() {
                    // Single and batched, in turn.
                    if producer.push_batch(&mut items.by_ref().take(7)) == 0 {
                        thread::yield_now();
                    }
                    if let Some(item) = items.next() {
                        let mut rejected = producer.push(item);
                        while let Err(Full(item)) = rejected {
                            thread::yield_now();
                            rejected = producer.push(item);
                        }
                    }
                }
            }
        });
        // Some elements stay in the ring, which drops them.
        let mut next = 0;
        while next < count - capacity {
            let popped = consumer.pop_batch((count - capacity - next).min(5), |(i, _)| {
                assert_eq!(i, next);
                next += 1;
            });
            if popped == 0 {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
        assert_eq!((consumer.len(), Arc::strong_count(&token)), (capacity, 1 + capacity));
        drop(consumer);
        assert_eq!(Arc::strong_count(&token), 1);
    }
}

#[test]
fn a_panic_in_a_batch_loses_and_doubles_nothing() {
    let token = Arc::new(());
    let (mut producer, mut consumer) = channel(8);
    let pushing =
        || producer.push_batch(&mut (0..8).map(|i| if i == 3 { panic!("third") } else { (i, token.clone()) }));
    assert!(catch_unwind(AssertUnwindSafe(pushing)).is_err());
    assert_eq!((producer.slots(), consumer.len()), (5, 3));
    let popping = || consumer.pop_batch(8, |(i, _)| assert_ne!(i, 1));
    assert!(catch_unwind(AssertUnwindSafe(popping)).is_err());
    assert_eq!(consumer.len(), 1);
    assert_eq!(consumer.pop().unwrap().0, 2);
    assert_eq!(Arc::strong_count(&token), 1);
}

#[test]
fn nothing_sized_works() {
    let (mut producer, mut consumer) = channel(4);
    assert_eq!(producer.push_batch(&mut std::iter::repeat(())), 4);
    assert_eq!(producer.push(()), Err(Full(())));
    assert_eq!(consumer.pop_batch(usize::MAX, drop), 4);
}

#[test]
fn both_sides_are_send_and_sync() {
    // Elements need only be `Send`: a shared side gives no access to elements.
    type Element = std::cell::Cell<u8>;
    static_assertions::assert_impl_all!(Producer<Element>: Send, Sync);
    static_assertions::assert_impl_all!(Consumer<Element>: Send, Sync);
    static_assertions::assert_not_impl_any!(Producer<std::rc::Rc<u8>>: Send, Sync);
}
