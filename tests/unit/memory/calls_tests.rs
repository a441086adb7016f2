use super::*;
use std::{panic::Location, thread};

fn all(calls: &Calls) -> Vec<Record> {
    let mut all = Vec::new();
    calls.read(|record| all.push(record));
    all
}

#[test]
fn a_reader_gets_one_call_and_never_parts_of_two() {
    let (log, calls) = new(None);
    assert_eq!(calls.last(), None);
    let known: [(&str, Site); 3] =
        [("a", Location::caller()), ("launch", here()), ("wait for blocking calls of the driver", here())];
    const ROUNDS: usize = crate::sync::rounds(300);
    drop(log.begin(Kind::Call, known[0].0, known[0].1, 0));
    thread::scope(|s| {
        let reader = s.spawn(|| {
            for _ in 0..ROUNDS {
                calls.read(|record| {
                    let found = known.iter().position(|call| call.0 == record.op && ptr::eq(call.1, record.site));
                    assert_eq!(found.map(|at| at as u64), Some(record.stream), "{} at {}", record.op, record.site);
                    assert!(record.sequence == 0 || record.sequence == 10 * record.stream);
                });
            }
        });
        for i in 0.. {
            let (op, site) = known[i % known.len()];
            let stream = (i % known.len()) as u64;
            log.begin(Kind::Call, op, site, stream).submitted(10 * stream, 4);
            if reader.is_finished() {
                break;
            }
        }
    });
}

#[test]
fn a_record_tells_what_is_known_of_a_call() {
    let (log, calls) = new(None);
    let site = here();
    let scope = log.begin(Kind::Scope, "scope begin", site, 0);
    let call = log.begin(Kind::Call, "all_reduce", site, 7);
    // Its meeting notes it again: that is the call that is open.
    assert!(log.collective("all_reduce", site, 4096, [0, 2, 70].into_iter()).is_none());
    log.algorithm("ring", site);
    let wait = log.wait("poll", 2);
    let [closure, reduce, waits] = all(&calls)[..] else { panic!("three records") };
    assert_eq!((closure.kind, reduce.kind, waits.kind), (Kind::Scope, Kind::Call, Kind::Wait));
    assert_eq!((reduce.op, reduce.call, reduce.site, reduce.stream), ("all_reduce", "all_reduce", site, 7));
    assert_eq!((reduce.bytes, reduce.members, reduce.algorithm), (4096, 0b101, Some("ring")));
    assert_eq!((waits.op, waits.call, waits.site, waits.awaited), ("poll", "all_reduce", site, Some(2)));
    assert_eq!((waits.end, reduce.end), (End::NotYet, End::NotYet));
    assert!(closure.begin <= reduce.begin && reduce.begin <= waits.begin);
    drop(wait);
    call.submitted(11, 9);
    drop((call, scope));
    assert_eq!(all(&calls).len(), 3);
    for record in all(&calls) {
        assert!(matches!(record.end, End::At(end) if end >= record.begin), "{record:?}");
    }
    assert_eq!((all(&calls)[1].sequence, all(&calls)[1].bytes), (11, 4096));
    assert_eq!(calls.last(), Some(("all_reduce", site)));
}

/// The number of the oldest record shows where the window begins (pytorch#117883). A late end changes no other record.
#[test]
fn the_oldest_records_are_overwritten() {
    let (log, calls) = new(None);
    let scope = log.begin(Kind::Scope, "scope begin", here(), 0);
    for _ in 0..RECORDS {
        drop(log.begin(Kind::Call, "fill", here(), 1));
    }
    assert_eq!((all(&calls).len(), all(&calls)[0].number), (RECORDS, 1));
    drop(scope);
    assert!(all(&calls).iter().all(|record| record.op == "fill" && record.end == End::Unknown));
    assert_eq!(calls.read(|_| ()), RECORDS as u64 + 1);
}

#[track_caller]
fn here() -> Site {
    Location::caller()
}
