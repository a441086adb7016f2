//! Tests of the hooks that a pool calls: blocks, host accesses, foreign work, progress.

use gpu_pool::{
    extend::driver::{
        DriverRef, RawStream,
        host::{self, HostConfig},
    },
    extend::lab::HappensBefore,
};
use gpu_pool_lab::check::{CheckedDriver, Checker, Kind, Report, annotate, wrap};
use std::{sync::Arc, thread, time::Duration};

fn gpu() -> (DriverRef, Arc<Checker>) {
    let gpu = wrap(host::machine(&[HostConfig::default()])).remove(0);
    let checker = gpu.checker().unwrap().0.clone();
    (gpu, checker)
}

fn fill(gpu: &DriverRef, at: u64, bytes: usize, stream: RawStream) -> Result<(), Arc<Report>> {
    // SAFETY: live memory of the case, which forgets nothing.
    unsafe { gpu.fill_u8(at, 1, bytes, stream) }.map_err(|fault| fault.report.unwrap())
}

fn wait(gpu: &DriverRef, stream: RawStream) {
    assert!(gpu.stream_wait_idle(stream, Duration::MAX).unwrap());
}

#[test]
fn a_block_is_reused_after_its_last_use() {
    let (gpu, checker) = gpu();
    let (chunk, s, t) = (gpu.mem_alloc(4096).unwrap(), gpu.stream_create(0).unwrap(), gpu.stream_create(0).unwrap());
    annotate("upload", || checker.allocated(chunk, 1024, Some(0), false));
    annotate("sum", || fill(&gpu, chunk, 1024, s)).unwrap();
    annotate("drop", || checker.freed(chunk));
    let gone = fill(&gpu, chunk + 8, 8, s).unwrap_err();
    assert_eq!((gone.kind, gone.bytes.clone()), (Kind::UseAfterFree, 8..16));
    let freed = gone.allocation.as_ref().unwrap().freed.unwrap().unwrap();
    assert_eq!((freed.0, freed.1.file()), ("drop", file!()));

    annotate("zeros", || checker.allocated(chunk, 2048, Some(0), false));
    let early = annotate("zeros", || fill(&gpu, chunk, 2048, t)).unwrap_err();
    assert_eq!((early.kind, early.bytes.clone()), (Kind::EarlyReuse, 0..1024));
    let old = early.allocation.as_ref().unwrap();
    assert_eq!((old.bytes, old.by.unwrap().0, old.freed.unwrap().unwrap().0), (1024, "upload", "drop"));
    assert_eq!((early.before.as_ref().unwrap().op, early.now.op), ("sum", "zeros"));

    let e = gpu.event_create(false).unwrap();
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    fill(&gpu, chunk, 2048, t).unwrap();
    wait(&gpu, t);
}

#[test]
fn blocks_begin_unwritten_and_end_where_they_end() {
    let (gpu, checker) = gpu();
    let (chunk, s) = (gpu.mem_alloc(4096).unwrap(), gpu.stream_create(0).unwrap());
    let to = gpu.host_alloc(4096).unwrap();
    // SAFETY: live memory, waited for below.
    let down = |at, n| unsafe { gpu.copy_to_host(to, at, n, s) }.map_err(|fault| fault.report.unwrap().kind);
    fill(&gpu, chunk, 4096, s).unwrap();
    checker.allocated(chunk, 256, Some(0), false);
    checker.allocated(chunk + 256, 256, Some(0), true);
    assert_eq!(down(chunk, 1), Err(Kind::UninitializedRead), "what an earlier owner wrote does not count");
    assert_eq!(down(chunk + 256, 256), Ok(()));
    fill(&gpu, chunk, 100, s).unwrap();
    assert_eq!((down(chunk, 100), down(chunk, 101)), (Ok(()), Err(Kind::UninitializedRead)));
    let over = fill(&gpu, chunk, 257, s).unwrap_err();
    assert!(over.kind == Kind::UseAfterFree && over.missing.contains("no live buffer holds"), "{over}");
    assert_eq!(fill(&gpu, chunk + 1024, 1, s).unwrap_err().kind, Kind::UseAfterFree, "nobody has it");
    wait(&gpu, s);
}

