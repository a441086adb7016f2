//! Models of the memory pool's protocols L7 to L10: the last handle of a block, recycled events, the mirror of the
//! counters, and the end of a region.

use super::support::{Watched, bite, check, spawn};
use crate::sync::{
    Link, Linked, Mirror, RefCount, Returns, Spares,
    shim::{Arc, thread},
    site::flag,
};
use std::sync::atomic::{AtomicUsize, Ordering};

/// L7: two threads drop the last two handles. One call returns that it was the last, and sees the other thread's work.
#[test]
fn one_of_two_is_the_last() {
    check(|| {
        let shared = Arc::new((RefCount::new(), [Watched::new(0), Watched::new(0)]));
        shared.0.acquire();
        let release = |shared: &(RefCount, [Watched<usize>; 2]), me: usize| {
            shared.1[me].set(me + 1);
            let last = shared.0.release();
            if last {
                assert_eq!(shared.1.each_ref().map(Watched::get), [1, 2]);
            }
            last
        };
        let other = spawn(&shared, move |shared| release(shared, 1));
        let mine = release(&shared, 0);
        assert!(mine != other.join().unwrap(), "exactly one is the last");
    });
}

/// L7: one thread makes a handle from its own and drops both; another thread drops its only handle.
#[test]
fn a_new_handle_against_a_drop() {
    check(|| {
        let shared = Arc::new((RefCount::new(), Watched::new(0)));
        shared.0.acquire();
        let other = spawn(&shared, move |shared| {
            shared.0.acquire();
            let first = shared.0.release();
            assert!(!first, "it has another");
            let last = shared.0.release();
            if last {
                shared.1.set(1);
            }
            last
        });
        let mine = shared.0.release();
        if mine {
            shared.1.set(2);
        }
        assert!(mine != other.join().unwrap(), "exactly one is the last");
    });
}

/// A driver's event with its last record.
struct Event {
    recorded: Watched<usize>,
}

/// L8: the threads of two streams record an event, enqueue a wait on it and return it; there is one event for both.
/// Each wait captures its own record.
#[test]
fn an_event_is_recorded_anew_only_after_the_wait() {
    check(|| {
        let events = Arc::new(Spares::new());
        // A std `Arc`, invisible to loom: an event is a number that any thread can copy.
        events.give(std::sync::Arc::new(Event { recorded: Watched::new(0) }));
        let order_a_stream = |events: &Spares<std::sync::Arc<Event>>, me: usize| {
            let Some(event) = events.take() else { return false };
            event.recorded.set(me);
            if flag("model.spares.gives_before_the_wait") {
                events.give(event.clone());
            }
            assert_eq!(event.recorded.get(), me, "the wait captures what was recorded for it");
            if !flag("model.spares.gives_before_the_wait") {
                events.give(event);
            }
            true
        };
        let other = spawn(&events, move |events| order_a_stream(events, 1));
        let mine = order_a_stream(&events, 2);
        let other = other.join().unwrap();
        assert!(mine || other, "the event was there for one at least");
        assert!(events.take().is_some() && events.take().is_none(), "one event, still");
    });
}

/// L9: a reader never mixes two writes, never sees an older write after a newer one, and in the end reads the last one.
#[test]
fn the_mirror_shows_whole_writes() {
    check(|| {
        let mirror = Arc::new(Mirror::new());
        let writer = spawn(&mirror, move |mirror| (1..=2).for_each(|i| mirror.write([i, 10 * i])));
        let mut newest = 0;
        for _ in 0..2 {
            if let Some([a, b]) = mirror.try_read() {
                assert_eq!(b, 10 * a, "torn");
                assert!(a >= newest, "went back");
                newest = a;
            }
        }
        writer.join().unwrap();
        assert_eq!(mirror.read(), [2, 20]);
    });
}

/// L9: a reader that waits for a whole write gets one.
#[test]
fn a_reader_of_the_mirror_looks_again() {
    check(|| {
        let mirror = Arc::new(Mirror::new());
        let writer = spawn(&mirror, move |mirror| mirror.write([1, 10]));
        let [a, b] = mirror.read();
        assert_eq!(b, 10 * a, "torn");
        writer.join().unwrap();
    });
}

/// The memory of the boxes: it lives as long as its owner or one of its boxes.
struct Region {
    refs: RefCount,
    memory: Watched<usize>,
    /// A std atomic: it does not belong to the model, and is read after all threads have been joined.
    released: AtomicUsize,
}

impl Region {
    fn use_it(&self) {
        self.memory.get();
    }

    fn let_go(&self) {
        self.use_it();
        if self.refs.release() {
            // The memory goes back to the driver: a use that is not ordered before this is a race.
            self.memory.set(1);
            self.released.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A box of the region. A std `Arc`, invisible to loom: it keeps the region's memory for a mutant's late use.
struct Block {
    region: std::sync::Arc<Region>,
    link: Link<Block>,
}

// SAFETY: always the same field, and no other code uses it.
unsafe impl Linked for Block {
    fn link(&self) -> &Link<Block> {
        &self.link
    }
}

/// L10: the owner closes and releases its reference to the region while other threads drop the last handles to two of
/// its blocks. The last reference frees the region: once, and after all uses.
#[test]
fn the_region_is_released_once_at_the_end() {
    check(|| {
        let region = std::sync::Arc::new(Region {
            refs: RefCount::new(),
            memory: Watched::new(0),
            released: AtomicUsize::new(0),
        });
        let home = Arc::new(Returns::new(2));
        let droppers = [0, 1].map(|lane| {
            region.refs.acquire();
            let block = Box::new(Block { region: region.clone(), link: Link::default() });
            let home: Arc<Returns<Block>> = home.clone();
            thread::spawn(move || {
                block.region.use_it();
                if let Err(block) = home.push(lane, block) {
                    // The owner has closed: only this thread can release the block's reference.
                    block.region.let_go();
                }
            })
        });
        for block in home.close() {
            block.region.let_go();
        }
        region.let_go();
        droppers.into_iter().for_each(|dropper| dropper.join().unwrap());
        assert_eq!(region.released.load(Ordering::Relaxed), 1, "released once");
    });
}

#[test]
fn teeth() {
    bite("memory_handles");
}
