use gpu_pool::extend::sync::*;
use std::{sync::atomic::AtomicBool, sync::atomic::Ordering, thread};

#[test]
fn two_pages_are_remembered() {
    let slot = BroadcastSlot::new();
    assert_eq!(slot.read(1), None);
    (1..=4).for_each(|k| slot.post(k, [k]));
    assert_eq!([1, 2, 3, 5].map(|k| slot.read(k)), [Some((3, [3])), Some((4, [4])), Some((3, [3])), None]);
}

/// Of several members, with nothing in between: no member ever finds another number than the one it is at.
#[test]
fn members_in_step_miss_nothing() {
    const ROUNDS: u64 = crate::rounds(3000) as u64;
    let all: [BroadcastSlot<7>; 3] = Default::default();
    thread::scope(|s| {
        for me in 0..3 {
            let all = &all;
            s.spawn(move || {
                for k in 1..=ROUNDS {
                    all[me].post(k, [k * (me as u64 + 1); 7]);
                    for (peer, slot) in all.iter().enumerate() {
                        let read = loop {
                            if let Some(read) = slot.read(k) {
                                break read;
                            }
                            thread::yield_now();
                        };
                        assert_eq!(read, (k, [k * (peer as u64 + 1); 7]));
                    }
                }
            });
        }
    });
}

#[test]
fn who_reads_now_and_then_finds_whole_broadcasts_and_their_numbers() {
    const LAST: u64 = crate::rounds(100_000) as u64;
    let (slot, done) = (BroadcastSlot::<7>::new(), AtomicBool::new(false));
    thread::scope(|s| {
        s.spawn(|| {
            (1..=LAST).for_each(|k| slot.post(k, [k; 7]));
            done.store(true, Ordering::Release);
        });
        let mut next = 1;
        while !done.load(Ordering::Acquire) {
            if let Some((number, words)) = slot.read(next) {
                assert!(number >= next && words == [number; 7], "{number} for {next}: {words:?}");
                next = number + 1;
            }
        }
    });
    assert_eq!(slot.read(LAST), Some((LAST, [LAST; 7])));
}
