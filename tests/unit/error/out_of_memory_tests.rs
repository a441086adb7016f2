use super::{super::site::site, *};
use crate::Error;
use std::{panic::Location, sync::Arc};

const MIB: u64 = 1 << 20;

#[track_caller]
fn report() -> OutOfMemoryReport {
    OutOfMemoryReport {
        device: 2,
        op: "upload",
        site: Some(site("upload", 33)),
        requested: 24 * MIB,
        limit: None,
        in_use: 40 * MIB,
        reserved: 44 * MIB,
        free_in_pool: 4 * MIB,
        largest_free: 2 * MIB,
        pending: vec![PendingOnStream { device: 2, stream: 5, bytes: MIB }],
        driver_free: 12 * MIB,
        driver_total: 64 * MIB,
        recorded: true,
        holders: vec![
            Holder { site: Some(site("zeros", 12)), blocks: 2, bytes: 32 * MIB },
            Holder { site: Some(site("upload", 33)), blocks: 1, bytes: 8 * MIB },
        ],
        jobs: vec![
            BookedJob { name: "fold 7".to_owned(), bytes: 48 * MIB, site: Location::caller() },
            BookedJob { name: "job".to_owned(), bytes: 0, site: Location::caller() },
        ],
        rungs: vec!["own lists", "other streams", "a new chunk", "giving chunks back"],
    }
}

fn hint(report: &OutOfMemoryReport) -> String {
    report.to_string().rsplit_once("hint: ").unwrap().1.to_owned()
}

#[test]
fn one_fact_to_a_line_below_the_errors_first() {
    let report = report();
    let place = report.jobs[0].site;
    let error = Error::OutOfMemory {
        device: 2,
        op: "upload",
        requested: 24 * MIB,
        in_use: 40 * MIB,
        free: 12 * MIB,
        capacity: 64 * MIB,
        report: Arc::new(report),
    };
    let expected = format!(
        "\
device 2 is out of memory in upload: 25165824 bytes requested, 41943040 in use, 12582912 free of 67108864
  asked for        24.0 MiB by upload at src/train.rs:33:9
  in use           40.0 MiB in live buffers
  free in pool      4.0 MiB, the largest piece 2.0 MiB
  of it pending     1.0 MiB until stream 5 of device 2 is done
  reserved         44.0 MiB from the driver
  driver's free    12.0 MiB of the device's 64.0 MiB
  tried in vain  own lists, other streams, a new chunk, giving chunks back
  held by
      32.0 MiB in 2 blocks     zeros at src/train.rs:12:9
       8.0 MiB in 1 block      upload at src/train.rs:33:9
  booked           48.0 MiB by fold 7 of {place}
  in flight: job of {place}, which has booked nothing
  hint: most is held by zeros at src/train.rs:12:9: 32.0 MiB in 2 buffers"
    );
    assert_eq!(error.to_string(), expected);
}

/// Unknown facts are left out.
#[test]
fn a_failure_outside_of_the_pool_is_short() {
    let report = OutOfMemoryReport { driver_free: MIB, driver_total: 80 * MIB, ..Default::default() };
    let text = report.to_string();
    assert!(
        text.starts_with("driver's free     1.0 MiB of the device's 80.0 MiB\nhint: 79.0 MiB of the device"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 2, "{text}");
}

/// Users of other pools could not distinguish fragmentation from a lack of memory: pytorch#152135, pytorch#35901.
#[test]
fn the_hint_knows_fragmentation_from_want() {
    let plain = OutOfMemoryReport { pending: Vec::new(), ..report() };
    let fragmented = OutOfMemoryReport { free_in_pool: 30 * MIB, ..plain.clone() };
    assert!(hint(&fragmented).starts_with("fragmentation: 30.0 MiB are free, but no piece is larger than 2.0 MiB"));
    // Pending memory is not fragmented, but still in use.
    let busy = PendingOnStream { device: 1, stream: 0, bytes: 28 * MIB };
    let pending = OutOfMemoryReport { pending: vec![busy], ..fragmented.clone() };
    assert!(hint(&pending).starts_with("28.0 MiB were freed, but queued work still uses them"), "{}", hint(&pending));
    // Neither of them: live buffers hold the memory.
    assert!(hint(&plain).starts_with("most is held by zeros"));
    let unknown = OutOfMemoryReport { holders: vec![Holder { site: None, blocks: 1, bytes: 9 }], ..plain.clone() };
    assert!(hint(&unknown).contains("before recording began"));
}

#[test]
fn the_hint_knows_what_no_pool_can_help() {
    let limited = OutOfMemoryReport { limit: Some(16 * MIB), ..report() };
    assert!(hint(&limited).starts_with("this request alone is more than the limit allows"));
    let huge = OutOfMemoryReport { requested: 1 << 50, ..report() };
    assert!(hint(&huge).starts_with("this request alone is more than the device has"));
    let shared = OutOfMemoryReport { reserved: 4 * MIB, in_use: 4 * MIB, free_in_pool: 0, ..report() };
    assert!(hint(&shared).starts_with("48.0 MiB of the device are held by others"), "{}", hint(&shared));
    // Under a limit the rest of the device does not matter.
    let limited = OutOfMemoryReport { limit: Some(32 * MIB), ..shared };
    assert!(hint(&limited).starts_with("most is held by"));
}

#[test]
fn without_recording_the_hint_says_how_to_turn_it_on() {
    let blind = OutOfMemoryReport { recorded: false, holders: Vec::new(), pending: Vec::new(), ..report() };
    assert!(hint(&blind).contains(HOW_TO_RECORD));
}
