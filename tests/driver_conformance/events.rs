//! Events: what a record captures and what a wait waits for.

use crate::rig::*;
use gpu_pool::extend::driver::{DriverRef, FaultKind};
use gpu_pool_lab::prelude::*;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Which a checker does not let anyone rely on.
pub fn an_unrecorded_event_is_complete(rig: &Rig) {
    let device = rig.one();
    let (s, e) = (stream(device), event(device, false));
    if device.checker().is_some() {
        assert!(e.is_done());
        let kinds = [device.event_wait(e.raw, Duration::ZERO).err(), device.stream_wait_event(s.raw, e.raw).err()];
        return assert_eq!(kinds.map(|fault| fault.unwrap().kind), [FaultKind::Misuse; 2]);
    }
    assert!(e.is_done() && device.event_wait(e.raw, Duration::ZERO).unwrap());
    e.hold(&s);
    s.wait();
}

/// A stream that reads, behind an event, what another stream writes behind a gate.
struct Behind {
    gate: Gate,
    to: Pinned,
    _x: Mem,
    e: Event,
    second: Stream,
    _first: Stream,
}

fn behind_an_event(device: &DriverRef, value: u32) -> Behind {
    let (first, second, e) = (stream(device), stream(device), event(device, false));
    let (x, to) = (mem(device, 4096), pinned(device, 4096));
    let gate = first.gate();
    first.fill(&x, value);
    e.record(&first);
    e.hold(&second);
    second.down(&to, &x);
    Behind { gate, to, _x: x, e, second, _first: first }
}

pub fn an_event_orders_two_streams(rig: &Rig) {
    let Behind { _first, second, e, _x, to, gate } = behind_an_event(rig.one(), 11);
    assert!(!e.is_done() && !second.is_idle());
    thread::sleep(Duration::from_millis(5));
    second.wait_past(gate);
    assert!(e.is_done());
    assert_eq!(to.words(), [11; 1024]);
}

/// A later record of the same event must not hold up a wait that came before it.
pub fn a_wait_captures_the_latest_record(rig: &Rig) {
    let device = rig.one();
    let (first, second, e) = (stream(device), stream(device), event(device, false));
    let x = mem(device, 64);
    first.fill(&x, 1);
    e.record(&first);
    e.hold(&second);
    let gate = first.gate();
    e.record(&first);
    second.wait();
    assert!(!e.is_done());
    gate.open();
    assert!(device.event_wait(e.raw, LIMIT).unwrap());
}

pub fn a_new_record_replaces_the_old_one(rig: &Rig) {
    let device = rig.one();
    let (held, idle, third, e) = (stream(device), stream(device), stream(device), event(device, false));
    let gate = held.gate();
    e.record(&held);
    e.hold(&third);
    assert!(!e.is_done());
    e.record(&idle);
    assert!(device.event_wait(e.raw, LIMIT).unwrap(), "the new record does not depend on the held stream");
    assert!(!third.is_idle(), "the wait has captured the old record");
    gate.open();
    third.wait();
    held.wait();
}

pub fn a_captured_wait_outlives_its_event(rig: &Rig) {
    let Behind { _first, second, e, _x, to, gate } = behind_an_event(rig.one(), 13);
    drop(e);
    thread::sleep(Duration::from_millis(5));
    second.wait_past(gate);
    assert_eq!(to.words(), [13; 1024]);
}

pub fn waiting_for_an_event_has_a_limit(rig: &Rig) {
    let device = rig.one();
    let (s, e) = (stream(device), event(device, false));
    let gate = s.gate();
    e.record(&s);
    let start = Instant::now();
    assert!(!device.event_wait(e.raw, Duration::from_millis(30)).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30));
    gate.open();
    assert!(device.event_wait(e.raw, LIMIT).unwrap());
    assert!(device.event_wait(e.raw, Duration::ZERO).unwrap());
}

/// A stream waits for an event of another device (cudarc#561: refused there until 0.19.5).
pub fn events_order_devices(rig: &Rig) {
    let Some((a, b)) = rig.two() else { return };
    let (sa, sb, e) = (stream(a), stream(b), event(a, false));
    let (xa, xb) = (mem(a, 4096), mem(b, 4096));
    let (shared, to) = (pinned(a, 4096), pinned(b, 4096));
    for round in 0..20 {
        let gate = sa.gate();
        sa.fill(&xa, round);
        sa.down(&shared, &xa);
        e.record(&sa);
        e.hold(&sb);
        sb.up(&xb, &shared);
        sb.down(&to, &xb);
        assert!(!sb.is_idle());
        gate.open();
        sb.wait();
        assert_eq!(to.words(), [round; 1024]);
    }
}

/// A value goes round all devices, each adding one, ordered by events alone.
pub fn a_relay_through_all_devices(rig: &Rig) {
    let n = rig.devices.len();
    let streams: Vec<_> = rig.devices.iter().map(stream).collect();
    let memories: Vec<_> = rig.devices.iter().map(|device| mem(device, 4096)).collect();
    let adders: Vec<_> = rig.devices.iter().map(adder).collect();
    let events: Vec<_> = rig.devices.iter().map(|device| event(device, false)).collect();
    let baton = pinned(rig.one(), 4096);
    let laps = 10;
    for lap in 0..laps * n {
        let (i, before) = (lap % n, (lap + n - 1) % n);
        if lap > 0 {
            events[before].hold(&streams[i]);
        }
        streams[i].up(&memories[i], &baton);
        adders[i].add(&streams[i], memories[i].raw, 1024, 1);
        streams[i].down(&baton, &memories[i]);
        events[i].record(&streams[i]);
    }
    streams.iter().for_each(Stream::wait);
    assert_eq!(baton.words(), [(laps * n) as u32; 1024]);
}

pub fn elapsed_time(rig: &Rig) {
    let device = rig.one();
    let (s, start, end) = (stream(device), event(device, true), event(device, true));
    start.record(&s);
    device.launch_host(s.raw, Box::new(|| thread::sleep(Duration::from_millis(30)))).unwrap();
    end.record(&s);
    s.wait();
    let elapsed = device.event_elapsed(start.raw, end.raw).unwrap();
    assert!(elapsed >= Duration::from_millis(25) && elapsed < LIMIT, "{elapsed:?}");
}

pub fn elapsed_needs_recorded_timing_events(rig: &Rig) {
    let device = rig.one();
    let (s, plain, timing) = (stream(device), event(device, false), event(device, true));
    plain.record(&s);
    timing.record(&s);
    s.wait();
    assert_eq!(device.event_elapsed(plain.raw, timing.raw).unwrap_err().kind, FaultKind::InvalidArgument);
    let never = event(device, true);
    assert_eq!(device.event_elapsed(timing.raw, never.raw).unwrap_err().kind, FaultKind::InvalidArgument);
    assert!(device.event_elapsed(timing.raw, timing.raw).unwrap() < Duration::from_millis(1));
}
