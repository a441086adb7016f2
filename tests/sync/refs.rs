use gpu_pool::extend::sync::*;
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

#[test]
fn one_of_many_is_the_last_and_sees_all() {
    for _ in 0..crate::rounds(2000) {
        let (refs, last) = (RefCount::new(), AtomicUsize::new(0));
        let marks = [const { AtomicUsize::new(0) }; 3];
        refs.acquire();
        refs.acquire();
        thread::scope(|s| {
            for mark in &marks {
                let (refs, last, marks) = (&refs, &last, &marks);
                s.spawn(move || {
                    refs.acquire();
                    assert!(!refs.release());
                    mark.store(1, Ordering::Relaxed);
                    if refs.release() {
                        assert!(marks.iter().all(|mark| mark.load(Ordering::Relaxed) == 1));
                        last.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(last.into_inner(), 1);
    }
}

#[test]
fn a_count_that_was_reset_counts_again() {
    let mut refs = RefCount::new();
    for _ in 0..3 {
        refs.acquire();
        assert!(!refs.release());
        assert!(refs.release());
        refs.reset();
    }
}
