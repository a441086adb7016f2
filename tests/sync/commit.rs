use crate::rounds;
use gpu_pool::extend::sync::*;
use std::{sync::Barrier, thread};

#[test]
fn a_late_peer_carries_through_what_was_committed() {
    let word = CommitWord::new();
    assert_eq!((word.committed(), word.is_aborted()), (0, false));
    assert_eq!((word.lead(1), word.lead(1)), (Some(true), Some(false)));
    assert!(word.abort() && !word.abort(), "the first to abort");
    assert!(word.commit(1) && !word.commit(2), "nobody starts number 2");
    assert_eq!((word.committed(), word.is_aborted()), (1, true));
}

#[test]
fn all_members_agree_where_the_abort_fell() {
    for round in 0..rounds(300) {
        let word = CommitWord::new();
        let barrier = Barrier::new(4);
        let reached: Vec<u64> = thread::scope(|s| {
            let members: Vec<_> = (0..3)
                .map(|_| {
                    s.spawn(|| {
                        barrier.wait();
                        (1..=100).take_while(|&seq| word.commit(seq)).count() as u64
                    })
                })
                .collect();
            barrier.wait();
            for _ in 0..round {
                std::hint::spin_loop();
            }
            assert!(word.abort());
            members.into_iter().map(|m| m.join().unwrap()).collect()
        });
        assert!(reached.iter().all(|&n| n == word.committed()), "{reached:?} of {}", word.committed());
    }
}
