//! Model of a gradient piece on its way to a neighbour: data in memory, a descriptor through the ring, an event that
//! wakes the peer; then the memory is returned in this way. Ring and event count together order the data, although
//! neither accesses it.

use super::support::{Watched, bite, check, spawn};
use crate::sync::{
    EventCount, ring,
    shim::{Arc, thread},
    site::flag,
};

#[test]
fn data_follows_its_descriptor_there_and_back() {
    check(|| {
        let memory = Arc::new([Watched::new(0), Watched::new(0)]);
        let (full_event, free_event) = (Arc::new(EventCount::new()), Arc::new(EventCount::new()));
        let (mut full_in, mut full_out) = ring::channel::<usize>(1);
        let (mut free_in, mut free_out) = ring::channel::<usize>(1);
        let neighbour = thread::spawn({
            let (memory, full_event, free_event) = (memory.clone(), full_event.clone(), free_event.clone());
            move || {
                for round in 1..=2 {
                    let piece = full_event.wait_until(None, || full_out.pop()).unwrap();
                    // Reads the data, and writes an answer for the owner.
                    assert_eq!(memory[piece].get(), round);
                    memory[piece].set(10 * round);
                    free_in.push(piece).unwrap();
                    free_event.notify();
                }
            }
        });
        for round in 1..=2 {
            memory[0].set(round);
            full_in.push(0).unwrap();
            full_event.notify();
            let piece = free_event.wait_until(None, || free_out.pop()).unwrap();
            assert_eq!(memory[piece].get(), 10 * round);
        }
        neighbour.join().unwrap();
    });
}

/// A sender runs ahead of its peer's ring of one slot: the receiver may sleep, and so may the sender that waits for
/// room.
#[test]
fn room_is_told_too() {
    check(|| {
        let events = Arc::new([EventCount::new(), EventCount::new()]);
        let (mut to, mut from) = ring::channel::<usize>(1);
        let receiver = spawn(&events, move |events| {
            for round in 1..=2 {
                assert_eq!(events[1].wait_until(None, || from.pop()), Some(round));
                if !flag("model.publication.room_is_not_told") {
                    EventCount::notify_all([&events[0]]);
                }
            }
        });
        for round in 1..=2 {
            events[0].wait_until(None, || to.push(round).ok()).unwrap();
            EventCount::notify_all([&events[1]]);
        }
        receiver.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("publication");
}
