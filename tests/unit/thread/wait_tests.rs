use super::*;

#[test]
fn only_a_thread_with_a_core_to_spare_and_real_time_lingers() {
    assert_eq!(
        [(32, 2), (3, 2), (2, 2), (1, 2)].map(|(cores, n)| linger(cores, n, false) > Duration::ZERO),
        [true, true, false, false]
    );
    assert_eq!(linger(32, 2, true), Duration::ZERO);
    assert!(linger(32, 2, false) < TICK, "a deadlock is looked for, and the deadline kept, as soon as ever");
}
