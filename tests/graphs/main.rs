//! Graphs: what is captured runs when it is launched, as often as it is, ordered like any other operation; its memory is its own
//! as long as it lives; and what cannot be captured is refused without harm.

#[path = "../support/mod.rs"]
mod support;

use gpu_pool::{
    AsViewMut, Check, Device, DeviceBuffer, Error, GpuPool, Graph, Module, Result, Schedule, Topology,
    driver::check::Kind, testing::FaultPlan,
};
use parking_lot::Mutex;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};
use support::{failure, ramp, slow_add, slow_copy};

/// Microseconds that a slow kernel takes here: long compared to the calls that follow it.
const SLOW: u32 = 15_000;

/// Some of everything that a graph can hold.
fn step(dev: &Device, x: &mut DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<DeviceBuffer<f32>> {
    let mut z = dev.zeros::<f32>(x.len())?;
    dev.axpy(0.5, x, &mut z)?;
    dev.scale(x, 1.001)?;
    dev.copy(&z.slice(10..20), &mut y.slice_mut(..10))?;
    let twice = dev.cast::<f64, _>(y)?;
    dev.fill(&mut y.slice_mut(20..), 3.0)?;
    dev.axpy(1.0, &z, y)?;
    drop(twice);
    dev.dot(x, y)
}

/// The device still works, on the stream that was captured beside and on others.
fn works(dev: &Device) {
    let mut x = dev.upload(&ramp(1000, 1)).unwrap();
    slow_add(dev, &mut x, 7, 0).unwrap();
    let side = dev.stream().unwrap();
    slow_add(&dev.on(&side), &mut x, 8, 0).unwrap();
    assert_eq!(dev.download(&x).unwrap(), ramp(1000, 1).iter().map(|x| x.wrapping_add(15)).collect::<Vec<_>>());
}

fn all_work(pool: &GpuPool) {
    pool.run(|dev, _| {
        works(dev);
        Ok(())
    })
    .unwrap();
}

on_both! {
    1: fn a_thousand_launches_are_a_thousand_steps(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        pool.run(|dev, shard| {
            let start: Vec<f32> = (0..500).map(|i| (i + shard.index()) as f32 / 500.0).collect();
            let eager = {
                let (mut x, mut y) = (dev.upload(&start)?, dev.upload(&start)?);
                let mut dots = Vec::new();
                for round in 0..1000 {
                    let dot = step(dev, &mut x, &mut y)?;
                    if round % 100 == 99 {
                        dots.push(dev.download(&dot)?);
                    }
                }
                (dots, dev.download(&x)?, dev.download(&y)?)
            };
            let (mut x, mut y) = (dev.upload(&start)?, dev.upload(&start)?);
            let (graph, dot) = dev.capture(|dev| step(dev, &mut x, &mut y))?;
            assert!(graph.operations() >= 8, "{graph:?}");
            assert_eq!((dev.download(&x)?, dev.download(&y)?), (start.clone(), start), "the capture has touched them");
            let mut dots = Vec::new();
            for round in 0..1000 {
                dev.launch_graph(&graph)?;
                if round % 100 == 99 {
                    dots.push(dev.download(&dot)?);
                }
            }
            assert_eq!((dots, dev.download(&x)?, dev.download(&y)?), eager);
            Ok(())
        })
        .unwrap();
    }

    // Frees during capture are deferred, and what a captured graph has seen stays its own until it is dropped (issue 4, point 8).
    1: fn a_graph_keeps_its_memory_while_it_lives(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let before = dev.stats().in_use;
            let len = 300_000;
            let mut outer = dev.upload(&vec![1u32; len])?;
            let mut out = dev.zeros::<u32>(len)?;
            let (graph, mine) = dev.capture(|dev| {
                let mut inner = dev.zeros::<u32>(len)?;
                slow_add(dev, &mut inner, 5, 0)?;
                slow_add(dev, &mut outer, 1, 0)?;
                slow_copy(dev, &inner, &mut out, 0)?;
                let mine = inner.address();
                drop(inner);
                let next = dev.zeros::<u32>(len)?;
                assert_ne!(next.address(), mine, "freed in the capture, and used again in it");
                Ok(mine)
            })?;
            let theirs = outer.address();
            drop(outer);
            // Whoever asks for memory now gets other memory, and no launch writes to it.
            let bytes = 4 * len as u64;
            let mut others = Vec::new();
            for i in 0..20 {
                let other = dev.upload(&vec![100 + i; len])?;
                for kept in [mine, theirs] {
                    let apart = other.address() + bytes <= kept || kept + bytes <= other.address();
                    assert!(apart, "{:#x} is the graph's", other.address());
                }
                others.push(other);
                dev.launch_graph(&graph)?;
            }
            for (i, other) in others.iter().enumerate() {
                assert_eq!(dev.download(other)?, vec![100 + i as u32; len]);
            }
            assert_eq!(dev.download(&out)?, vec![5; len]);
            drop((others, out));
            let held = dev.stats().in_use;
            assert!(held >= before + 3 * bytes, "{held} {before}");
            drop(graph);
            assert_eq!(dev.stats().in_use, before, "with the graph its memory goes");
            Ok(())
        })
        .unwrap();
    }

    // What a graph has let go of in flight is used again only after its launch (pytorch#196257).
    1: fn a_graph_is_dropped_in_flight(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            for round in 0..3u32 {
                let len = 300_000 << round;
                let mut out = dev.zeros::<u32>(len)?;
                let source = dev.upload(&vec![round; len])?;
                let mut busy = dev.zeros::<u32>(1)?;
                let (graph, ()) = dev.capture(|dev| slow_copy(dev, &source, &mut out, 0))?;
                drop(source);
                let side = dev.stream()?;
                let on_side = dev.on(&side);
                slow_add(&on_side, &mut busy, 1, SLOW)?;
                on_side.launch_graph(&graph)?;
                drop(graph);
                let again = dev.upload(&vec![u32::MAX; len])?;
                assert_eq!(dev.download(&out)?, vec![round; len]);
                assert_eq!(dev.download(&again)?, vec![u32::MAX; len]);
            }
            // And at the end of the scope, and of the pool.
            let mut x = dev.zeros::<u32>(1)?;
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, SLOW))?;
            dev.launch_graph(&graph)
        })
        .unwrap();
        pool.close().unwrap();
    }

    // Not under its launches, and not never.
    1: fn a_graph_is_destroyed_when_its_launches_are_over(gpus) {
        // The call is made in any case; the rule is there to count.
        let plan: FaultPlan = "0:graph-destroy:*:error".parse().unwrap();
        let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
        let kept = pool.per_device(|dev, _| Ok(dev.capture(|_| Ok(()))?.0)).unwrap();
        pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(1)?;
            drop(dev.capture(|dev| slow_add(dev, &mut x, 1, 0))?);
            assert_eq!(plan.fired().len(), 1, "it was never launched");
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 10 * SLOW))?;
            dev.launch_graph(&graph)?;
            drop(graph);
            assert_eq!(plan.fired().len(), 1, "it is in flight");
            Ok(())
        })
        .unwrap();
        assert_eq!(plan.fired().len(), 2);
        drop(kept);
        pool.close().unwrap();
        assert_eq!(plan.fired().len(), 3);
    }

    1: fn launches_are_ordered_over_streams(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (a, b) = (dev.on(&a), dev.on(&b));
            let mut x = dev.upload(&[0u32; 100])?;
            let (mut y, mut busy) = (dev.zeros::<u32>(100)?, dev.zeros::<u32>(1)?);
            let (graph, ()) = dev.capture(|dev| {
                slow_add(dev, &mut x, 1, 0)?;
                dev.copy(&x, &mut y)
            })?;
            for round in 0..5 {
                slow_add(&a, &mut busy, 1, SLOW / 3)?;
                dev.fill(&mut x.view_mut(), 10 * round)?;
                a.launch_graph(&graph)?; // after the fill
                b.launch_graph(&graph)?; // after that
                b.fill(&mut y.slice_mut(50..), 99)?;
                assert_eq!(dev.download(&x)?, [10 * round + 2; 100]);
                assert_eq!(dev.download(&y)?, [vec![10 * round + 2; 50], vec![99; 50]].concat());
            }
            Ok(())
        })
        .unwrap();
    }

    2: fn peers_read_what_a_graph_writes(gpus) {
        let n = gpus.up_to(3);
        for staged in [false, true] {
            let pool = if staged { gpus.staged(n) } else { gpus.pool(n) };
            let seen = pool.run(|dev, _| {
                let mut mine = dev.upload(&[dev.rank() as u32; 5000])?;
                let (graph, ()) = dev.capture(|dev| {
                    slow_add(dev, &mut mine, 10, SLOW / 5)?;
                    slow_add(dev, &mut mine, 10, 0)
                })?;
                let mine = Arc::new(mine);
                let mut all = Vec::new();
                let theirs = dev.exchange(mine.clone())?[(dev.rank() + 1) % n].clone();
                for _ in 0..5 {
                    dev.launch_graph(&graph)?;
                    dev.barrier()?;
                    let copy = theirs.copy_to(dev)?;
                    // The next launch waits for the peer's copy, which nobody has waited for here.
                    dev.barrier()?;
                    all.push(copy);
                }
                dev.launch_graph(&graph)?;
                all.iter().map(|copy| dev.download(copy)).collect::<Result<Vec<_>>>()
            });
            for (rank, copies) in seen.unwrap().into_iter().enumerate() {
                for (round, copy) in copies.into_iter().enumerate() {
                    let expected = ((rank + 1) % n + 20 * (round + 1)) as u32;
                    assert_eq!(copy, vec![expected; 5000], "staged: {staged}");
                }
            }
        }
    }

    2: fn a_graph_copies_from_a_peer(gpus) {
        let pool = gpus.pool(2);
        if pool.report().peer(0, 1).route != gpu_pool::Route::Direct || pool.report().peer(1, 0).route != gpu_pool::Route::Direct {
            println!("skipped: no direct route between devices 0 and 1");
            return;
        }
        let seen = pool.run(|dev, _| {
            let theirs = dev.exchange(Arc::new(Mutex::new(dev.zeros::<u32>(1000)?)))?;
            let (mine, theirs) = (&theirs[dev.rank()], &theirs[1 - dev.rank()]);
            let mut here = dev.zeros::<u32>(1000)?;
            let (graph, ()) = dev.capture(|dev| dev.copy(&theirs.lock().peer(), &mut here))?;
            let mut seen = Vec::new();
            for round in 0..5 {
                let mut busy = dev.zeros::<u32>(1)?;
                slow_add(dev, &mut busy, 1, SLOW / 5)?;
                dev.fill(&mut *mine.lock(), round * 10 + dev.rank() as u32)?;
                dev.barrier()?;
                dev.launch_graph(&graph)?;
                dev.barrier()?;
                seen.push(dev.download(&here)?);
            }
            Ok(seen)
        });
        for (rank, seen) in seen.unwrap().into_iter().enumerate() {
            for (round, seen) in seen.into_iter().enumerate() {
                assert_eq!(seen, vec![(round * 10 + 1 - rank) as u32; 1000]);
            }
        }
    }

    // Each is named, the capture is discarded, and all is well again.
    1: fn what_cannot_be_captured_is_refused(gpus) {
        type Try = fn(&Device, &GpuPool, &mut Kept) -> Result<()>;
        struct Kept {
            x: DeviceBuffer<u32>,
            event: gpu_pool::Event,
            stream: gpu_pool::Stream,
            graph: Graph,
        }
        let tries: [(&str, Try); 15] = [
            ("upload", |dev, _, _| dev.upload(&[1u32; 10]).map(drop)),
            ("upload", |dev, _, kept| dev.upload_into(&[1; 100], &mut kept.x)),
            ("download", |dev, _, kept| dev.download(&kept.x).map(drop)),
            ("upload_pinned", |dev, pool, _| dev.upload_pinned(&pool.pinned::<u8>(10)?).map(drop)),
            ("download_pinned", |dev, pool, kept| dev.download_pinned(&kept.x, &mut pool.pinned(100)?)),
            ("synchronize", |dev, _, _| dev.synchronize()),
            ("barrier", |dev, _, _| dev.barrier()),
            ("exchange", |dev, _, _| dev.exchange(1).map(drop)),
            ("record", |dev, _, _| dev.record().map(drop)),
            ("record_timed", |dev, _, _| dev.record_timed().map(drop)),
            ("wait", |dev, _, kept| dev.wait(&kept.event)),
            ("stream", |dev, _, _| dev.stream().map(drop)),
            ("fill", |dev, _, kept| dev.on(&kept.stream).fill(&mut kept.x, 1)),
            ("capture", |dev, _, _| dev.capture(|_| Ok(())).map(drop)),
            ("launch_graph", |dev, _, kept| dev.launch_graph(&kept.graph)),
        ];
        let pool = gpus.pool(1);
        let pool = &pool;
        pool.run(|dev, _| {
            let mut x = dev.upload(&[3u32; 100])?;
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 0))?;
            let mut kept = Kept { x, event: dev.record()?, stream: dev.stream()?, graph };
            for (name, attempt) in tries {
                let refused = dev.capture(|dev| {
                    let mut own = dev.zeros::<u32>(100)?;
                    attempt(dev, pool, &mut kept)?;
                    slow_add(dev, &mut own, 1, 0)
                });
                let error = failure(refused);
                assert!(matches!(&error, Error::InvalidArgument { op, .. } if *op == name), "{name}: {error}");
                // Also if the closure makes nothing of it: such a graph would lack something.
                let refused = dev.capture(|dev| {
                    let _ = attempt(dev, pool, &mut kept);
                    Ok(())
                });
                let error = failure(refused);
                assert!(matches!(&error, Error::InvalidArgument { op, .. } if *op == name), "{name}: {error}");
                works(dev);
            }
            assert_eq!(dev.download(&kept.x)?, [3; 100]);
            dev.launch_graph(&kept.graph)?;
            assert_eq!(dev.download(&kept.x)?, [4; 100]);
            Ok(())
        })
        .unwrap();
    }

    1: fn errors_and_panics_end_a_capture(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let before = dev.stats().in_use;
            let mut x = dev.upload(&[3u32; 100])?;
            for _ in 0..3 {
                let error = failure(dev.capture(|dev| {
                    slow_add(dev, &mut x, 1, 0)?;
                    let kept = dev.zeros::<u8>(1 << 20)?;
                    drop(kept);
                    Err::<(), _>(Error::custom("no"))
                }));
                assert!(matches!(&error, Error::Custom(why) if why.to_string() == "no"), "{error}");
                works(dev);
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    dev.capture(|dev| {
                        slow_add(dev, &mut x, 1, 0)?;
                        std::panic::resume_unwind(Box::new("in the closure"));
                        #[allow(unreachable_code)]
                        Ok(())
                    })
                }));
                assert_eq!(*panicked.unwrap_err().downcast::<&str>().unwrap(), "in the closure");
                works(dev);
            }
            assert_eq!(dev.download(&x)?, [3; 100]);
            drop(x);
            assert_eq!(dev.stats().in_use, before);
            Ok(())
        })
        .unwrap();
    }

    2: fn a_gang_that_fails_ends_captures(gpus) {
        let pool = gpus.pool(2);
        let failed = pool.run(|dev, _| {
            if dev.rank() == 1 {
                return Err(Error::custom("the peer fails"));
            }
            support::until("the gang has failed", || dev.check().is_err())?;
            let aborted = failure(dev.capture(|_| Ok(())));
            assert!(matches!(aborted, Error::Aborted { by: 1, .. }), "{aborted}");
            Ok(())
        });
        assert!(matches!(failure(failed), Error::Custom(_)));
        let failed = pool.run(|dev, _| {
            if dev.rank() == 1 {
                dev.barrier()?;
                return Err(Error::custom("the peer fails"));
            }
            let mut x = dev.zeros::<u32>(10)?;
            dev.barrier()?;
            let aborted = failure(dev.capture(|dev| {
                let _ = support::until("the gang has failed", || dev.check().is_err());
                let _ = slow_add(dev, &mut x, 1, 0);
                Ok(())
            }));
            assert!(matches!(aborted, Error::Aborted { by: 1, .. }), "{aborted}");
            Ok(())
        });
        assert!(matches!(failure(failed), Error::Custom(_)));
        all_work(&pool);
    }

    1: fn a_graph_outlives_a_failed_scope(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        struct Step {
            x: DeviceBuffer<u32>,
            graph: Graph,
        }
        let mut steps = pool
            .per_device(|dev, _| {
                let mut x = dev.upload(&[0u32; 100])?;
                let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 100))?;
                Ok(Step { x, graph })
            })
            .unwrap();
        for round in 1..4 {
            let error = failure(pool.run(|dev, _| {
                dev.launch_graph(&steps.borrow(dev)?.graph)?;
                // Both have launched when one of them fails.
                dev.barrier()?;
                Err::<(), _>(Error::custom("after the launch"))
            }));
            assert!(matches!(error, Error::Custom(_)), "{error}");
            let seen = pool
                .run(|dev, _| {
                    let step = steps.borrow(dev)?;
                    dev.launch_graph(&step.graph)?;
                    dev.download(&step.x)
                })
                .unwrap();
            assert!(seen.iter().all(|x| *x == [2 * round; 100]), "{seen:?}");
        }
        steps.run(|dev, _, step| dev.launch_graph(&step.graph)).unwrap();
        drop(steps);
        all_work(&pool);
    }

    2: fn foreign_memory_is_refused(gpus) {
        let (pool, other) = (gpus.pool(2), gpus.pool(1));
        let theirs = Mutex::new(pool.run(|dev, _| dev.zeros::<u32>(10)).unwrap());
        let foreign = Mutex::new(other.run(|dev, _| dev.zeros::<u32>(10)).unwrap().remove(0));
        pool.run_on(&[0], |dev, _| {
            let mut theirs = theirs.lock();
            let error = failure(dev.capture(|dev| slow_add(dev, &mut theirs[1], 1, 0)));
            assert!(matches!(error, Error::WrongDevice { op: "launch", buffer: 1, device: 0, .. }), "{error}");
            let error = failure(dev.capture(|dev| slow_add(dev, &mut *foreign.lock(), 1, 0)));
            assert!(matches!(error, Error::WrongPool { op: "launch", device: 0, .. }), "{error}");
            works(dev);
            Ok(())
        })
        .unwrap();
        drop((theirs, foreign));
    }

    2: fn a_staged_copy_is_refused(gpus) {
        let pool = gpus.staged(2);
        pool.run(|dev, _| {
            let theirs = dev.exchange(Arc::new(dev.zeros::<u32>(10)?))?.swap_remove(1 - dev.rank());
            let mut here = dev.zeros::<u32>(10)?;
            let error = failure(dev.capture(|dev| dev.copy(&theirs.peer(), &mut here)));
            assert!(matches!(error, Error::InvalidArgument { op: "copy", .. }), "{error}");
            works(dev);
            dev.barrier()
        })
        .unwrap();
    }

    // The host may look at it when the graph is launched: no borrow would keep it from that.
    1: fn memory_of_the_host_is_refused(gpus) {
        let pool = gpus.pool(1);
        let mut table = pool.unified::<u32>(10).unwrap();
        table.as_mut_slice().unwrap().fill(7);
        pool.run_with(table.rows_mut(1), |dev, _, mut rows| {
            let error = failure(dev.capture(|dev| dev.fill(&mut rows, 1)));
            assert!(matches!(error, Error::InvalidArgument { op: "fill", .. }), "{error}");
            let mut here = dev.zeros::<u32>(10)?;
            let error = failure(dev.capture(|dev| dev.copy(&rows, &mut here)));
            assert!(matches!(error, Error::InvalidArgument { op: "copy", .. }), "{error}");
            works(dev);
            Ok(())
        })
        .unwrap();
        assert_eq!(table.as_slice().unwrap(), [7; 10]);
    }

    // The driver's calls can fail, too.
    1: fn calls_that_fail_are_named(gpus) {
        for (op, name) in [("capture-begin", "capture"), ("capture-end", "capture"), ("graph-launch", "launch_graph"), ("fill", "fill")] {
            let plan: FaultPlan = format!("0:{op}:1:error").parse().unwrap();
            let plan = plan.paused();
            let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
            pool.run(|dev, _| {
                let mut x = dev.upload(&[1u32; 10])?;
                let mut attempt = || {
                    let (graph, ()) = dev.capture(|dev| {
                        // A graph that lacks an operation is none, whatever is made of the error.
                        let _ = dev.fill(&mut x, 5);
                        Ok(())
                    })?;
                    dev.launch_graph(&graph)
                };
                plan.resume();
                let error = failure(attempt());
                assert!(matches!(&error, Error::Driver { op, device: 0, .. } if *op == name), "{op}: {error}");
                plan.pause();
                attempt()?;
                assert_eq!(dev.download(&x)?, [5; 10]);
                works(dev);
                Ok(())
            })
            .unwrap();
            assert_eq!(plan.fired().len(), 1);
        }
    }
}

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

