use super::*;

#[test]
fn polling_ends_with_yes_with_the_limit_and_with_an_error() {
    let mut asked = 0;
    let third = poll(Duration::from_secs(10), || {
        asked += 1;
        Ok(asked == 3)
    });
    assert_eq!((third, asked), (Ok(true), 3));
    assert_eq!(poll(Duration::ZERO, || Ok(false)), Ok(false));
    let t = Instant::now();
    assert_eq!(poll(Duration::from_millis(2), || Ok(false)), Ok(false));
    assert!(t.elapsed() >= Duration::from_millis(2));
    assert_eq!(poll(Duration::MAX, || Err(fault::fault(700, ""))), Err(fault::fault(700, "")));
}

/// Whether `look` succeeds in one of several tries. On a busy computer a thread may lose its core for longer than
/// the effect lasts, and then a single try proves nothing.
fn is_seen(mut look: impl FnMut() -> bool) -> bool {
    (0..50).any(|_| look())
}

#[test]
fn a_wait_that_goes_on_does_not_begin_to_spin_again() {
    let slices = |between| {
        thread::spawn(move || {
            let mut looks = Vec::new();
            for _ in 0..5 {
                let mut asked = 0;
                let answer = poll(Duration::from_millis(5), || {
                    asked += 1;
                    Ok(false)
                });
                assert_eq!(answer, Ok(false));
                looks.push(asked);
                thread::sleep(between);
            }
            looks
        })
    };
    // 5 ms in sleeps of 50 us and more, from the third slice on.
    assert!(is_seen(|| slices(Duration::ZERO).join().unwrap()[3..].iter().all(|looks| *looks <= 110)));
    // Slices far apart are separate waits; each ends, regardless of its sleeps.
    assert!(slices(Duration::from_millis(2)).join().unwrap().iter().all(|looks| *looks >= 2));
}

#[test]
fn who_loses_its_core_sleeps_for_a_while() {
    let looks = || {
        let mut asked = 0;
        for lost in [true, false] {
            asked = 0;
            let answer = poll(Duration::from_millis(8), || {
                asked += 1;
                if lost && asked == 2 {
                    thread::sleep(Duration::from_millis(2));
                }
                Ok(false)
            });
            assert_eq!(answer, Ok(false));
            thread::sleep(Duration::from_millis(2));
        }
        asked
    };
    // 100 us of polls without a pause, if there are idle cores, and 8 ms of sleeps.
    assert!(is_seen(|| thread::spawn(looks).join().unwrap() < 4000));
}
