//! Streams: order, asynchrony, limits.

use crate::rig::*;
use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

pub fn operations_of_a_stream_run_in_order(rig: &Rig) {
    let device = rig.one();
    let (s, one, all) = (stream(device), mem(device, 4), mem(device, 4 * 300));
    for i in 0..300 {
        s.fill(&one, i);
        // SAFETY: ordered by the stream, waited for below.
        unsafe { device.copy_within(all.raw + 4 * u64::from(i), one.raw, 4, s.raw) }.unwrap();
    }
    s.wait();
    assert_eq!(read_words(&all), (0..300).collect::<Vec<_>>());
}

pub fn submission_does_not_wait(rig: &Rig) {
    let device = rig.one();
    let (s, x) = (stream(device), mem(device, 4096));
    let gate = s.gate();
    s.fill(&x, 7);
    s.wait_past(gate);
    assert!(s.is_idle());
    assert_eq!(read_words(&x), [7; 1024]);
}

/// An unrelated stream must get through (cudarc#169, TensorRT#3403: one thread's copy held up the other's).
pub fn streams_do_not_wait_for_each_other(rig: &Rig) {
    let device = rig.one();
    let (held, free) = (stream(device), stream(device));
    let (x, to, by) = (mem(device, 4096), pinned(device, 4096), adder(device));
    let gate = held.gate();
    free.fill(&x, 5);
    by.add(&free, x.raw, 1024, 1);
    free.down(&to, &x);
    free.wait();
    held.wait_past(gate);
    assert_eq!(to.words(), [6; 1024]);
}

pub fn waiting_for_a_stream_has_a_limit(rig: &Rig) {
    let device = rig.one();
    let s = stream(device);
    let gate = s.gate();
    let start = Instant::now();
    assert!(!device.stream_wait_idle(s.raw, Duration::from_millis(30)).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert!(!device.stream_wait_idle(s.raw, Duration::ZERO).unwrap());
    gate.open();
    assert!(device.stream_wait_idle(s.raw, Duration::MAX).unwrap());
    assert!(device.stream_wait_idle(s.raw, Duration::ZERO).unwrap());
}

pub fn host_functions_run_in_order(rig: &Rig) {
    let device = rig.one();
    let (s, x, to) = (stream(device), mem(device, 4), pinned(device, 4));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for i in 0..20 {
        s.fill(&x, i);
        s.down(&to, &x);
        let (seen, at) = (seen.clone(), to.raw as usize);
        let look = move || {
            // SAFETY: the stream orders the copies before and after around this.
            seen.lock().unwrap().push(unsafe { *(at as *const u32) });
        };
        device.launch_host(s.raw, Box::new(look)).unwrap();
    }
    s.wait();
    assert_eq!(*seen.lock().unwrap(), (0..20).collect::<Vec<_>>());
}

pub fn a_destroyed_stream_finishes_its_work(rig: &Rig) {
    let device = rig.one();
    let (s, x, done) = (stream(device), mem(device, 4096), event(device, false));
    let gate = s.gate();
    s.fill(&x, 9);
    done.record(&s);
    drop(s);
    gate.open();
    assert!(device.event_wait(done.raw, LIMIT).unwrap());
    assert_eq!(read_words(&x), [9; 1024]);
}

pub fn any_priority_is_accepted(rig: &Rig) {
    for priority in [-1000, -1, 0, 1, 1000] {
        let of = rig.one().clone();
        let s = Stream { raw: of.stream_create(priority).unwrap(), of };
        let x = mem(rig.one(), 64);
        s.fill(&x, 3);
        s.wait();
        assert_eq!(read_words(&x), [3; 16]);
    }
}

/// Calls on one device from several threads, none of which had its context before (pytorch#195256, cudarc#108).
pub fn threads_may_share_a_stream(rig: &Rig) {
    let device = rig.one();
    let (s, x, by) = (stream(device), mem(device, 4096), adder(device));
    s.fill(&x, 0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    by.add(&s, x.raw, 1024, 1);
                }
                s.wait();
            });
        }
    });
    s.wait();
    assert_eq!(read_words(&x), [200; 1024]);
}

/// A thread per device, all at once, as the runtime will have it; each sees only its own device's memory (cupy#5006).
pub fn devices_work_from_their_own_threads(rig: &Rig) {
    thread::scope(|scope| {
        for (i, device) in rig.devices.iter().enumerate() {
            scope.spawn(move || {
                let by = adder(device);
                for round in 0..20 {
                    let (s, x) = (stream(device), mem(device, 40_000));
                    s.fill(&x, i as u32);
                    by.add(&s, x.raw, 10_000, round);
                    s.wait();
                    assert_eq!(read_words(&x), vec![i as u32 + round; 10_000]);
                }
            });
        }
    });
}
