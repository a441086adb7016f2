use gpu_pool::extend::sync::*;
use std::{hint, thread};

#[test]
fn a_word_is_raised_and_never_lowered() {
    let mut word = 5u64;
    let at = &raw mut word;
    // SAFETY: alive, aligned, and used only by this thread.
    let seen = [7, 6].map(|value| unsafe {
        raise_word(at, value);
        load_word(at)
    });
    assert_eq!(seen, [7, 7]);
}

/// Message passing through a word, with plain data beside it: tsan and Miri would report a race if an ordering were
/// missing.
#[test]
fn what_was_stored_before_is_seen() {
    const ROUNDS: u64 = crate::rounds(1000) as u64;
    let mut memory = [0u64; 3];
    let start = (&raw mut memory) as usize;
    let at = move |i: usize| (start as *mut u64).wrapping_add(i);
    // The word at 0 says that the data at 2 is full, the word at 1 that it was read.
    thread::scope(|s| {
        s.spawn(move || {
            for round in 1..=ROUNDS {
                // SAFETY: the words outlive the scope, are accessed atomically, and hand the data back and forth.
                unsafe {
                    at(2).write(round * 3);
                    store_word(at(0), round);
                    while load_word(at(1)) != round {
                        thread::yield_now();
                    }
                }
            }
        });
        for round in 1..=ROUNDS {
            // SAFETY: as above.
            unsafe {
                while load_word(at(0)) != round {
                    hint::spin_loop();
                    thread::yield_now();
                }
                assert_eq!(at(2).read(), round * 3);
                store_word(at(1), round);
            }
        }
    });
}
