//! The summary of a small trace, whose sums are easy to check by hand.

use super::{read, shown, summary};

const TRACE: &str = include_str!("trace/small.json");

/// GPU 0 computes 0-400 and 600-700, communicates 350-600 and waits 380-590 on its thread: busy 700 of 1000, 250 of
/// communication, of which 200 are exposed. GPU 1 computes 100-900 and communicates 500-600, hidden.
#[test]
fn sums_of_a_small_trace() {
    let (events, whole) = read::events(TRACE).unwrap();
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
    let (events, whole) = read::events(cut).unwrap();
    let (all, _) = read::events(TRACE).unwrap();
    assert!(!whole);
    assert_eq!(events.len(), all.len() - 1);
    let (none, whole) = read::events("[\n").unwrap();
    assert!(none.is_empty() && !whole);
}

#[test]
fn an_object_with_events_is_read_and_other_files_are_refused() {
    let (events, _) = read::events(&format!("{{\"traceEvents\":{}}}", TRACE.trim())).unwrap();
    assert_eq!(events.len(), read::events(TRACE).unwrap().0.len());
    assert!(read::events("name = \"gpu-pool\"").is_err());
    assert!(read::events("[{\"ph\": 3}]").unwrap_err().starts_with("event 1: "));
}
