use super::*;
use std::thread;

#[test]
fn a_reader_gets_one_call_and_never_parts_of_two() {
    let (log, last) = new();
    assert_eq!(last.get(), None);
    let calls: [(&str, Site); 3] =
        [("a", Location::caller()), ("launch", here()), ("wait for blocking calls of the driver", here())];
    const ROUNDS: usize = crate::sync::rounds(30_000);
    log.note(calls[0].0, calls[0].1);
    thread::scope(|s| {
        let reader = s.spawn(|| {
            for _ in 0..ROUNDS {
                let (op, site) = last.get().unwrap();
                assert!(calls.iter().any(|call| call.0 == op && ptr::eq(call.1, site)), "{op} at {site}");
            }
        });
        for i in 0.. {
            let (op, site) = calls[i % calls.len()];
            log.note(op, site);
            if reader.is_finished() {
                break;
            }
        }
    });
}

#[track_caller]
fn here() -> Site {
    Location::caller()
}
