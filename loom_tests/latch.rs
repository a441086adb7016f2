//! Model of the latch: the waiter sees the setters' work, and its frame may end at once. `bury` marks the end of the
//! frame: a setter that uses the latch after it is a race for loom.

use super::support::{Watched, bite, check};
use crate::sync::{
    CountLatch, EventCount,
    shim::{Arc, thread},
};

#[test]
fn nobody_touches_the_frame_after_the_last_set() {
    check(|| {
        // A std `Arc`, invisible to loom: it keeps the memory of the "frame" for a mutant's late touch.
        let frame =
            std::sync::Arc::new((CountLatch::new(2, Arc::new(EventCount::new())), [Watched::new(0), Watched::new(0)]));
        let setters: Vec<_> = (0..2)
            .map(|i| {
                let frame = frame.clone();
                thread::spawn(move || {
                    frame.1[i].set(i + 1);
                    // SAFETY: one of two calls; the memory outlives both.
                    unsafe { CountLatch::set(&frame.0) };
                })
            })
            .collect();
        assert!(frame.0.wait(None, std::time::Duration::ZERO));
        assert!(frame.0.is_set());
        frame.0.bury();
        for (i, result) in frame.1.iter().enumerate() {
            assert_eq!(result.get(), i + 1);
        }
        setters.into_iter().for_each(|s| s.join().unwrap());
    });
}

#[test]
fn teeth() {
    bite("latch");
}
