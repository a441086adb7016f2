use gpu_pool::extend::sync::*;
use std::{collections::HashSet, thread};

#[test]
fn nobody_holds_what_another_holds() {
    let (spares, held) = (Spares::new(), parking_lot::Mutex::new(HashSet::new()));
    (0..3).for_each(|i| spares.give(i));
    thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                for _ in 0..crate::rounds(2000) {
                    let spare = spares.take().expect("three threads, three spares, one each");
                    assert!(held.lock().insert(spare));
                    assert!(held.lock().remove(&spare));
                    spares.give(spare);
                }
            });
        }
    });
    let mut left: Vec<i32> = std::iter::from_fn(|| spares.take()).collect();
    left.sort_unstable();
    assert_eq!(left, [0, 1, 2]);
}

#[test]
fn the_warmest_first() {
    let spares = Spares::new();
    spares.give("cold");
    spares.give("warm");
    assert_eq!((spares.take(), spares.take(), spares.take()), (Some("warm"), Some("cold"), None));
}
