//! Unit tests of the number of meetings, which a program cannot see.

use crate::lab::prelude::*;
use crate::lab::{Check, FaultPlan};
use crate::{
    AsView, Device, DeviceBuffer, GpuPool, ReduceOp,
    builder::signal_pad,
    driver::{
        gate,
        host::{ExecutionOrder, What},
    },
    error::{Error, Result},
};

/// Collectives in the graph.
const CAPTURED: u64 = 5;
const LAUNCHES: u64 = 100;

/// Meetings so far of the whole gang in this scope.
fn meetings(dev: &Device) -> u64 {
    dev.session.gang.word().committed()
}

/// How many meetings a launch of a graph with [`CAPTURED`] collectives of `len` elements is, and the parts that it has.
fn meetings_of_a_launch(pool: &GpuPool, len: usize) -> (u64, usize) {
    let found = pool.run(|dev, _| {
        let mut x = dev.upload(&vec![1.0f32; len])?;
        let before = meetings(dev);
        let (graph, ()) = dev.capture(|dev| {
            (0..CAPTURED).try_for_each(|_| -> Result<()> {
                dev.scale(&mut x, 1.0)?;
                dev.all_reduce(&mut x, ReduceOp::Avg)
            })
        })?;
        assert_eq!(meetings(dev) - before, CAPTURED, "each is met for while it is captured");
        let before = meetings(dev);
        (0..LAUNCHES).try_for_each(|_| dev.launch_graph(&graph))?;
        let met = meetings(dev) - before;
        assert_eq!(dev.download(&x)?, vec![1.0; len]);
        // One collective that comes after it: the numbers go on.
        dev.all_reduce(&mut x, ReduceOp::Avg)?;
        assert_eq!(meetings(dev) - before, met + 1);
        Ok((met, graph.parts.len()))
    });
    let (met, parts) = found.unwrap().remove(0);
    assert_eq!(met % LAUNCHES, 0);
    (met / LAUNCHES, parts)
}

fn skipped(dev: &Device) -> usize {
    dev.worker.barrier_state.skipped.borrow().iter().map(|skipped| skipped.times).sum()
}

#[test]
fn where_kernels_do_not_meet_a_launch_is_a_meeting_for_each_collective() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    assert_eq!(meetings_of_a_launch(&pool, 100), (CAPTURED, 2 * CAPTURED as usize));
}

/// The next thread that borrows the memory must see that a graph names it, so the mark comes while the closure runs.
#[test]
fn memory_is_marked_while_it_is_captured() {
    let pool = GpuPool::builder().host(2).build().unwrap();
    pool.run(|dev, _| {
        let (mut x, mut y) = (dev.zeros::<f32>(10)?, dev.zeros::<f32>(10)?);
        let marks = |x: &DeviceBuffer<f32>, y: &DeviceBuffer<f32>| [x, y].map(|x| x.view().block.is_in_graph());
        dev.capture(|dev| {
            assert_eq!(marks(&x, &y), [false, false]);
            dev.scale(&mut x, 2.0)?;
            assert_eq!(marks(&x, &y), [true, false]);
            dev.all_reduce(&mut y, ReduceOp::Sum)?; // The graph is cut here.
            assert_eq!(marks(&x, &y), [true, true]);
            Ok(())
        })?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_gang_of_one_meets_nobody() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let parts = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(10)?;
        let (graph, ()) = dev.capture(|dev| dev.all_reduce(&mut x, ReduceOp::Avg))?;
        assert!(graph.gathering.is_none());
        Ok(graph.parts.len())
    });
    assert_eq!(parts.unwrap(), [1]);
}

/// The claim: one meeting and one call of the driver for the whole graph.
#[cfg(feature = "cuda")]
#[test]
fn where_kernels_meet_a_launch_is_one_meeting() {
    match crate::driver::cuda::device_count().unwrap_or(0) {
        0 => println!("skipped: no CUDA device"),
        1 => println!("skipped: needs 2 CUDA devices"),
        _ => {
            let pool = GpuPool::builder().cuda().devices(&[0, 1]).check(Check::Off).build().unwrap();
            if pool.shared.signals.get().is_none() {
                println!("skipped: kernels of these devices do not meet");
                return;
            }
            assert_eq!(meetings_of_a_launch(&pool, 100), (1, 1));
        }
    }
}

