use gpu_pool::extend::sync::*;
use std::{collections::HashSet, thread};

#[test]
fn numbers_go_up_and_flags_stay_raised() {
    let sequence = Sequence::new();
    assert_eq!((sequence.get(), sequence.fetch_advance(), sequence.fetch_advance()), (0, 1, 2));
    sequence.raise_to(771);
    sequence.raise_to(3);
    assert_eq!(sequence.get(), 771);
    let flag = Flag::new();
    assert!(!flag.is_raised());
    flag.raise();
    flag.raise();
    assert!(flag.is_raised());
}

#[test]
fn many_writers_each_get_their_own_number() {
    const EACH: usize = crate::rounds(1000);
    let sequence = Sequence::new();
    let seen: Vec<u64> = thread::scope(|s| {
        let threads: Vec<_> =
            (0..4).map(|_| s.spawn(|| (0..EACH).map(|_| sequence.fetch_advance()).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 4 * EACH);
    assert_eq!(sequence.get(), 4 * EACH as u64);
}

#[test]
fn raise_to_never_lowers() {
    const EACH: u64 = crate::rounds(1000) as u64;
    let sequence = Sequence::new();
    thread::scope(|s| {
        for t in 0..4u64 {
            let sequence = &sequence;
            s.spawn(move || {
                for i in 0..EACH {
                    let before = sequence.get();
                    sequence.raise_to(i * 4 + t);
                    assert!(sequence.get() >= before.max(i * 4 + t));
                }
            });
        }
    });
    assert_eq!(sequence.get(), 4 * EACH - 1);
}

#[test]
fn ids_are_unique_over_threads_and_not_zero() {
    let ids: Vec<u64> = thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|_| s.spawn(|| (0..500).map(|_| unique_id()).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    assert!(!ids.contains(&0));
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 2000);
}
