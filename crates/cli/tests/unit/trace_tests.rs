//! The summary of a small trace, whose sums are easy to check by hand; flight records of two processes.

use super::{
    flight,
    read::{self, Content, Event, Unreadable},
    shown, summary,
};
use serde_json::{Value, json};

const TRACE: &str = include_str!("trace/small.json");

fn trace(text: &str) -> Result<(Vec<Event>, bool), Unreadable> {
    match read::content(text)? {
        Content::Trace(events, whole) => Ok((events, whole)),
        Content::Record(_) => panic!("a flight record"),
    }
}

/// GPU 0 computes 0-400 and 600-700, communicates 350-600 and waits 380-590 on its thread: busy 700 of 1000, 250 of
/// communication, of which 200 are exposed. GPU 1 computes 100-900 and communicates 500-600, hidden.
#[test]
fn sums_of_a_small_trace() {
    let (events, whole) = trace(TRACE).unwrap();
    let summary = summary::summary(&events, whole, 8);
    assert!(whole);
    assert_eq!(summary.span_us, 1000.0);
    let found: Vec<_> = summary
        .gpus
        .iter()
        .map(|gpu| (&*gpu.name, gpu.busy_us, gpu.communication_us, gpu.exposed_us, gpu.thread_waits_us))
        .collect();
    assert_eq!(found, [("GPU 0", 700.0, 250.0, 200.0, 210.0), ("GPU 1", 800.0, 100.0, 0.0, 50.0)]);
    assert_eq!((summary.waits[0].us, summary.waits[0].cause.as_deref()), (210.0, Some("GPU 1 thread: backward")));
    assert_eq!(shown(&summary), include_str!("trace/small.txt"));
}

/// A killed program leaves a file that ends within an event.
#[test]
fn a_file_without_its_end_is_read() {
    let cut = &TRACE[..TRACE.rfind("copy").unwrap()];
    let (events, whole) = trace(cut).unwrap();
    let (all, _) = trace(TRACE).unwrap();
    assert!(!whole);
    assert_eq!(events.len(), all.len() - 1);
    let (none, whole) = trace("[\n").unwrap();
    assert!(none.is_empty() && !whole);
}

#[test]
fn an_object_with_events_is_read_and_other_files_are_refused() {
    let (events, _) = trace(&format!("{{\"traceEvents\":{}}}", TRACE.trim())).unwrap();
    assert_eq!(events.len(), trace(TRACE).unwrap().0.len());
    assert!(matches!(trace("name = \"gpu-pool\""), Err(Unreadable::Kind)));
    assert!(matches!(trace("{\"version\": 1}"), Err(Unreadable::Kind)));
    assert!(matches!(trace("[{\"ph\": 3}]"), Err(Unreadable::Event(1, _))));
}

/// A record of process `process`, made at this time: its device 0 is in these calls, each with the time of its begin.
fn record(process: usize, unix_seconds: f64, missing: Value, calls: &[(&str, &str, f64)]) -> Value {
    let call = |&(kind, op, begin_us): &(&str, &str, f64)| {
        json!({
            "number": 0, "kind": kind, "op": op, "call": op, "file": "a.rs", "line": 7, "column": 1, "bytes": 8,
            "members": [], "awaited": if kind == "wait" { json!(1) } else { Value::Null }, "algorithm": null,
            "stream": 3, "sequence": 1, "begin_us": begin_us, "ended": kind == "call", "end_us": null,
            "done": if kind == "call" { json!(false) } else { Value::Null },
        })
    };
    let calls: Vec<_> = calls.iter().map(call).collect();
    let streams =
        json!([{ "stream": 3, "submitted": 5, "completed": 3 }, { "stream": 4, "submitted": 1, "completed": 1 }]);
    json!({
        "gpu_pool_flight_record": 1, "reason": "hung", "missing": missing, "pid": 7, "process": process,
        "unix_seconds": unix_seconds, "later": "a field that is not known",
        "devices": [{ "device": 0, "name": "a GPU", "now_us": 10e3, "streams": streams, "records": calls }],
    })
}

fn flight_record(json: &str) -> Result<flight::Record, Unreadable> {
    match read::content(json)? {
        Content::Trace(..) => panic!("a trace"),
        Content::Record(record) => Ok(record),
    }
}

/// Process 1 has made its record 4 ms after process 0, so a call at 5 ms of its clock is as old as one at 9 ms there.
#[test]
fn flight_records_of_several_processes_are_on_one_axis() {
    let waits = [("scope", "begin", 1e3), ("call", "upload", 3e3), ("wait", "sum", 9e3)];
    let first = record(0, 100.0, json!([]), &waits);
    let earlier = record(1, 99.0, json!([]), &[]);
    let second = record(1, 100.004, json!([0]), &[("scope", "begin", 1e3), ("call", "fill", 7.5e3)]);
    let summary =
        |order: [&Value; 3]| flight::summary(order.map(|json| flight_record(&json.to_string()).unwrap()).into(), 2);
    let found = summary([&second, &first, &earlier]);
    assert_eq!(flight::shown(&found), flight::shown(&summary([&earlier, &second, &first])));
    assert_eq!(found.reasons.len(), 3);
    let states: Vec<_> = found.devices.iter().map(|now| (now.missing, now.for_ms, &*now.state)).collect();
    let stuck = "runs its closure; last call: fill, 8 bytes (a.rs:7:1)";
    assert_eq!(states, [(true, Some(9.0), stuck), (false, Some(1.0), "waits for device 1 in sum")]);
    let calls: Vec<_> = found.calls.iter().map(|call| (call.ago_ms.round(), &*call.call)).collect();
    assert_eq!(
        calls,
        [
            (11.0, "upload, 8 bytes"),
            (9.0, "begin, 8 bytes"),
            (5.0, "waits for device 1 in sum"),
            (3.0, "fill, 8 bytes")
        ]
    );
    let open: Vec<_> = found.open.iter().map(|open| (open.stream, open.operations, open.first.as_deref())).collect();
    assert_eq!(open, [(3, 2, Some("upload, 8 bytes (a.rs:7:1)")), (3, 2, Some("fill, 8 bytes (a.rs:7:1)"))]);
}

#[test]
fn a_flight_record_that_cannot_be_read_is_refused() {
    let whole = record(0, 1.0, json!([]), &[("call", "fill", 1.0)]).to_string();
    assert!(flight_record(&whole).is_ok());
    let refused = |text: &str| flight_record(text).err().expect("it is refused");
    assert!(matches!(refused(&whole.replace("record\":1", "record\":2")), Unreadable::Version(2)));
    for end in [1, whole.len() / 2, whole.len() - 1] {
        assert!(matches!(refused(&whole[..end]), Unreadable::Cut), "{end}");
    }
    assert!(matches!(refused(&whole.replace("\"pid\":7,", "")), Unreadable::Json(_)));
}
