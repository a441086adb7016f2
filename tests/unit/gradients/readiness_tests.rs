use super::{super::layout::Unit, *};
use proptest::prelude::*;

fn layout(count: usize, bytes: usize) -> Layout {
    let order: Vec<usize> = (0..count).rev().collect();
    Layout::new(Unit::of::<f32>(), &vec![4; count], &order, (bytes, bytes)).unwrap()
}

proptest! {
    /// Any order of readiness starts all buckets, in the order of their numbers. Each starts when it and all before
    /// it are complete.
    #[test]
    fn buckets_start_in_order(
        order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle(), unused in 0..12usize,
    ) {
        let layout = layout(12, 32);
        let mut readiness = Readiness::new(&layout);
        let mut started = Vec::new();
        for &gradient in &order[unused..] {
            readiness.ready("ready", gradient, &layout).unwrap();
            prop_assert!(readiness.ready("ready", gradient, &layout).is_err());
            while let Some(bucket) = readiness.start_next(false) {
                let mut gradients = layout.buckets[..=bucket].iter().flat_map(|b| &b.gradients);
                prop_assert!(gradients.all(|&g| readiness.is_used(g)));
                started.push(bucket);
            }
        }
        prop_assert!(unused > 0 || started.len() == layout.buckets.len());
        readiness.close();
        while let Some(bucket) = readiness.start_next(true) {
            started.push(bucket);
        }
        prop_assert_eq!(started, (0..layout.buckets.len()).collect::<Vec<_>>());
        let recorded = readiness.order((0..12).rev());
        prop_assert_eq!(&recorded[..12 - unused], &order[unused..]);
        readiness.end(false, &layout);
        prop_assert!(!readiness.has_begun() && readiness.used().iter().all(|used| !used));
    }
}

#[test]
fn what_is_held_counts_in_the_next_step() {
    let layout = layout(3, 16);
    let mut readiness = Readiness::new(&layout);
    readiness.ready("ready", 1, &layout).unwrap();
    readiness.end(true, &layout);
    assert_eq!([0, 1, 2].map(|g| readiness.check("state", g).unwrap()), [State::Idle, State::Held, State::Idle]);
    assert!(readiness.is_used(1) && readiness.check_open("grad_mut", 1).is_ok());
    readiness.ready("ready", 0, &layout).unwrap();
    assert_eq!(readiness.used(), [true, true, false]);
    readiness.end(false, &layout);
    assert_eq!(readiness.used(), [false; 3]);
}
