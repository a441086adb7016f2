use super::*;

#[test]
fn writers_exclude_and_readers_share() {
    let mut active = Active::new();
    active.claim(1, 100, 50, false);
    assert!(!active.conflicts(100, 50, false));
    assert!(active.conflicts(149, 1, true) && !active.conflicts(150, 9, true) && !active.conflicts(90, 10, true));
    active.claim(2, 200, 8, true);
    assert!(active.conflicts(207, 1, false));
    active.release(2);
    assert!(!active.conflicts(207, 1, false) && active.conflicts(120, 1, true));
}
