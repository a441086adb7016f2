//! What a report says, and that the checker is a driver like any other.

use crate::rig::*;
use gpu_pool::extend::driver::{
    FaultKind, RawStream,
    host::{self, HostConfig},
};
use gpu_pool_lab::check::{self, Kind, annotate};
use gpu_pool_lab::prelude::*;
use std::sync::Arc;

#[test]
fn a_report_names_the_places_of_its_user() {
    let [a, b] = &two_gpus();
    let (s, _, t) = (stream(a), stream(b), stream(b));
    let first = line() + 1;
    let x = annotate("weights", || a.mem_alloc(8192)).unwrap();
    // SAFETY: in range; waited for below.
    annotate("init", || unsafe { a.fill_u8(x, 1, 8192, s) }).unwrap();
    let report = caught(annotate("pull", || peer(b, memory(b), a, x, t)), Kind::Race);
    let file = file!();
    let at = |below: u32, column: u32| format!("{file}:{}:{column}", first + below);
    let text = report.to_string();
    for part in [
        "race on bytes 0..4096 of a buffer of 8192 bytes on device 0\n".to_owned(),
        "\n  now:    pull (peer copy, reads) on stream 1 of device 1  at ".to_owned(),
        format!("\n  before: init (fill, writes) on stream 0 of device 0      at {}", at(2, 5)),
        format!("\n  buffer: allocated by weights at {}", at(0, 13)),
        "\n  missing: stream 1 of device 1 never waited for `init` on stream 0 of device 0: record an event on stream \
         0 of device 0 after it, and make stream 1 of device 1 wait for it before the pull"
            .to_owned(),
    ] {
        assert!(text.contains(&part), "{part}\n---\n{text}");
    }
    assert_eq!(report.now.site.unwrap().line(), first + 3);
    idle(a, s);
}

/// Wrapping twice changes nothing, and what is not of the checker comes through.
#[test]
fn a_wrapped_driver_is_a_driver() {
    let once = gpus(2);
    let again = check::wrap(once.clone());
    assert!(once.iter().zip(&again).all(|(a, b)| Arc::ptr_eq(a, b)));
    assert!(once.iter().all(|gpu| gpu.as_any().is::<host::HostGpu>()));
    assert!(Arc::ptr_eq(once[0].checker().unwrap().0, once[1].checker().unwrap().0));
    assert!(host::machine(&[HostConfig::default()])[0].checker().is_none());
    let lost = once[0].stream_query(RawStream(77)).unwrap_err();
    assert_eq!((lost.kind, lost.report), (FaultKind::InvalidArgument, None));
    // A peer that is not wrapped will do, too.
    let plain = host::machine(&vec![HostConfig::default(); 2]);
    let checked = check::wrap(plain.clone());
    checked[0].enable_peer(&*plain[1]).unwrap();
    let (x, y, s) = (memory(&checked[0]), memory(&plain[1]), stream(&checked[0]));
    peer(&checked[0], x, &plain[1], y, s).unwrap();
    idle(&checked[0], s);
}
