//! What goes wrong with collectives in graphs: members that do not capture or launch the same, failures at every point
//! of it, and what a failed scope leaves of a graph. All are errors, and none hangs.

use crate::{
    graphs::{Kept, sum_graph},
    on_both, rig,
    rig::{assert_nothing_kept, assert_works, mismatch, sum_works},
    support::{failure, slow_add, until},
};
use gpu_pool::{Device, DeviceBuffer, Error, ReduceOp};
use gpu_pool_lab::FaultPlan;
use gpu_pool_lab::prelude::*;
use parking_lot::Mutex;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

fn is_invalidated(error: &Error) -> bool {
    matches!(error, Error::GraphInvalidated { op: "launch_graph", site, .. } if site.file().starts_with("tests/"))
}

on_both! {
    // The members' captures differ: all hear of it, with both places, and no graph is left.
    2: fn captures_that_differ_are_named(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for what in ["count", "operation", "reduce op", "root"] {
            let told = AtomicUsize::new(0);
            let found = mismatch(pool.run(|dev, _| {
                let odd = dev.rank() == 1;
                let mut x = dev.zeros::<f32>(if odd && what == "count" { 11 } else { 10 })?;
                let captured = dev.capture(|dev| {
                    dev.scale(&mut x, 2.0)?;
                    let _ = match what {
                        "root" => dev.broadcast(&mut x, usize::from(odd)),
                        "operation" if odd => dev.broadcast(&mut x, 0),
                        "reduce op" if odd => dev.all_reduce(&mut x, ReduceOp::Max),
                        _ => dev.all_reduce(&mut x, ReduceOp::Sum),
                    };
                    Ok(())
                });
                told.fetch_add(usize::from(captured.is_err()), SeqCst);
                // Nobody has taken part in anything: the next one does.
                Kept::new(dev)?.check(dev, n)?;
                captured.map(drop)
            }));
            assert_eq!((found.what, told.into_inner()), (what, n), "{}", found.text);
        }
        assert_works(&pool);
    }

    2: fn one_captures_and_the_others_do_not(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let told = AtomicUsize::new(0);
        let found = mismatch(pool.run(|dev, _| {
            let mut x = dev.upload(&[1u64; 10])?;
            let done = match dev.rank() {
                1 => sum_graph(dev, &mut x).map(drop),
                _ => dev.all_reduce(&mut x, ReduceOp::Sum),
            };
            told.fetch_add(usize::from(done.is_err()), SeqCst);
            assert_eq!(dev.download(&x)?, [1; 10]);
            done
        }));
        assert_eq!((found.what, told.into_inner()), ("capture", n), "{}", found.text);
        assert_ne!(found.a.2, found.b.2, "both places are named");
        assert!(found.text.contains("in a capture"), "{}", found.text);
        assert_works(&pool);
    }

    2: fn different_graphs_do_not_match(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for odd in ["another graph", "a plain collective", "a barrier", "nothing"] {
            let found = mismatch(pool.run(|dev, _| {
                let (first, second) = (Kept::new(dev)?, Kept::new(dev)?);
                dev.launch_graph(&first.graph)?;
                let done = match (dev.rank() == 1, odd) {
                    (false, _) => dev.launch_graph(&first.graph),
                    (true, "another graph") => dev.launch_graph(&second.graph),
                    (true, "a barrier") => dev.barrier(),
                    (true, "nothing") => Ok(()),
                    _ => dev.all_reduce(&mut dev.upload(&[1u64; 1000])?, ReduceOp::Sum),
                };
                assert_eq!(dev.download(&first.x)?, [n as u64; 1000]);
                done
            }));
            let expected: &[&str] = match odd {
                "another graph" => &["graph"],
                // Where a launch is one meeting, it is another operation; else the collective itself is of a graph.
                "a plain collective" => &["graph", "operation"],
                "a barrier" => &["operation"],
                _ => &["participation"],
            };
            assert!(expected.contains(&found.what), "{odd}: {}", found.text);
            assert_works(&pool);
        }
    }

    2: fn a_member_that_does_not_launch_is_named(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::builder(gpus, n).timeout(Duration::from_millis(300)).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let kept = Kept::new(dev)?;
            match dev.rank() {
                1 => until("the others have given up", || dev.check().is_err()),
                _ => dev.launch_graph(&kept.graph),
            }
        }));
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
        assert_works(&pool);
    }

    // torchcomms#2547, #2140: after a failure, plain calls fail at once, and captured ones hang.
    2: fn a_failed_scope_ends_graphs_with_collectives(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        // In which the graph takes part, or does not; before, between and after launches.
        for fails in ["at once", "after launches", "one does not launch", "while the others launch", "in a subset"] {
            let kept = pool.per_device(|dev, _| Ok((Kept::new(dev)?, {
                let mut y = dev.zeros::<u32>(10)?;
                dev.capture(|dev| slow_add(dev, &mut y, 1, 0))?.0
            })));
            let kept = kept.unwrap();
            pool.run(|dev, _| dev.launch_graph(&kept.borrow(dev)?.0.graph)).unwrap();
            let members: Vec<usize> = if fails == "in a subset" { vec![1] } else { (0..n).collect() };
            let error = failure(pool.on(&members).run(|dev, _| {
                let graph = &kept.borrow(dev)?.0.graph;
                let odd = dev.index() == 1;
                for round in 0..20 {
                    match fails {
                        "after launches" if round == 7 && odd => break,
                        "one does not launch" if odd => break,
                        "while the others launch" if odd && round == 3 => panic!("in the midst"),
                        "at once" | "in a subset" => break,
                        _ => dev.launch_graph(graph)?,
                    }
                }
                if odd { Err::<(), _>(Error::custom("fails")) } else { until("it fails", || dev.check().is_err()) }
            }));
            assert!(matches!(&error, Error::Custom(_) | Error::Panicked { device: 1, .. }), "{fails}: {error}");
            let told = Mutex::new(Vec::new());
            let error = failure(pool.run(|dev, _| {
                let (with, without) = &*kept.borrow(dev)?;
                // Without collectives it has nothing to do with others.
                let launched = dev.launch_graph(without).and_then(|()| dev.launch_graph(&with.graph));
                launched.inspect_err(|error| told.lock().push((dev.index(), error.clone())))
            }));
            let told = told.into_inner();
            assert!(is_invalidated(&error), "{fails}: {error}");
            let fits = |error: &Error| is_invalidated(error) || matches!(error, Error::Aborted { .. });
            assert!(told.len() == n && told.iter().all(|(_, error)| fits(error)), "{fails}: {told:?}");
            // Captured again, all is well; also in the rings, where the failed ones have left something.
            pool.run(|dev, _| Kept::new(dev)?.check(dev, n)).unwrap();
            assert_works(&pool);
        }
    }

    // After the meeting the others count on the launch. Where kernels meet on the devices, theirs wait for ones that
    // never come, and are ended by the gang's failure, of which a graph's kernels learn by a word; and the one that
    // failed counts its meetings all the same, or the next collective would wait for ever.
    2: fn a_launch_that_fails_after_the_meeting(gpus) {
        let n = gpus.up_to(3);
        for failing in ["1:graph-launch:1:error", "1:graph-launch:4:error"] {
            let plan: FaultPlan = failing.parse().unwrap();
            let plan = plan.paused();
            let pool = rig::builder(gpus, n).faults(plan.clone()).build().unwrap();
            let capture = |dev: &Device, x: &mut DeviceBuffer<u64>, y: &mut DeviceBuffer<u32>| {
                let captured = dev.capture(|dev| {
                    slow_add(dev, y, 1, 0)?;
                    (0..5).try_for_each(|_| dev.all_reduce(x, ReduceOp::Max))?;
                    slow_add(dev, y, 1, 0)?;
                    dev.all_reduce(x, ReduceOp::Sum)
                });
                Ok::<_, Error>(captured?.0)
            };
            let error = failure(pool.run(|dev, _| {
                let (mut x, mut y) = (dev.upload(&[1u64; 10_000])?, dev.zeros::<u32>(1)?);
                let graph = capture(dev, &mut x, &mut y)?;
                dev.launch_graph(&graph)?;
                dev.synchronize()?;
                if dev.rank() == 1 {
                    plan.resume();
                }
                (0..10).try_for_each(|_| dev.launch_graph(&graph))?;
                dev.synchronize()
            }));
            plan.pause();
            assert!(matches!(&error, Error::Driver { op: "launch_graph", device: 1, .. }), "{failing}: {error}");
            assert_eq!(plan.fired().len(), 1);
            assert_works(&pool);
            let again = pool.run(|dev, _| {
                let (mut x, mut y) = (dev.upload(&[1u64; 10_000])?, dev.zeros::<u32>(1)?);
                let graph = capture(dev, &mut x, &mut y)?;
                (0..3).try_for_each(|_| dev.launch_graph(&graph))?;
                assert_eq!((dev.download(&x)?, dev.download(&y)?), (vec![(n as u64).pow(3); 10_000], vec![6]));
                Ok(())
            });
            again.unwrap();
        }
    }

    // The driver's other calls, at the capture's ends and where it is cut.
    2: fn a_capture_that_fails_in_the_driver(gpus) {
        let n = gpus.up_to(3);
        for failing in ["capture-begin:1", "capture-end:1", "capture-begin:2", "capture-end:2"] {
            let cut = failing.ends_with('2');
            if cut && gpus.is_cuda() {
                // One graph, where kernels meet.
                continue;
            }
            let plan: FaultPlan = format!("1:{failing}:error").parse().unwrap();
            let pool = rig::builder(gpus, n).faults(plan.clone()).build().unwrap();
            let error = failure(pool.run(|dev, _| {
                let (mut x, mut y) = (dev.upload(&[1u64; 100])?, dev.zeros::<u32>(1)?);
                let captured = dev.capture(|dev| {
                    slow_add(dev, &mut y, 1, 0)?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    slow_add(dev, &mut y, 1, 0)
                });
                captured.map(drop)
            }));
            // On software GPUs the collective itself ends the part before it.
            let driver = matches!(&error, Error::Driver { op: "capture" | "all_reduce", device: 1, .. });
            assert!(driver, "{failing}: {error}");
            assert_eq!(plan.fired().len(), 1, "{failing}");
            assert_works(&pool);
            pool.run(|dev, _| Kept::new(dev)?.check(dev, n)).unwrap();
            assert_nothing_kept(&pool);
        }
    }

    // The gang that captures fails, after the capture or within it.
    2: fn a_capture_in_a_gang_that_fails(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let kept: Mutex<Vec<usize>> = Mutex::default();
        let slots = pool.per_device(|_, _| Ok(Mutex::new(None))).unwrap();
        let error = failure(pool.run(|dev, _| {
            let mut captured = Kept::new(dev)?;
            captured.check(dev, n)?;
            *slots.borrow(dev)?.lock() = Some(captured);
            kept.lock().push(dev.index());
            dev.barrier()?;
            if dev.rank() == 1 {
                Err(Error::custom("after the capture"))
            } else {
                until("it fails", || dev.check().is_err())
            }
        }));
        assert!(matches!(error, Error::Custom(_)), "{error}");
        assert_eq!(kept.into_inner().len(), n);
        let error = failure(pool.run(|dev, _| {
            let slot = slots.borrow(dev)?;
            let slot = slot.lock();
            dev.launch_graph(&slot.as_ref().unwrap().graph)
        }));
        assert!(is_invalidated(&error), "{error}");
        for how in ["returns an error", "panics", "is refused"] {
            let error = failure(pool.run(|dev, _| {
                let mut x = dev.zeros::<f32>(100)?;
                let captured = dev.capture(|dev| {
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    if dev.rank() == 1 {
                        match how {
                            "panics" => panic!("in the capture"),
                            "is refused" => dev.synchronize()?,
                            _ => return Err(Error::custom("in the capture")),
                        }
                    }
                    // Who comes here waits for the one that does not.
                    dev.all_reduce(&mut x, ReduceOp::Sum)
                });
                captured.map(drop)
            }));
            let fits = match how {
                "panics" => matches!(error, Error::Panicked { device: 1, .. }),
                "is refused" => matches!(error, Error::InvalidArgument { op: "synchronize", .. }),
                _ => matches!(error, Error::Custom(_)),
            };
            assert!(fits, "{how}: {error}");
            assert_works(&pool);
        }
        drop(slots);
        assert_nothing_kept(&pool);
    }

    // A panic that the closure's caller catches discards the capture, on one member or on all, and nothing else.
    2: fn a_capture_that_panics_leaves_nothing_behind(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::run(gpus, n, |dev| {
            let mut x = dev.upload(&[1u64; 100])?;
            for round in 0..3 {
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    dev.capture(|dev| {
                        dev.all_reduce(&mut x, ReduceOp::Sum)?;
                        if round == 2 || dev.rank() == round {
                            std::panic::resume_unwind(Box::new("in the closure"));
                        }
                        Ok(())
                    })
                }));
                assert_eq!(panicked.is_err(), round == 2 || dev.rank() == round);
                sum_works(dev)?;
            }
            assert_eq!(dev.download(&x)?, [1; 100]);
            drop(x);
            Kept::new(dev)?.check(dev, n)
        });
        assert_nothing_kept(&pool);
    }
}
