use super::*;

#[test]
fn steps_do_not_depend_on_the_number_of_cores() {
    assert_eq!([1, 2, 16, 64].map(|cores| copy_threads(cores, 2, true)), [1; 4]);
    assert_eq!([1, 2, 16, 64].map(|cores| copy_threads(cores, 2, false)), [1, 1, 4, 4]);
}

#[test]
fn a_thread_without_a_core_to_spare_does_not_poll_for_long() {
    assert_eq!([4, 3, 1].map(|cores| polls(cores, 2, false)), [2000, 1, 1]);
    assert_eq!(polls(32, 2, true), 0);
}

#[test]
fn weights_must_be_positive() {
    assert!(valid_weights(&[1.0, 0.0], 2).is_err());
    assert!(valid_weights(&[1.0, f64::NAN], 2).is_err());
    assert!(valid_weights(&[1.0], 2).is_err());
    assert!(valid_weights(&[1.0, 2.0], 2).is_ok());
}
