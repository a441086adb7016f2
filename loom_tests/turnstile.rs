//! Model of the turnstile: either the device thread starts an entry or the caller withdraws it, and the loser sees the
//! winner's work.

use super::support::{Watched, bite, check, spawn};
use crate::sync::{Turnstile, shim::Arc};

#[test]
fn start_against_withdraw() {
    check(|| {
        let state = Arc::new((Turnstile::new(), Watched::new(0), Watched::new(0)));
        let device = spawn(&state, move |state| {
            state.1.set(1);
            let won = state.0.start();
            if !won {
                assert_eq!(state.2.get(), 2);
            }
            won
        });
        state.2.set(2);
        let withdrawn = state.0.withdraw();
        if !withdrawn {
            assert_eq!(state.1.get(), 1);
        }
        assert!(device.join().unwrap() ^ withdrawn, "one of the two wins");
        assert!(!state.0.is_queued());
    });
}

#[test]
fn teeth() {
    bite("turnstile");
}
