//! Broadcast slots: members that meet again and again, with two pages each.

use super::support::{bite, check_within};
use crate::sync::{
    BroadcastSlot,
    shim::{Arc, thread},
};

/// Posts its own broadcasts and reads the other member's, `rounds` times.
fn meet(own: &BroadcastSlot<1>, peer: &BroadcastSlot<1>, rounds: u64) {
    for k in 1..=rounds {
        own.post(k, [10 * k]);
        loop {
            match peer.read(k) {
                Some((number, [value])) => {
                    assert_eq!((number, value), (k, 10 * k), "missed one, or read what was before");
                    break;
                }
                None => thread::yield_now(),
            }
        }
    }
}

/// The third broadcast takes the page of the first one, which must have been read by then.
#[test]
fn members_in_step_miss_nothing() {
    // The third round makes many executions.
    check_within(2, || {
        let both: Arc<[BroadcastSlot<1>; 2]> = Arc::default();
        let other = thread::spawn({
            let both = both.clone();
            move || meet(&both[1], &both[0], 3)
        });
        meet(&both[0], &both[1], 3);
        other.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("broadcast_slot");
}
