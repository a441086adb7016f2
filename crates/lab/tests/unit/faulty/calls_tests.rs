use super::*;

#[test]
fn a_link_may_be_as_slow_as_one_likes() {
    let (ms, most) = (Duration::from_millis(1), Duration::MAX);
    assert_eq!(slowed(ms, 2 * ms, 3 << 20), 7 * ms);
    assert_eq!(slowed(ms, ms, 0), ms);
    assert_eq!([slowed(most, ms, 1 << 20), slowed(ms, most, 4 << 20), slowed(most, most, 4 << 20)], [most; 3]);
}
