use super::super::{Kind, annotate, wrap};
use gpu_pool::extend::driver::{DriverRef, RawGraph, RawStream, host};
use std::time::Duration;

fn gpu() -> DriverRef {
    wrap(host::machine(&[Default::default()])).remove(0)
}

/// A graph that copies 64 bytes from `x` to `y`, and fills `x` before that if `fills`.
fn copy_graph(gpu: &DriverRef, x: u64, y: u64, fills: bool) -> RawGraph {
    let s = gpu.stream_create(0).unwrap();
    gpu.capture_begin(s).unwrap();
    // SAFETY: live memory of the case, which forgets nothing.
    unsafe {
        if fills {
            annotate("first", || gpu.fill_u8(x, 1, 64, s)).unwrap();
        }
        annotate("second", || gpu.copy_within(y, x, 64, s)).unwrap();
    }
    gpu.capture_end(s).unwrap()
}

fn launch(gpu: &DriverRef, graph: RawGraph, s: RawStream) -> Result<(), (Kind, &'static str)> {
    // SAFETY: as above.
    let launched = unsafe { gpu.graph_launch(graph, s) };
    launched.map_err(|fault| fault.report.map(|report| (report.kind, report.now.op)).unwrap())
}

#[test]
fn a_launch_counts_as_all_that_was_captured() {
    let gpu = gpu();
    let (x, y) = (gpu.mem_alloc(64).unwrap(), gpu.mem_alloc(64).unwrap());
    let (s, t) = (gpu.stream_create(0).unwrap(), gpu.stream_create(0).unwrap());
    let graph = copy_graph(&gpu, x, y, true);
    // The capture has touched nothing.
    // SAFETY: as above.
    unsafe { gpu.fill_u8(y, 0, 64, s).unwrap() };
    assert_eq!(launch(&gpu, graph, t), Err((Kind::Race, "second")), "its write of y comes after that of s");
    // The launch was refused as a whole: its first operation has not run and is not in the account.
    // SAFETY: as above.
    unsafe { gpu.fill_u8(x, 0, 64, s).unwrap() };
    let e = gpu.event_create(false).unwrap();
    gpu.event_record(e, s).unwrap();
    gpu.stream_wait_event(t, e).unwrap();
    assert_eq!((launch(&gpu, graph, t), launch(&gpu, graph, t)), (Ok(()), Ok(())));
    // SAFETY: as above.
    let race = unsafe { gpu.fill_u8(x, 0, 64, s) }.unwrap_err().report.unwrap();
    assert_eq!((race.kind, race.before.as_ref().unwrap().op), (Kind::Race, "first"), "{race}");
    gpu.stream_wait_idle(t, Duration::MAX).unwrap();
    // SAFETY: as above; its launches are over.
    unsafe {
        gpu.fill_u8(x, 0, 64, s).unwrap();
        gpu.graph_destroy(graph).unwrap();
    }
    gpu.stream_wait_idle(s, Duration::MAX).unwrap();
}

/// A write of a graph counts as written for the later operations of the graph, and only for them.
#[test]
fn a_graph_reads_what_it_has_written() {
    let gpu = gpu();
    let (x, y, s) = (gpu.mem_alloc(64).unwrap(), gpu.mem_alloc(64).unwrap(), gpu.stream_create(0).unwrap());
    let (reads, writes) = (copy_graph(&gpu, x, y, false), copy_graph(&gpu, x, y, true));
    assert_eq!(launch(&gpu, reads, s), Err((Kind::UninitializedRead, "second")));
    assert_eq!(launch(&gpu, writes, s), Ok(()));
    assert_eq!(launch(&gpu, reads, s), Ok(()));
    gpu.stream_wait_idle(s, Duration::MAX).unwrap();
    // SAFETY: no longer used.
    unsafe { gpu.mem_free(x).unwrap() };
    assert_eq!(launch(&gpu, reads, s), Err((Kind::UseAfterFree, "second")));
}
