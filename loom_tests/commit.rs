//! Models of the commit word: all members agree on the last committed number, so an operation never runs on a part of a
//! gang.

use super::support::{Watched, bite, check, publication, spawn};
use crate::sync::{CommitWord, shim::Arc};

fn carried_through(word: &CommitWord) -> u64 {
    (1..=2).take_while(|&seq| word.commit(seq)).count() as u64
}

/// Two members race with an abort. A refused member sees the cause.
#[test]
fn members_agree_where_the_abort_fell() {
    check(|| {
        let state = Arc::new((CommitWord::new(), Watched::new(0)));
        let members: Vec<_> = (0..2)
            .map(|_| {
                spawn(&state, |state| {
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
    check(|| publication::<CommitWord>(|word| assert!(word.abort()), CommitWord::is_aborted));
}

/// A thread that sees a number committed also sees the committing member's earlier work.
#[test]
fn a_commit_shows_what_came_before() {
    check(|| publication::<CommitWord>(|word| assert!(word.commit(1)), |word| word.committed() == 1));
}

#[test]
fn teeth() {
    bite("commit");
}