static NOTHING: Module = Module::ptx("");

/// Where operations run one at a time, graphs are operations like others: the same seed gives the same trace.
#[test]
fn graphs_are_reproducible_in_steps() {
    let trace = |seed| {
        let pool =
            GpuPool::builder().host(2).schedule(Schedule::Seeded(seed)).module(&support::MODULE).build().unwrap();
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

#[cfg(feature = "blas")]
mod blas {
    use super::*;
    use gpu_pool::Matrix;

    fn products(gpus: support::Gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (a, b) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.upload(&[1.0f32, 0.0, 0.0, 2.0])?);
            let (mut c, mut d) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(4)?);
            let product = |dev: &Device, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>| {
                dev.gemm(1.0, Matrix::new(x, 2, 2)?, Matrix::new(&b, 2, 2)?, 1.0, y)
            };
            product(dev, &a, &mut c)?;
            let (graph, ()) = dev.capture(|dev| {
                product(dev, &a, &mut c)?;
                product(dev, &c, &mut d)
            })?;
            for _ in 0..2 {
                dev.launch_graph(&graph)?;
                product(dev, &a, &mut d)?;
            }
            assert_eq!(dev.download(&c)?, [3.0, 12.0, 9.0, 24.0]);
            assert_eq!(dev.download(&d)?, [7.0, 48.0, 21.0, 96.0]);
            drop(graph);
            product(dev, &a, &mut d)
        })
        .unwrap();
    }

    #[test]
    fn host() {
        support::on_host(1, products);
    }

    #[test]
    fn cuda() {
        support::on_cuda(1, products);
    }
}
