use gpu_pool::extend::sync::*;
use std::array;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn readers_see_whole_writes_in_order() {
    const LAST: u64 = crate::rounds(200_000) as u64;
    let (mirror, done) = (Mirror::<8>::new(), AtomicBool::new(false));
    std::thread::scope(|s| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                s.spawn(|| {
                    let mut newest = 0;
                    while !done.load(Ordering::Relaxed) {
                        let values = mirror.read();
                        assert_eq!(values, array::from_fn(|i| values[0] * (i as u64 + 1)), "torn");
                        assert!(values[0] >= newest, "older than what was seen before");
                        newest = values[0];
                    }
                })
            })
            .collect();
        for value in 1..=LAST {
            mirror.write(array::from_fn(|i| value * (i as u64 + 1)));
        }
        done.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(mirror.read()[0], LAST);
}

#[test]
fn what_was_seen_is_not_read_again() {
    let mirror = Mirror::new();
    assert_eq!((mirror.read(), mirror.try_read_after(0)), ([0], None));
    mirror.write([7]);
    assert_eq!((mirror.try_read_after(0), mirror.try_read_after(1)), (Some((1, [7])), None));
}
