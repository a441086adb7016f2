//! Sequence and flag: who sees the number, or the flag, sees what was done before it was reached.

use super::support::{Watched, bite, check};
use crate::sync::{
    Flag, Sequence,
    shim::{Arc, thread},
};

/// One thread writes and calls `publish`; if `seen` then says so, the other may read.
fn publication<S: Default + 'static>(publish: fn(&S), seen: fn(&S) -> bool) {
    let state = Arc::new((S::default(), Watched::new(0)));
    let publishing = thread::spawn({
        let state = state.clone();
        move || {
            state.1.set(1);
            publish(&state.0);
        }
    });
    if seen(&state.0) {
        assert_eq!(state.1.get(), 1);
    }
    publishing.join().unwrap();
}

#[test]
fn raise_to() {
    check(|| publication::<Sequence>(|s| s.raise_to(3), |s| s.get() >= 3));
}

#[test]
fn flag() {
    check(|| publication::<Flag>(Flag::raise, Flag::is_raised));
}

/// The receiver of number 2 sees what the receiver of number 1 did before.
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
        let other = thread::spawn({
            let state = state.clone();
            move || draw(&state, 1)
        });
        let numbers = draw(&state, 0) + other.join().unwrap();
        assert_eq!(numbers, 1 + 2, "each number is drawn once");
    });
}

/// Raising from two sides ends at the higher, in either order.
#[test]
fn raise_to_keeps_the_higher() {
    check(|| {
        let sequence = Arc::new(Sequence::new());
        let other = thread::spawn({
            let sequence = sequence.clone();
            move || sequence.raise_to(5)
        });
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
