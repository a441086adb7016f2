//! Models of `gang`: the first failure wins, and every waiting peer gets it with its cause; an operation never runs on
//! a part of a gang; the gang has recovered after all members have drained.

use super::support::{Watched, bite, check, spawn};
use crate::{
    Error,
    gang::Gang,
    sync::{EventCount, shim::Arc},
};

fn failure(by: usize) -> Error {
    Error::NoDevice { reason: format!("failure of {by}") }
}

fn cause_of(error: &Error) -> String {
    match error {
        Error::Aborted { cause, .. } => cause.to_string(),
        other => panic!("not an abort: {other}"),
    }
}

fn gang(members: usize) -> Arc<Gang> {
    let wakers: Vec<_> = (0..members).map(|_| Arc::new(EventCount::new())).collect();
    Arc::new(Gang::new((0..members).collect(), wakers))
}

/// Two members fail while the third waits on its own waker for something that never comes.
#[test]
fn the_first_failure_wins_and_nobody_waits_for_ever() {
    check(|| {
        let gang = gang(2);
        let failing = spawn(&gang, move |gang| gang.poison(0, failure(0)));
        let peer = spawn(&gang, move |gang| {
            let seen = gang.waker(1).wait_until(None, || gang.check().err()).unwrap();
            cause_of(&seen)
        });
        let first = gang.poison(1, failure(1));
        let other_first = failing.join().unwrap();
        assert!(first ^ other_first, "one failure is the first");
        let (by, cause) = gang.cause().unwrap();
        assert_eq!(by, usize::from(first));
        assert_eq!(peer.join().unwrap(), cause.to_string(), "the peer's cause is the gang's");
        assert!(gang.commit(1).is_err(), "nothing is committed after a failure");
    });
}

/// A group is created and begins a collective while the gang fails: it may commit the first operation, and nothing
/// after the failure.
#[test]
fn a_group_fails_with_its_gang() {
    check(|| {
        let gang = gang(2);
        let failing = spawn(&gang, move |gang| gang.poison(1, failure(1)));
        let word = gang.group(&[1, 0]);
        let first = word.commit(1);
        assert!(failing.join().unwrap());
        assert!(word.is_aborted() && !word.commit(2), "made before the failure or after it");
        assert_eq!(gang.group(&[1, 0]).commit(1), first, "every member has the same word");
    });
}

/// A failure races with a collective: both members run it or neither does.
#[test]
fn never_half_a_gang_in_a_collective() {
    check(|| {
        let gang = gang(2);
        let member = |gang: &Gang| gang.commit(1).map_err(|e| cause_of(&e));
        let other = spawn(&gang, move |gang| member(gang));
        let failing = spawn(&gang, move |gang| gang.poison(1, failure(1)));
        let mine = member(&gang);
        let theirs = other.join().unwrap();
        assert!(failing.join().unwrap());
        assert_eq!(mine, theirs);
        if let Err(cause) = mine {
            assert_eq!(cause, failure(1).to_string());
        }
    });
}

/// Memory freed during an abort is reused only after `recover`: by then every member has drained.
#[test]
fn recovery_waits_for_every_member() {
    check(|| {
        let state = Arc::new((gang(2), [Watched::new(0), Watched::new(0)]));
        state.0.poison(0, failure(0));
        let member = |state: &(Arc<Gang>, [Watched<u8>; 2]), rank: usize| {
            state.1[rank].set(1);
            state.0.leave(rank);
            state.0.drained();
            state.0.recover();
            // No work uses the members' memory now.
            assert_eq!(state.1.iter().map(|m| m.get()).sum::<u8>(), 2);
        };
        let other = spawn(&state, move |state| member(state, 1));
        member(&state, 0);
        other.join().unwrap();
        assert!(state.0.has_left(0) && state.0.has_left(1));
    });
}

#[test]
fn teeth() {
    bite("gang");
}
