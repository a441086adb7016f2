//! Models of sequence and flag: a thread that sees the number or the flag sees all work done before it was raised.

use super::support::{Watched, bite, check, publication, spawn};
use crate::sync::{Flag, Sequence, shim::Arc};

#[test]
fn raise_to() {
    check(|| publication::<Sequence>(|s| s.raise_to(3), |s| s.get() >= 3));
}

#[test]
fn flag() {
    check(|| publication::<Flag>(Flag::raise, Flag::is_raised));
}

/// The receiver of number 2 sees the earlier work of the receiver of number 1.
#[test]
fn fetch_advance() {
    check(|| {
        let state = Arc::new((Sequence::new(), [Watched::new(0), Watched::new(0)]));
        let draw = |state: &(Sequence, [Watched<u64>; 2]), me: usize| {
            state.1[me].set(1);
            let number = state.0.fetch_advance();
            if number == 2 {
                assert_eq!(state.1[1 - me].get(), 1);
            }
            number
        };
        let other = spawn(&state, move |state| draw(state, 1));
        let numbers = draw(&state, 0) + other.join().unwrap();
        assert_eq!(numbers, 1 + 2, "each number is drawn once");
    });
}

/// Two threads raise the number: in either order, the higher value stays.
#[test]
fn raise_to_keeps_the_higher() {
    check(|| {
        let sequence = Arc::new(Sequence::new());
        let other = spawn(&sequence, move |sequence| sequence.raise_to(5));
        sequence.raise_to(3);
        assert!(sequence.get() >= 3);
        other.join().unwrap();
        assert_eq!(sequence.get(), 5);
    });
}

#[test]
fn teeth() {
    bite("sequence");
}
