//! What only software GPUs can show: to the checker, in steps, in virtual time.

use crate::support::{self, failure, slow_add};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Module, ReduceOp, host::ExecutionOrder};
use gpu_pool_lab::{Check, FaultPlan, Topology, check::Kind, prelude::*};
use std::sync::Arc;

/// What is allocated in a capture is unwritten before the first launch, to the checker as well.
#[test]
fn a_captured_buffer_is_empty_before_the_first_launch() {
    let pool = GpuPool::builder().host(1).check(Check::Races).module(&support::MODULE).build().unwrap();
    let error = failure(pool.run(|dev, _| {
        let (graph, x) = dev.capture(|dev| dev.zeros::<u32>(100))?;
        let early = failure(dev.download(&x));
        assert!(matches!(&early, Error::Misuse { report, .. } if report.kind == Kind::UninitializedRead), "{early}");
        dev.launch_graph(&graph)?;
        assert_eq!(dev.download(&x)?, [0; 100]);
        Err::<(), _>(Error::custom("seen"))
    }));
    assert!(matches!(error, Error::Custom(_)), "{error}");
}

/// Ordering is the library's, unless it is told not to; then the checker sees what is missing, where it was captured.
#[test]
fn an_unordered_launch_is_a_race() {
    let pool = GpuPool::builder().host(1).check(Check::Races).module(&support::MODULE).build().unwrap();
    let error = failure(pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(100)?;
        let (graph, ()) = dev.capture(|dev| dev.scale(&mut x, 2.0))?;
        dev.launch_graph(&graph)?;
        let side = dev.stream()?;
        // SAFETY: which does not hold, as nothing orders it; the checker refuses it.
        let raw = unsafe { dev.unordered() };
        raw.on(&side).launch_graph(&graph)
    }));
    let Error::Misuse { op: "launch_graph", report, .. } = error else { panic!("{error}") };
    assert_eq!((report.kind, report.now.op, report.before.as_ref().unwrap().op), (Kind::Race, "scale", "scale"));
}

/// The driver has ended a capture at a collective, which it cannot capture, and does not begin it again. What follows
/// in the closure would run now, and no graph would have it.
#[test]
fn what_follows_a_capture_that_has_failed_does_not_run() {
    for fault in ["0:capture-begin:2:error", "0:capture-end:1:error"] {
        let plan: FaultPlan = fault.parse().unwrap();
        let pool = GpuPool::builder().host(2).faults(plan).build().unwrap();
        let found = pool.run(|dev, _| {
            let (mut x, mut y) = (dev.zeros::<f32>(100)?, dev.zeros::<f32>(100)?);
            let captured = dev.capture(|dev| {
                dev.fill(&mut x, 1.0)?;
                let cut = dev.all_reduce(&mut x, ReduceOp::Sum);
                Ok([cut.is_err(), dev.fill(&mut y, 7.0).is_err()])
            });
            dev.synchronize()?;
            Ok((captured.is_err(), dev.download(&y)?))
        });
        assert_eq!(found.unwrap(), [(true, vec![0.0; 100]), (false, vec![0.0; 100])], "{fault}");
    }
}

static NOTHING: Module = Module::ptx("");

/// Where operations run one at a time, graphs are operations like others: the same seed gives the same trace.
#[test]
fn graphs_are_reproducible_in_steps() {
    let trace = |seed| {
        let pool =
            GpuPool::builder().host(2).schedule(ExecutionOrder::Seeded(seed)).module(&support::MODULE).build().unwrap();
        let seen = pool.run(|dev, _| {
            let mut x = dev.upload(&[dev.rank() as u32; 100])?;
            let (graph, ()) = dev.capture(|dev| {
                slow_add(dev, &mut x, 1, 0)?;
                slow_add(dev, &mut x, 2, 0)
            })?;
            let side = dev.stream()?;
            for _ in 0..5 {
                dev.launch_graph(&graph)?;
                dev.on(&side).launch_graph(&graph)?;
            }
            dev.barrier()?;
            dev.download(&x)
        });
        assert_eq!(seen.unwrap(), [[30; 100], [31; 100]]);
        pool.trace().unwrap()
    };
    assert!((1..4).all(|seed| trace(seed) == trace(seed)));
}

/// What a graph is for: the host makes one call.
#[test]
fn a_launch_costs_the_host_one_call() {
    let time = |graph: bool| {
        let pool = GpuPool::builder().topology(Topology::nvswitch(1)).module(&NOTHING).build().unwrap();
        let times = pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(16)?;
            let steps = |dev: &Device, x: &mut DeviceBuffer<f32>| (0..100).try_for_each(|_| dev.scale(x, 1.0));
            let (captured, ()) = dev.capture(|dev| steps(dev, &mut x))?;
            dev.synchronize()?;
            let start = dev.record_timed()?;
            match graph {
                true => dev.launch_graph(&captured)?,
                false => steps(dev, &mut x)?,
            }
            let end = dev.record_timed()?;
            dev.synchronize()?;
            end.elapsed_since(&start)
        });
        times.unwrap().remove(0)
    };
    let (launched, called) = (time(true), time(false));
    assert!(launched < called, "{launched:?} {called:?}");
}

/// Rounds of two device threads side by side: without turns some of 300 are races.
const ROUNDS: usize = 2000;

/// A graph writes memory that a peer may read without a borrow's protection: both device threads submit work on it at
/// one time. The library orders the two, in whichever order they come.
#[test]
fn a_launch_and_a_peers_copy_are_ordered() {
    let pool = GpuPool::builder().host(2).check(Check::Races).module(&support::MODULE).build().unwrap();
    let seen = pool.run(|dev, _| {
        let mut mine = dev.upload(&[0u32; 64])?;
        let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut mine, 1, 0))?;
        let theirs = dev.exchange(Arc::new(mine))?[0].clone();
        let mut seen = Vec::new();
        for round in 0..ROUNDS {
            match dev.rank() {
                0 => dev.launch_graph(&graph)?,
                _ if round % 20 == 0 => seen.push(theirs.copy_to(dev)?),
                _ => drop(theirs.copy_to(dev)?),
            }
        }
        seen.iter().map(|copy| dev.download(copy)).collect::<gpu_pool::Result<Vec<_>>>()
    });
    for copy in seen.unwrap().remove(1) {
        assert!(copy.iter().all(|&x| x == copy[0]), "a copy of half a launch: {copy:?}");
    }
}

/// The same of two graphs: that of device 1 copies what that of device 0 writes.
#[test]
fn launches_of_two_devices_are_ordered() {
    let pool = GpuPool::builder().host(2).check(Check::Races).module(&support::MODULE).build().unwrap();
    let seen = pool.run(|dev, _| {
        let (mut mine, mut here) = (dev.upload(&[0u32; 64])?, dev.zeros::<u32>(64)?);
        let (writes, ()) = dev.capture(|dev| slow_add(dev, &mut mine, 1, 0))?;
        let theirs = dev.exchange(Arc::new(mine))?[0].clone();
        let reads = match dev.rank() {
            0 => None,
            _ => Some(dev.capture(|dev| dev.copy(&theirs.peer(), &mut here))?.0),
        };
        for round in 0..ROUNDS {
            dev.launch_graph(reads.as_ref().unwrap_or(&writes))?;
            if round % 20 != 0 {
                continue;
            }
            let seen = dev.download(&here)?;
            assert!(seen.iter().all(|&x| x == seen[0]), "a copy of half a launch: {seen:?}");
        }
        Ok(())
    });
    seen.unwrap();
}
