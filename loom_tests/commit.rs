//! The commit word: never half a gang. All members agree on the last number that was carried through.

use super::support::{Watched, bite, check};
use crate::sync::{
    CommitWord,
    shim::{Arc, thread},
};

fn carried_through(word: &CommitWord) -> u64 {
    (1..=2).take_while(|&seq| word.commit(seq)).count() as u64
}

/// Two members against an abort. A refused member can know the cause.
#[test]
fn members_agree_where_the_abort_fell() {
    check(|| {
        let state = Arc::new((CommitWord::new(), Watched::new(0)));
        let members: Vec<_> = (0..2)
            .map(|_| {
                let state = state.clone();
                thread::spawn(move || {
                    let reached = carried_through(&state.0);
                    if reached < 2 {
                        assert_eq!(state.1.get(), 7);
                    }
                    reached
                })
            })
            .collect();
        state.1.set(7);
        assert!(state.0.abort());
        let reached: Vec<_> = members.into_iter().map(|m| m.join().unwrap()).collect();
        assert_eq!(reached, [state.0.committed(); 2]);
        assert!(state.0.is_aborted(), "nothing clears an abort");
    });
}

#[test]
fn a_look_at_the_abort_shows_its_cause() {
    check(|| {
        let state = Arc::new((CommitWord::new(), Watched::new(0)));
        let looking = thread::spawn({
            let state = state.clone();
            move || {
                if state.0.is_aborted() {
                    assert_eq!(state.1.get(), 7);
                }
            }
        });
        state.1.set(7);
        state.0.abort();
        looking.join().unwrap();
    });
}

/// Who finds a number committed sees what the committing member did before.
#[test]
fn a_commit_shows_what_came_before() {
    check(|| {
        let state = Arc::new((CommitWord::new(), Watched::new(0)));
        let committing = thread::spawn({
            let state = state.clone();
            move || {
                state.1.set(3);
                assert!(state.0.commit(1));
            }
        });
        if state.0.committed() == 1 {
            assert_eq!(state.1.get(), 3);
        }
        committing.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("commit");
}
