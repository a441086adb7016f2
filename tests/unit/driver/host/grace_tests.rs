use super::*;

/// Time is an argument, so the test does not depend on the load of the computer.
#[test]
fn a_program_is_blocked_only_if_look_after_look_says_so() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut grace = GraceTimer::new(start, 7);
    // The program is seen at work once every 20 ms.
    for ms in 1..900 {
        assert!(!grace.is_over(at(ms), || ms % 20 == 0), "{ms}");
    }
    assert!(grace.is_over(at(1000), || true), "it computes for too long");
    let mut grace = GraceTimer::new(start, 7);
    let over = (1..).find(|&ms| grace.is_over(at(ms), || false));
    assert!((50..=60).contains(&over.unwrap()), "{over:?}");
    assert!(!grace.is_over(at(70), || true), "it has come back to work");
    // The process was stopped for a minute: no thread had time to block.
    let mut grace = GraceTimer::new(start, 7);
    assert!(![2, 60_000, 60_002].iter().any(|&ms| grace.is_over(at(ms), || false)));
}
