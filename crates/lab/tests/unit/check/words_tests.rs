use super::{Touch::*, *};

const A: Block = Block { device: 0, number: 0 };
const B: Block = Block { device: 1, number: 0 };

/// One meeting: both send into a room of the other, wait, and wipe.
fn meets(words: &mut Words, rooms: [Address; 2]) -> Result<(), Box<Report>> {
    words.access(A, rooms[0], Put)?;
    words.access(B, rooms[1], Put)?;
    for (by, room) in [(B, rooms[0]), (A, rooms[1])] {
        words.arrived(by, room)?;
        words.access(by, room, Wipe)?;
        words.ended(by.device);
    }
    Ok(())
}

#[test]
fn a_room_is_free_two_meetings_later_and_not_one() {
    let mut words = Words::default();
    for meeting in 0..6 {
        meets(&mut words, [0, 1000].map(|room| room + 16 * (meeting % 2))).unwrap();
    }
    let mut words = Words::default();
    meets(&mut words, [0, 1000]).unwrap();
    let report = meets(&mut words, [0, 1000]).unwrap_err();
    assert_eq!((report.kind, report.now.device, report.before.unwrap().device), (Kind::Race, Some(0), Some(1)));
}

#[test]
fn a_credit_frees_a_slot_within_a_kernel() {
    for credit in [true, false] {
        let mut words = Words::default();
        words.access(A, 0, Put).unwrap();
        words.arrived(B, 0).unwrap();
        words.access(B, 0, Wipe).unwrap();
        if credit {
            words.gives(B, 500);
            words.has_credit(A, 500);
        }
        assert_eq!(words.access(A, 0, Put).is_ok(), credit);
    }
}

#[test]
fn a_datum_that_nobody_waits_for_is_a_race_whoever_is_first() {
    let mut words = Words::default();
    words.access(A, 0, Put).unwrap();
    assert!(words.access(B, 0, Read).is_err(), "it has come already");
    let mut words = Words::default();
    words.access(B, 0, Read).unwrap();
    assert!(words.access(A, 0, Put).is_err(), "it comes later");
    words.forget(&(0..16));
    words.access(A, 0, Put).unwrap();
    assert!(words.access(A, 0, Put).is_err(), "not wiped");
    words.arrived(B, 0).unwrap();
    assert!(words.arrived(B, 0).is_err(), "not wiped, and taken twice");
}

/// A relaxed store tells nothing of what its kernel has done before it.
#[test]
fn a_datum_tells_what_was_before_its_kernel_and_only_to_the_next() {
    let mut words = Words::default();
    words.access(A, 0, Put).unwrap();
    words.access(A, 16, Put).unwrap();
    words.arrived(B, 16).unwrap();
    assert!(words.access(B, 0, Wipe).is_err(), "another word");
    words.ended(1);
    assert!(words.access(B, 0, Wipe).is_err(), "of the same kernel");
    words.ended(0);
    words.access(A, 32, Put).unwrap();
    words.arrived(B, 32).unwrap();
    assert!(words.access(B, 0, Wipe).is_err(), "not before this kernel's end");
    words.ended(1);
    words.access(B, 0, Wipe).unwrap();
}
