//! Models of the ring of records: a reader gets whole records with their own numbers, also while the writer overwrites
//! them.

use super::support::{bite, check, spawn};
use crate::sync::{History, shim::Arc};

/// Three records in a ring of two. Each has its number and ten times the number.
#[test]
fn a_reader_gets_whole_records() {
    check(|| {
        let history = Arc::new(History::<2>::new(2));
        let writer = spawn(&history, |history| {
            for number in 0..3 {
                assert_eq!(history.push([1 + number, 10 * (1 + number)]), number);
            }
        });
        history.read(|number, words| assert_eq!(words, [1 + number, 10 * (1 + number)], "torn"));
        let mut rest = Vec::new();
        writer.join().unwrap();
        assert_eq!(history.read(|number, _| rest.push(number)), 3);
        assert_eq!(rest, [1, 2]);
    });
}

/// A word that is filled in later belongs to its record: not to the one that has taken its place.
#[test]
fn a_late_word_is_of_its_record() {
    check(|| {
        let history = Arc::new(History::<2>::new(2));
        let writer = spawn(&history, |history| {
            for number in 0..3 {
                history.push([number, 0]);
            }
            history.set(0, 1, 7);
            history.set(2, 1, 9);
        });
        history.read(|number, words| {
            assert!(words == [number, 0] || words == [2, 9], "a word of another record: {words:?}");
        });
        writer.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("history");
}