#[test]
fn the_host_waits_before_it_looks() {
    let (gpu, checker) = gpu();
    let (p, s) = (gpu.host_alloc(64).unwrap() as u64, gpu.stream_create(0).unwrap());
    checker.host_access(p, 64, true).unwrap();
    fill(&gpu, p, 32, s).unwrap();
    let early = annotate("as_slice", || checker.host_access(p, 64, false)).unwrap_err();
    assert_eq!((early.kind, early.bytes.clone(), early.now.op), (Kind::HostAccess, 0..32, "as_slice"));
    assert!(
        early.missing.starts_with("the calling thread never waited for `fill_u8` on stream 0 of device 0"),
        "{early}"
    );
    checker.host_access(p + 32, 32, true).unwrap();
    wait(&gpu, s);
    checker.host_access(p, 64, true).unwrap();
    // SAFETY: the host was the last to use it.
    unsafe { gpu.host_free(p as *mut u8) }.unwrap();
    assert_eq!(checker.host_access(p, 1, false).unwrap_err().kind, Kind::UseAfterFree);
}

/// A staging block that is handed out again is unwritten until the host has filled it.
#[test]
fn a_host_write_is_a_write() {
    let (gpu, checker) = gpu();
    let (chunk, s, x) = (gpu.host_alloc(64).unwrap(), gpu.stream_create(0).unwrap(), gpu.mem_alloc(64).unwrap());
    // SAFETY: live memory, waited for below.
    let up = || unsafe { gpu.copy_to_device(x, chunk, 64, s) }.map_err(|fault| fault.report.unwrap().kind);
    checker.allocated(chunk as u64, 64, None, false);
    assert_eq!(up(), Err(Kind::UninitializedRead));
    assert_eq!(checker.host_access(chunk as u64, 64, false).unwrap_err().kind, Kind::UninitializedRead);
    checker.host_access(chunk as u64, 64, true).unwrap();
    up().unwrap();
    wait(&gpu, s);
}

/// One staging piece for two copies: the second fill of the piece must wait for the first copy.
#[test]
fn a_staging_piece_is_refilled_after_its_copy() {
    let (gpu, checker) = gpu();
    let (piece, s) = (gpu.host_alloc(64).unwrap(), gpu.stream_create(0).unwrap());
    let x = gpu.mem_alloc(128).unwrap();
    checker.host_access(piece as u64, 64, true).unwrap();
    // SAFETY: live memory, waited for below.
    unsafe { gpu.copy_to_device(x, piece, 64, s) }.unwrap();
    let e = gpu.event_create(false).unwrap();
    gpu.event_record(e, s).unwrap();
    assert_eq!(checker.host_access(piece as u64, 64, true).unwrap_err().kind, Kind::HostAccess);
    gpu.event_wait(e, Duration::MAX).unwrap();
    checker.host_access(piece as u64, 64, true).unwrap();
}

#[test]
fn foreign_work_counts() {
    let (gpu, checker) = gpu();
    let (x, s, t) = (gpu.mem_alloc(64).unwrap(), gpu.stream_create(0).unwrap(), gpu.stream_create(0).unwrap());
    checker.lent(0, s, x, 64, true).unwrap();
    let race = fill(&gpu, x, 64, t).unwrap_err();
    assert_eq!((race.kind, race.before.as_ref().unwrap().op), (Kind::Race, "foreign work"));
    assert_eq!(checker.lent(0, t, x, 1, false).unwrap_err().kind, Kind::Race);
    // A stream that the checker does not know.
    assert_eq!(checker.lent(0, RawStream(12345), x, 64, false).unwrap_err().kind, Kind::Race);
    wait(&gpu, s);
    checker.lent(0, RawStream(12345), x, 64, false).unwrap();
    fill(&gpu, x, 64, t).unwrap_err();
}

