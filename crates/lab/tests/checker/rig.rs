//! The calls of a driver in a few letters, for memory of one size.

use gpu_pool::extend::driver::{
    Address, DriverRef, DriverResult, FaultKind, RawEvent, RawStream,
    host::{self, HostConfig},
};
use gpu_pool_lab::check::{self, Kind, Report};
use std::{panic::Location, sync::Arc, time::Duration};

pub const BYTES: usize = 4096;

pub fn gpus(n: usize) -> Vec<DriverRef> {
    let gpus = check::wrap(host::machine(&vec![HostConfig::default(); n]));
    for (a, b) in gpus.iter().flat_map(|a| gpus.iter().map(move |b| (a, b))) {
        a.enable_peer(&**b).unwrap();
    }
    gpus
}

pub fn two_gpus() -> [DriverRef; 2] {
    gpus(2).try_into().unwrap_or_else(|_| unreachable!())
}

pub fn stream(gpu: &DriverRef) -> RawStream {
    gpu.stream_create(0).unwrap()
}

pub fn event(gpu: &DriverRef) -> RawEvent {
    gpu.event_create(false).unwrap()
}

pub fn memory(gpu: &DriverRef) -> Address {
    gpu.mem_alloc(BYTES).unwrap()
}

pub fn pinned(gpu: &DriverRef) -> Address {
    gpu.host_alloc(BYTES).unwrap() as Address
}

pub fn fill(gpu: &DriverRef, at: Address, value: u8, s: RawStream) -> DriverResult {
    // SAFETY: memory of the case, which is live unless the checker is to say that it is not.
    unsafe { gpu.fill_u8(at, value, BYTES, s) }
}

pub fn down(gpu: &DriverRef, to: Address, from: Address, s: RawStream) -> DriverResult {
    // SAFETY: as above; `to` is page-locked.
    unsafe { gpu.copy_to_host(to as *mut u8, from, BYTES, s) }
}

pub fn peer(gpu: &DriverRef, to: Address, owner: &DriverRef, from: Address, s: RawStream) -> DriverResult {
    // SAFETY: as above.
    unsafe { gpu.copy_peer(to, &**gpu, from, &**owner, BYTES, s) }
}

pub fn raise(gpu: &DriverRef, flag: Address, value: u64, s: RawStream) -> DriverResult {
    // SAFETY: an aligned word of the case.
    unsafe { gpu.write_value(flag, value, s) }
}

pub fn wait_flag(gpu: &DriverRef, flag: Address, value: u64, s: RawStream) {
    // SAFETY: as above.
    unsafe { gpu.wait_value(flag, value, s) }.unwrap();
}

pub fn idle(gpu: &DriverRef, s: RawStream) {
    assert!(gpu.stream_wait_idle(s, Duration::from_secs(300)).unwrap());
}

/// `waiter` waits for what `of` has by now.
pub fn order(first: &DriverRef, of: RawStream, then: &DriverRef, waiter: RawStream) {
    let e = event(first);
    first.event_record(e, of).unwrap();
    then.stream_wait_event(waiter, e).unwrap();
}

/// A byte of page-locked memory; nothing uses it.
pub fn look(at: Address) -> u8 {
    // SAFETY: live page-locked memory that no operation is using.
    unsafe { (at as *const u8).read() }
}

#[track_caller]
pub fn caught(result: DriverResult, kind: Kind) -> Arc<Report> {
    let fault = result.expect_err("the checker has missed it");
    assert_eq!((fault.kind, fault.code, fault.name.as_str()), (FaultKind::Misuse, 0, "GPU_POOL_MISUSE"), "{fault}");
    let report = fault.report.unwrap();
    assert_eq!(report.kind, kind, "{report}");
    report
}

/// Without an order, an operation is a race.
#[track_caller]
pub fn race_unless(ordered: bool, result: DriverResult) {
    match ordered {
        true => result.unwrap(),
        false => drop(caught(result, Kind::Race)),
    }
}

#[track_caller]
pub fn line() -> u32 {
    Location::caller().line()
}
