//! What events order, and what they do not.

use crate::rig::*;
use gpu_pool_lab::check::Kind;
use std::time::Duration;

#[test]
fn a_chain_of_events_over_three_devices() {
    for cut in [None, Some(0), Some(1)] {
        let gpus = gpus(3);
        let (streams, x) = (gpus.iter().map(stream).collect::<Vec<_>>(), memory(&gpus[0]));
        fill(&gpus[0], x, 1, streams[0]).unwrap();
        for i in 0..2 {
            if cut != Some(i) {
                order(&gpus[i], streams[i], &gpus[i + 1], streams[i + 1]);
            }
        }
        let last = peer(&gpus[2], memory(&gpus[2]), &gpus[0], x, streams[2]);
        match cut {
            None => last.unwrap(),
            Some(_) => drop(caught(last, Kind::Race)),
        }
        gpus.iter().zip(streams).for_each(|(gpu, s)| idle(gpu, s));
    }
}

#[test]
fn a_wait_captures_the_latest_record_at_the_time_of_the_call() {
    let gpu = &gpus(1)[0];
    let (x, y, s, t, e) = (memory(gpu), memory(gpu), stream(gpu), stream(gpu), event(gpu));
    fill(gpu, x, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    fill(gpu, y, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    fill(gpu, x, 2, t).unwrap();
    caught(fill(gpu, y, 2, t), Kind::Race);
    gpu.stream_wait_event(t, e).unwrap();
    fill(gpu, y, 2, t).unwrap();
    // Recorded on another stream it says nothing of the first any more.
    let (z, u) = (memory(gpu), stream(gpu));
    fill(gpu, z, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    gpu.event_record(e, u).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    caught(fill(gpu, z, 2, t), Kind::Race);
    idle(gpu, s);
    idle(gpu, t);
}

#[test]
fn an_event_that_was_never_recorded_is_waited_for() {
    let gpu = &gpus(1)[0];
    let (s, e) = (stream(gpu), event(gpu));
    assert!(gpu.event_query(e).unwrap(), "to ask is no mistake");
    let report = caught(gpu.stream_wait_event(s, e), Kind::UnrecordedEvent);
    assert_eq!((report.now.op, report.now.stream), ("stream_wait_event", Some(0)));
    caught(gpu.event_wait(e, Duration::ZERO).map(drop), Kind::UnrecordedEvent);
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(s, e).unwrap();
    assert!(gpu.event_wait(e, Duration::from_secs(300)).unwrap());
}