/// Without one the devices' kernels run as they are called, and a graph is cut: in a pool that is watched, and on
/// software GPUs.
#[test]
fn a_watched_pool_cuts_its_graphs() {
    let pool = GpuPool::builder().host(2).check(Check::Races).build().unwrap();
    assert_eq!(meetings_of_a_launch(&pool, 100).0, CAPTURED);
}

/// Software GPUs that are taken for ones whose kernels meet. Theirs do not, so they are given nothing to do; but all
/// that the host does is what it does for GPUs.
fn as_if_kernels_met(faults: &str) -> GpuPool {
    let builder = GpuPool::builder().host(2).check(Check::Off).schedule(ExecutionOrder::Seeded(1));
    let pool = builder.faults(faults.parse::<FaultPlan>().unwrap()).build().unwrap();
    assert!(pool.shared.signals.set(signal_pad::make(&pool).unwrap()).is_ok(), "software GPUs have none");
    pool
}

/// How many kernels of collectives a device has run: of those that were called, and of those that only count their
/// meeting.
fn kernels(pool: &GpuPool, device: usize) -> [usize; 2] {
    let trace = pool.trace().unwrap();
    let of =
        |name| trace.steps().iter().filter(|step| step.device == device && step.what == What::Kernel(name)).count();
    [of("combine_f32"), of("combine_u8")]
}

/// Nobody can be in a blocking call while a window is open; so no window has been left open.
fn all_windows_are_closed() {
    drop(gate::launches().block());
}

#[test]
fn the_host_meets_once_for_all_kernels_of_a_graph() {
    let pool = as_if_kernels_met("");
    assert_eq!(meetings_of_a_launch(&pool, 0), (1, 1));
    let each = (LAUNCHES * CAPTURED) as usize + 1;
    assert_eq!([kernels(&pool, 0), kernels(&pool, 1)], [[each, 0]; 2]);
    all_windows_are_closed();
}

/// Kernels of a graph learn from the host in which gang they run.
#[test]
fn a_launch_tells_the_kernels_their_gang() {
    let pool = as_if_kernels_met("");
    let kept =
        pool.per_device(|dev, _| Ok(dev.capture(|dev| dev.all_reduce(&mut dev.zeros::<f32>(0)?, ReduceOp::Sum))?.0));
    let kept = kept.unwrap();
    for _ in 0..3 {
        pool.run(|dev, _| {
            let graph = kept.borrow(dev)?;
            dev.launch_graph(&graph)?;
            let signals = dev.worker.shared.signals.get().unwrap();
            assert_eq!(signals.place(dev.index()), dev.session.gang.place());
            Ok(())
        })
        .unwrap();
    }
}

/// A sum in two trips, neither of which can be launched: two meetings are owed to those who count on them, who are
/// there for a call and not for a capture. (Software GPUs have no such kernel.)
#[test]
fn only_what_was_called_is_owed() {
    let pool = GpuPool::builder().host(3).check(Check::Off).without_peer_access().build().unwrap();
    assert!(pool.shared.signals.set(signal_pad::make(&pool).unwrap()).is_ok());
    let owed = |captured: bool| {
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(9000)?;
            let mut sum = |dev: &Device| dev.all_reduce(&mut x, ReduceOp::Sum);
            let failed = if captured { dev.capture(sum).map(drop) } else { sum(dev) };
            assert!(failed.is_err());
            // By itself, or since another has failed when all were committed.
            assert_eq!(skipped(dev), if captured { 0 } else { 2 });
            failed
        })
        .unwrap_err()
    };
    let how = pool.explain(crate::DType::F32, ReduceOp::Sum, 36_000).unwrap();
    assert!(how.reason.contains("sums to all"), "{how}");
    for captured in [true, false] {
        let error = owed(captured);
        assert!(matches!(error, Error::Driver { op: "all_reduce", code: 500, .. }), "{error}");
    }
}

