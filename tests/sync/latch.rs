use gpu_pool::extend::sync::*;
use std::{sync::Arc, thread, time::Duration};

#[test]
fn the_frame_may_go_as_soon_as_the_latch_is_set() {
    let waker = Arc::new(EventCount::new());
    for _ in 0..crate::rounds(2000) {
        let mut results = [0usize; 3];
        let latch = Box::new(CountLatch::new(3, waker.clone()));
        let threads: Vec<_> = results
            .iter_mut()
            .enumerate()
            .map(|(i, result)| {
                let (latch, result) = (&raw const *latch as usize, &raw mut *result as usize);
                thread::spawn(move || {
                    // SAFETY: latch and result live until the third `set`, and this is one of the three.
                    unsafe {
                        *(result as *mut usize) = i + 1;
                        CountLatch::set(latch as *const CountLatch);
                    }
                })
            })
            .collect();
        assert!(latch.wait(None, Duration::ZERO));
        assert!(latch.is_set());
        drop(latch); // the setters may still be inside `set`
        assert_eq!(results, [1, 2, 3]);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}

#[test]
fn a_limit_does_not_count() {
    assert!(CountLatch::new(0, Arc::new(EventCount::new())).is_set());
    let latch = CountLatch::new(1, Arc::new(EventCount::new()));
    assert!(!latch.is_set() && !latch.wait(Some(Duration::from_millis(5)), Duration::from_millis(1)));
    assert!(!latch.is_set());
    // SAFETY: the latch is alive, and this is the only `set`.
    unsafe { CountLatch::set(&latch) };
    assert!(latch.wait(Some(Duration::ZERO), Duration::ZERO));
}
