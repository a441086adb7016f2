use super::*;
use std::panic::Location;

fn here() -> (Site, String) {
    let site = Location::caller();
    (site, site.to_string())
}

fn operation(
    op: &'static str,
    detail: &str,
    stream: Option<(usize, usize)>,
    write: bool,
    site: Option<Site>,
) -> Operation {
    let (device, stream) = stream.unzip();
    Operation { op, detail: detail.into(), site, device, stream, write }
}

fn report(kind: Kind, now: Operation, before: Option<Operation>, allocation: Option<Allocation>) -> Report {
    let missing = before.as_ref().map_or_else(|| "something".into(), |before| edge(kind, &now, before));
    Report { kind, now, before, bytes: 0..4096, allocation, missing }
}

#[test]
fn a_race_names_both_operations_and_the_missing_edge() {
    let (site, at) = here();
    let buffer = Allocation { device: Some(0), bytes: 8192, by: Some(("zeros", site)), freed: None };
    let now = operation("copy", "peer copy", Some((1, 1)), false, Some(site));
    let before = operation("launch", "`saxpy`", Some((0, 0)), true, Some(site));
    assert_eq!(
        report(Kind::Race, now, Some(before), Some(buffer)).to_string(),
        format!(
            "race on bytes 0..4096 of a buffer of 8192 bytes on device 0\n  \
               now:    copy (peer copy, reads) on stream 1 of device 1  at {at}\n  \
               before: launch (`saxpy`, writes) on stream 0 of device 0 at {at}\n  \
               buffer: allocated by zeros at {at}\n  \
               missing: stream 1 of device 1 never waited for `saxpy` on stream 0 of device 0: record an event on \
               stream 0 of device 0 after it, and make stream 1 of device 1 wait for it before the copy"
        )
        .replace("device 0 at", "device 0  at")
        .replace("device 1  at", "device 1   at")
    );
}

#[test]
fn without_places_the_drivers_calls_are_named() {
    let now = operation("mem_free", "", None, true, None);
    let before = operation("fill_u8", "", Some((2, 0)), true, None);
    let buffer = Allocation { device: Some(2), bytes: 4096, by: None, freed: None };
    assert_eq!(
        report(Kind::FreeInUse, now, Some(before), Some(buffer)).to_string(),
        "memory freed while it is in use: bytes 0..4096 of a buffer of 4096 bytes on device 2\n  \
           now:    mem_free (frees) on the host\n  \
           before: fill_u8 (writes) on stream 0 of device 2\n  \
           buffer: allocated by a call of the driver\n  \
           missing: the calling thread never waited for `fill_u8` on stream 0 of device 2: wait for that stream, \
           or for an event recorded on it after `fill_u8`, before the mem_free"
    );
}

#[test]
fn reuse_tells_of_the_old_buffer() {
    let (site, at) = here();
    let old =
        Allocation { device: Some(0), bytes: 4096, by: Some(("upload", site)), freed: Some(Some(("drop", site))) };
    let now = operation("zeros", "fill", Some((0, 1)), true, Some(site));
    let before = operation("sum", "", Some((0, 0)), false, Some(site));
    let text = report(Kind::EarlyReuse, now, Some(before), Some(old)).to_string();
    assert!(
        text.starts_with("memory reused too early: bytes 0..4096 of a buffer of 4096 bytes on device 0\n"),
        "{text}"
    );
    assert!(text.contains(&format!("\n  buffer: allocated by upload at {at}; freed by drop at {at}\n")), "{text}");
    assert!(text.contains("which used the memory for the buffer that had it before: record an event"), "{text}");
}

#[test]
fn each_kind_begins_with_what_it_is() {
    let buffer = |freed| Allocation { device: None, bytes: 9000, by: None, freed };
    let stream = operation("copy_to_host", "", Some((0, 3)), true, None);
    for (kind, freed, starts) in [
        (Kind::Race, None, "race on bytes 0..4096 of a buffer of 9000 bytes in host memory that devices see\n"),
        (Kind::UseAfterFree, Some(None), "use after free on bytes 0..4096 of a buffer of 9000 bytes in host memory"),
        (Kind::FreeInUse, None, "memory freed while it is in use: bytes 0..4096 of"),
        (Kind::EarlyReuse, Some(None), "memory reused too early: bytes 0..4096 of"),
        (Kind::HostAccess, None, "the host touches what a device may still be using: bytes 0..4096 of"),
        (Kind::UninitializedRead, None, "read of bytes that nobody has written: bytes 0..4096 of"),
        (Kind::WrongDeclaration, None, "write through an argument that is declared as read: bytes 0..4096 of"),
        (Kind::OutOfBounds, Some(None), "write out of bounds: bytes 0..4096 of a buffer of 9000 bytes in host memory"),
    ] {
        let text = report(kind, stream.clone(), Some(stream.clone()), Some(buffer(freed))).to_string();
        assert!(text.starts_with(starts), "{text}");
        assert_eq!(text.contains("; freed since\n"), freed.is_some(), "{text}");
    }
    let mut event = report(Kind::UnrecordedEvent, stream, None, None);
    assert!(event.to_string().contains(": 4096 bytes at 0x0\n"), "an address where no allocation is known");
    event.bytes = 0..0;
    let text = event.to_string();
    assert!(text.starts_with("wait for an event that was never recorded\n  now:"), "{text}");
    assert!(text.ends_with("\n  missing: something"), "{text}");
}