/// A member that has committed and does not launch counts all the graph's meetings when its gang has failed: epochs are
/// the same on both sides, and the next collective finds its peers.
#[test]
fn meetings_of_a_graph_that_was_not_launched_are_made_up() {
    let pool = as_if_kernels_met("1:graph-launch:3:error");
    let failed = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(0)?;
        let (graph, ()) = dev.capture(|dev| (0..CAPTURED).try_for_each(|_| dev.all_reduce(&mut x, ReduceOp::Sum)))?;
        (0..10).try_for_each(|_| dev.launch_graph(&graph))
    });
    let error = failed.unwrap_err();
    assert!(matches!(error, Error::Driver { op: "launch_graph", device: 1, .. }), "{error}");
    let each = CAPTURED as usize;
    assert_eq!([kernels(&pool, 0), kernels(&pool, 1)], [[3 * each, 0], [2 * each, each]]);
    all_windows_are_closed();
    pool.run(|dev, _| dev.all_reduce(&mut dev.zeros::<f32>(0)?, ReduceOp::Sum)).unwrap();
    all_windows_are_closed();
}

/// Graphs that were captured inside each other, whose first collective is the same, and which have as many: each device
/// has another one of the later two in its first graph.
#[test]
fn graphs_that_begin_alike_are_not_the_same() {
    let pool = as_if_kernels_met("");
    let launched = pool.run(|dev, _| {
        let (mut a, mut b, mut c) = (dev.zeros::<f32>(0)?, dev.zeros::<f32>(0)?, dev.zeros::<f64>(0)?);
        let (outer, (inner, ())) = dev.capture(|d1| {
            dev.capture(|d2| {
                d1.all_reduce(&mut a, ReduceOp::Sum)?;
                if dev.rank() == 0 { d2 } else { d1 }.all_reduce(&mut b, ReduceOp::Sum)?;
                if dev.rank() == 0 { d1 } else { d2 }.all_reduce(&mut c, ReduceOp::Sum)
            })
        })?;
        drop(inner);
        Ok(dev.launch_graph(&outer))
    });
    for result in launched.unwrap() {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { what: "graph", .. }), "{error}");
    }
    all_windows_are_closed();
}

/// A device is stuck in a scope in which its peer has failed to launch what it had committed to. Nothing can be made up
/// for then; it is when the device is through.
#[test]
fn what_a_stuck_gang_has_left_is_made_up_later() {
    let plan: FaultPlan = "1:graph-launch:1:error;0:fill:1:stuck".parse().unwrap();
    let timeout = std::time::Duration::from_secs(1);
    let pool = GpuPool::builder().host(2).check(Check::Off).timeout(timeout).faults(plan.clone()).build().unwrap();
    assert!(pool.shared.signals.set(signal_pad::make(&pool).unwrap()).is_ok(), "software GPUs have none");
    let missed = skipped;
    plan.resume();
    let failed = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(0)?;
        let mut y = dev.zeros::<f32>(10)?;
        if dev.rank() == 0 {
            dev.fill(&mut y, 1.0)?;
        }
        let (graph, ()) = dev.capture(|dev| dev.all_reduce(&mut x, ReduceOp::Sum))?;
        dev.launch_graph(&graph)
    });
    failed.unwrap_err();
    plan.release();
    plan.pause();
    let left = pool.run(|dev, _| {
        dev.all_reduce(&mut dev.zeros::<f32>(0)?, ReduceOp::Sum)?;
        Ok(missed(dev))
    });
    assert_eq!(left.unwrap(), [0, 0]);
}

/// As `dev.cuda()?.read(&x)` does, foreign code has memory on one stream. A launch on another stream would not be
/// ordered with what that code submits later.
#[cfg(feature = "cuda")]
#[test]
fn lent_memory_is_not_written_by_a_launch_on_another_stream() {
    use crate::memory::hazard::Access;
    use std::panic::Location;
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        let (mut x, other) = (dev.zeros::<f32>(100)?, dev.stream()?);
        let (writes, ()) = dev.capture(|dev| dev.scale(&mut x, 2.0))?;
        let (reads, _sum) = dev.capture(|dev| dev.sum(&x))?;
        let (block, bytes) = (&x.block, 0..400);
        block.hazards.open(&dev.stream, bytes.clone(), Access::Read, Location::caller());
        dev.launch_graph(&writes)?; // in the stream's order
        dev.on(&other).launch_graph(&reads)?;
        let error = dev.on(&other).launch_graph(&writes).unwrap_err();
        let Error::Borrowed { device: 0, holder: Some(("read", held)), .. } = error else { panic!("{error}") };
        assert_eq!(held.file(), file!());
        block.hazards.close(&dev.stream, dev.stream.submit(), bytes, Access::Read);
        dev.on(&other).launch_graph(&writes)
    })
    .unwrap();
}
