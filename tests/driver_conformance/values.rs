//! Words in memory as flags.

use crate::rig::*;
use gpu_pool::extend::driver::DriverRef;
use std::{sync::atomic::AtomicU64, sync::atomic::Ordering, thread, time::Duration};

fn able(device: &DriverRef) -> bool {
    let able = device.info().stream_values;
    if !able {
        eprintln!("skipped: the device has no stream values");
    }
    able
}

fn write_value(s: &Stream, at: u64, value: u64) {
    // SAFETY: the cases give aligned words of live memory, and wait for their streams.
    unsafe { s.of.write_value(at, value, s.raw) }.unwrap();
}

fn wait_value(s: &Stream, at: u64, value: u64) {
    // SAFETY: as above.
    unsafe { s.of.wait_value(at, value, s.raw) }.unwrap();
}

pub fn a_value_orders_two_streams(rig: &Rig) {
    let device = rig.one();
    if !able(device) {
        return;
    }
    let (first, second) = (stream(device), stream(device));
    let (x, to, word, flag) = (mem(device, 4096), pinned(device, 4096), mem(device, 8), pinned(device, 8));
    write(&word, &[0; 8]);
    for (round, at) in [word.raw, flag.raw as u64].into_iter().enumerate() {
        let gate = first.gate();
        wait_value(&second, at, 5);
        second.down(&to, &x);
        first.fill(&x, round as u32 + 1);
        write_value(&first, at, 4);
        write_value(&first, at, 5);
        thread::sleep(Duration::from_millis(5));
        assert!(!second.is_idle());
        gate.open();
        second.wait();
        first.wait();
        assert_eq!(to.words(), [round as u32 + 1; 1024]);
    }
    assert_eq!(read_words(&word), [5, 0]);
}

/// "At least" is cyclic: a counter may pass the end of its range.
pub fn values_compare_cyclically(rig: &Rig) {
    let device = rig.one();
    if !able(device) {
        return;
    }
    let (s, flag) = (stream(device), pinned(device, 8));
    write_value(&s, flag.raw as u64, 3);
    wait_value(&s, flag.raw as u64, 3);
    wait_value(&s, flag.raw as u64, u64::MAX - 3);
    s.wait();
}

pub fn the_host_writes_a_value(rig: &Rig) {
    let device = rig.one();
    if !able(device) {
        return;
    }
    let (s, x, flag) = (stream(device), mem(device, 64), pinned(device, 8));
    wait_value(&s, flag.raw as u64, 1);
    s.fill(&x, 21);
    assert!(!device.stream_wait_idle(s.raw, Duration::from_millis(20)).unwrap());
    // SAFETY: an aligned word that lives until the end of the case and is only used atomically meanwhile.
    unsafe { AtomicU64::from_ptr(flag.raw.cast()) }.store(1, Ordering::Release);
    s.wait();
    assert_eq!(read_words(&x), [21; 16]);
}

pub fn a_value_orders_two_devices(rig: &Rig) {
    let Some((a, b)) = rig.two() else { return };
    if !(able(a) && able(b)) {
        return;
    }
    let (sa, sb) = (stream(a), stream(b));
    let (xa, xb, shared, to, flag) = (mem(a, 4096), mem(b, 4096), pinned(a, 4096), pinned(b, 4096), pinned(a, 8));
    for round in 1..20 {
        wait_value(&sb, flag.raw as u64, round);
        sb.up(&xb, &shared);
        sb.down(&to, &xb);
        sa.fill(&xa, round as u32);
        sa.down(&shared, &xa);
        write_value(&sa, flag.raw as u64, round);
        sb.wait();
        assert_eq!(to.words(), [round as u32; 1024]);
    }
    sa.wait();
}

/// What the host sees in a word is over, without a call.
pub fn the_host_looks_at_a_value(rig: &Rig) {
    let device = rig.one();
    if !able(device) {
        return;
    }
    let (s, x, to, flag) = (stream(device), mem(device, 4096), pinned(device, 4096), pinned(device, 8));
    // SAFETY: an aligned word of live page-locked memory.
    let look = || unsafe { device.poll_value(flag.raw as u64) };
    for round in 1..20 {
        let gate = s.gate();
        s.fill(&x, round as u32);
        s.down(&to, &x);
        write_value(&s, flag.raw as u64, round);
        assert_eq!(look(), round - 1);
        gate.open();
        while look() < round {
            thread::yield_now();
        }
        assert_eq!(to.words(), [round as u32; 1024]);
    }
    s.wait();
}