#[test]
fn progress_that_is_published_is_known_to_who_observes_it() {
    let (gpu, checker) = gpu();
    let (x, s, t) = (gpu.mem_alloc(64).unwrap(), gpu.stream_create(0).unwrap(), gpu.stream_create(0).unwrap());
    fill(&gpu, x, 64, s).unwrap();
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            wait(&gpu, s);
            checker.publish(0, s);
        });
        watcher.join().unwrap();
    });
    assert_eq!(fill(&gpu, x, 64, t).unwrap_err().kind, Kind::Race);
    checker.observe(0, t);
    assert_eq!(fill(&gpu, x, 64, t).unwrap_err().kind, Kind::Race, "that is another stream's progress");
    checker.observe(0, s);
    fill(&gpu, x, 64, t).unwrap();
    wait(&gpu, t);
}

#[test]
fn a_pooled_event_is_unrecorded_until_it_is_recorded_again() {
    let (gpu, checker) = gpu();
    let (s, t, e) = (gpu.stream_create(0).unwrap(), gpu.stream_create(0).unwrap(), gpu.event_create(false).unwrap());
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    checker.forget_event(0, e);
    let report = gpu.stream_wait_event(t, e).unwrap_err().report.unwrap();
    assert_eq!((report.kind, report.now.stream), (Kind::UnrecordedEvent, Some(1)));
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
}

#[test]
fn a_free_that_the_driver_refuses_changes_nothing() {
    let (gpu, checker) = gpu();
    let (p, s) = (gpu.host_alloc(64).unwrap(), gpu.stream_create(0).unwrap());
    fill(&gpu, p as u64, 64, s).unwrap();
    wait(&gpu, s);
    // SAFETY: refused, since it came from another call.
    let wrong = unsafe { gpu.managed_free(p) }.unwrap_err();
    assert!(wrong.report.is_none(), "the driver's own answer: {wrong}");
    checker.host_access(p as u64, 64, false).unwrap();
    // SAFETY: allocated above, no longer used.
    unsafe { gpu.host_free(p) }.unwrap();
}

/// Mappings are memory like allocations. A moved mapping is no longer at its old addresses.
#[test]
fn mappings_are_memory() {
    let (gpu, _) = gpu();
    let Some(unit) = gpu.vm_granularity() else { return };
    let (s, at) = (gpu.stream_create(0).unwrap(), gpu.vm_reserve(4 * unit as u64).unwrap());
    let to = at + 2 * unit as u64;
    // SAFETY: calls on memory in use are refused; the other calls come after a wait.
    unsafe {
        gpu.vm_map(at, unit).unwrap();
        gpu.vm_map(at + unit as u64, unit).unwrap();
        let host = gpu.host_alloc(64).unwrap();
        let unwritten = gpu.copy_to_host(host, at, 64, s).unwrap_err().report.unwrap();
        assert_eq!(unwritten.kind, Kind::UninitializedRead);
        fill(&gpu, at, 2 * unit, s).unwrap();
        let early = gpu.vm_move(at, to, unit).unwrap_err().report.unwrap();
        assert_eq!((early.kind, early.now.op), (Kind::FreeInUse, "vm_move"));
        let early = gpu.vm_unmap(at + unit as u64, unit).unwrap_err().report.unwrap();
        assert_eq!((early.kind, early.now.op), (Kind::FreeInUse, "vm_unmap"));
        wait(&gpu, s);
        // A move that the driver refuses changes nothing.
        assert!(gpu.vm_move(at, at + unit as u64, unit).unwrap_err().report.is_none());
        gpu.copy_to_host(host, at + unit as u64 - 32, 64, s).unwrap();
        wait(&gpu, s);
        gpu.vm_move(at, to, unit).unwrap();
        assert_eq!(fill(&gpu, at, 8, s).unwrap_err().kind, Kind::UseAfterFree);
        let unwritten = gpu.copy_to_host(host, to, 64, s).unwrap_err().report.unwrap();
        assert_eq!(unwritten.kind, Kind::UninitializedRead, "contents do not come along");
        assert_eq!(fill(&gpu, to - 8, 16, s), Ok(()), "side by side");
        wait(&gpu, s);
        gpu.vm_unmap(to, unit).unwrap();
        let twice = gpu.vm_unmap(to, unit).unwrap_err().report.unwrap();
        assert_eq!(twice.kind, Kind::UseAfterFree);
        gpu.vm_map(to, unit).unwrap();
        fill(&gpu, to, unit, s).unwrap();
        wait(&gpu, s);
    }
}
