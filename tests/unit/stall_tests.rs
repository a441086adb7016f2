use super::*;

const MS: Duration = Duration::from_millis(1);

/// The time at which a deadline of 100 ms passes, if the looks are at these times.
fn over(looks: impl IntoIterator<Item = u32>) -> Option<u32> {
    let start = Instant::now();
    let mut stall = StallTimer::starting(100 * MS, start);
    looks.into_iter().find(|&at| stall.look(start + at * MS))
}

#[test]
fn who_looks_often_goes_by_the_clock() {
    assert_eq!(over(0..1000), Some(100));
    assert_eq!(over((0..1000).step_by(10)), Some(100));
    assert_eq!(over((0..1000).step_by(25)), Some(100));
}

#[test]
fn time_in_which_nobody_looked_counts_a_quarter_at_most() {
    // The process is stopped for an hour at 20 ms: when it continues, 20 + 25 ms are counted.
    assert_eq!(over((0..3).map(|i| 10 * i).chain((0..100).map(|i| 3_600_000 + 10 * i))), Some(3_600_060));
}

#[test]
fn four_looks_are_enough_however_long_they_take() {
    assert_eq!(over([1000, 2000, 3000]), None);
    assert_eq!(over([1000, 2000, 3000, 4000]), Some(4000));
    // A limit that is not a multiple of four needs neither more nor fewer looks.
    let start = Instant::now();
    let mut stall = StallTimer::starting(Duration::from_nanos(103), start);
    assert_eq!([1, 2, 3, 4].map(|s| stall.look(start + s * 1000 * MS)), [false, false, false, true]);
}

#[test]
fn no_deadline_passes_at_once_and_an_endless_one_never() {
    assert!(StallTimer::new(Duration::ZERO).is_over());
    let start = Instant::now();
    let mut endless = StallTimer::starting(Duration::MAX, start);
    assert!(!(1..1000).any(|day| endless.look(start + Duration::from_secs(86_400) * day)));
}

#[test]
fn it_starts_anew_when_somebody_gets_on() {
    let began = Instant::now();
    let mut stall = StallTimer::starting(100 * MS, began);
    let look = |stall: &mut StallTimer| stall.look(stall.looked + 30 * MS);
    assert!((0..3).all(|_| !look(&mut stall)));
    stall.renew();
    assert!(stall.since > began, "from then on is what an error tells");
    assert_eq!((1..9).find(|_| look(&mut stall)), Some(4));
}

#[test]
fn short_deadlines_are_looked_at_in_time() {
    assert_eq!(StallTimer::new(120_000 * MS).tick(500 * MS), 500 * MS);
    assert_eq!(StallTimer::new(200 * MS).tick(500 * MS), 50 * MS);
}
