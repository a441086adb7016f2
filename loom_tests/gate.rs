//! Models of the gate: after close and drain no thread is inside, none can enter, and all work done inside is visible.

use super::support::{Watched, bite, check, publication, spawn};
use crate::sync::{Gate, shim::Arc};

/// Two submitters race with a shutdown. Submitters use the data with a pass; the shutdown uses it after the drain.
#[test]
fn shutdown_against_submission() {
    check(|| {
        let state = Arc::new((Gate::new(), [Watched::new(0), Watched::new(0)], Watched::new(0)));
        let submitters: Vec<_> = (0..2)
            .map(|i| {
                spawn(&state, move |state| match state.0.enter() {
                    Some(pass) => {
                        state.1[i].set(state.1[i].get() + 1);
                        drop(pass);
                        1
                    }
                    None => {
                        assert_eq!(state.2.get(), 9, "a refused submitter sees the reason");
                        0
                    }
                })
            })
            .collect();
        state.2.set(9);
        assert!(state.0.close());
        assert!(state.0.wait_drained(None));
        let done: usize = state.1.iter().map(|work| work.get()).sum();
        let entered: usize = submitters.into_iter().map(|s| s.join().unwrap()).sum();
        assert_eq!(done, entered);
    });
}

#[test]
fn a_look_at_the_closed_gate_shows_why() {
    check(|| publication::<Gate>(|gate| assert!(gate.close()), Gate::is_closed));
}

#[test]
fn teeth() {
    bite("gate");
}
