//! Collectives in graphs: what was captured once runs as often as it is launched, with the bits of plain calls; members that do not
//! capture or launch the same hear of it; and a failed scope ends such graphs by an error. nccl-tests' `-G`, PyTorch's
//! `test_nccl_graph` situations, and pytorch#158164 (a graph of a communicator that was aborted hangs or writes to memory that is gone).

use crate::{
    cases::{Case, Kind, Prepared, kinds},
    numbers::{OPS, Rng, each_type},
    on_both, rig,
    rig::{WAYS, assert_nothing_kept, assert_works, mismatch, sum_works},
    support::{failure, slow_add, until},
};
use gpu_pool::{Device, DeviceBuffer, Element, Error, GpuPool, Graph, ReduceOp, Result, testing::FaultPlan};
use half::bf16;
use parking_lot::Mutex;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

/// What a replica has in training, with its slice of what is divided.
struct Replica {
    weights: DeviceBuffer<f32>,
    gradient: DeviceBuffer<f32>,
    slice: DeviceBuffer<f32>,
    mean: DeviceBuffer<bf16>,
}

impl Replica {
    fn new(dev: &Device, each: usize) -> Result<Self> {
        let len = each * dev.count();
        let weights: Vec<f32> = (0..len).map(|i| (i % 100) as f32 / 100.0 + dev.rank() as f32 / 7.0).collect();
        Ok(Replica {
            weights: dev.upload(&weights)?,
            gradient: dev.zeros(len)?,
            slice: dev.zeros(each)?,
            mean: dev.zeros(len)?,
        })
    }

    /// Kernels and collectives by turns, each on what the one before has left; it converges.
    fn step(&mut self, dev: &Device) -> Result<()> {
        dev.fill(&mut self.gradient, 0.0)?;
        dev.axpy(0.25 + 0.01 * dev.rank() as f32, &self.weights, &mut self.gradient)?;
        dev.all_reduce(&mut self.gradient, ReduceOp::Avg)?;
        dev.axpy(-0.1, &self.gradient, &mut self.weights)?;
        dev.reduce_scatter(&self.weights, &mut self.slice, ReduceOp::Avg)?;
        dev.scale(&mut self.slice, 1.0 / 3.0)?;
        dev.all_gather(&self.slice, &mut self.gradient)?;
        dev.axpy(0.01, &self.gradient, &mut self.weights)?;
        self.mean = dev.cast(&self.weights)?;
        dev.all_reduce(&mut self.mean, ReduceOp::Sum)
    }

    fn bits(&self, dev: &Device) -> Result<(Vec<u32>, Vec<u16>)> {
        let (weights, mean) = (dev.download(&self.weights)?, dev.download(&self.mean)?);
        Ok((weights.into_iter().map(f32::to_bits).collect(), mean.into_iter().map(bf16::to_bits).collect()))
    }
}

/// Adds up `x` over the gang, in a graph.
fn sum_graph<T: Element>(dev: &Device, x: &mut DeviceBuffer<T>) -> Result<Graph> {
    Ok(dev.capture(|dev| dev.all_reduce(x, ReduceOp::Sum))?.0)
}

/// A sum in a graph with its buffer, to be kept on the device: a launch multiplies by the number of members.
struct Kept {
    x: DeviceBuffer<u64>,
    graph: Graph,
}

impl Kept {
    fn new(dev: &Device) -> Result<Self> {
        let mut x = dev.upload(&[1u64; 1000])?;
        let graph = sum_graph(dev, &mut x)?;
        Ok(Kept { x, graph })
    }

    /// A launch from ones.
    #[track_caller]
    fn check(&mut self, dev: &Device, members: usize) -> Result<()> {
        dev.fill(&mut self.x, 1)?;
        dev.launch_graph(&self.graph)?;
        dev.launch_graph(&self.graph)?;
        assert_eq!(dev.download(&self.x)?, [(members * members) as u64; 1000]);
        Ok(())
    }
}

fn is_invalidated(error: &Error) -> bool {
    matches!(error, Error::GraphInvalidated { op: "launch_graph", .. })
}

on_both! {
    2: fn every_collective_of_every_type_in_a_graph(gpus) {
        let n = gpus.up_to(4);
        let mut rng = Rng(71);
        for way in WAYS {
            let pool = way.pool(gpus, n);
            each_type!(T => {
                let captured = kinds().filter(|kind| *kind != Kind::SendRecv);
                let cases: Vec<_> = captured.map(|kind| {
                    let op = rng.pick(&OPS);
                    Prepared::<T>::new(Case::any(&mut rng, kind, op, n), n)
                }).collect();
                let run = pool.run(|dev, _| cases.iter().try_for_each(|case| case.check_captured(dev)));
                run.unwrap_or_else(|error| panic!("{way:?}: {error}"));
            });
            assert_nothing_kept(&pool);
        }
    }

    2: fn a_thousand_launches_are_a_thousand_steps(gpus) {
        let n = gpus.up_to(if gpus.is_cuda() { 4 } else { 2 });
        let pool = rig::pool(gpus, n);
        for (each, steps) in [(33, 1000), (70_001, 10)] {
            let found = pool.run(|dev, _| {
                let mut plain = Replica::new(dev, each)?;
                (0..steps).try_for_each(|_| plain.step(dev))?;
                let mut replica = Replica::new(dev, each)?;
                let before = dev.download(&replica.weights)?;
                let (graph, ()) = dev.capture(|dev| replica.step(dev))?;
                assert!(graph.operations() >= 10, "{graph:?}");
                assert_eq!(dev.download(&replica.weights)?, before, "the capture has touched them");
                (0..steps).try_for_each(|_| dev.launch_graph(&graph))?;
                assert_eq!(replica.bits(dev)?, plain.bits(dev)?);
                Ok(plain.bits(dev)?.1)
            });
            let found = found.unwrap();
            assert!(found.iter().all(|mean| *mean == found[0]));
        }
        assert_nothing_kept(&pool);
    }

    // From a kilobyte, by data that carries its flags, to sizes of many blocks; each replay has its own numbers.
    2: fn sizes_from_nothing_to_large(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let most = if gpus.is_cuda() { 5_000_000 } else { 300_000 };
        pool.run(|dev, _| {
            for len in [0, 1, 7, 1000, 40_000, most] {
                let mut x = dev.zeros::<u32>(len)?;
                let graph = sum_graph(dev, &mut x)?;
                for round in 0..5u32 {
                    let mine: Vec<u32> = (0..len as u32).map(|i| i.wrapping_mul(round + dev.rank() as u32)).collect();
                    dev.upload_into(&mine, &mut x)?;
                    dev.launch_graph(&graph)?;
                    let ranks = (0..n as u32).map(|rank| round + rank).sum::<u32>();
                    let sums = dev.download(&x)?;
                    assert!(sums.iter().zip(0..).all(|(sum, i): (&u32, u32)| *sum == i.wrapping_mul(ranks)), "{len}");
                }
            }
            Ok(())
        })
        .unwrap();
    }

    // Two graphs by turns with plain collectives, on several streams: on each device they run in the order of the calls.
    2: fn graphs_and_plain_collectives_by_turns(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        pool.run(|dev, _| {
            let (side, other) = (dev.stream()?, dev.stream()?);
            let (side, other) = (dev.on(&side), dev.on(&other));
            let (mut x, mut y) = (dev.upload(&[1u64; 100])?, dev.zeros::<u64>(50_000)?);
            let first = sum_graph(dev, &mut x)?;
            let (second, ()) = dev.capture(|dev| {
                dev.all_reduce(&mut y, ReduceOp::Max)?;
                dev.all_reduce(&mut x.slice_mut(50..), ReduceOp::Sum)
            })?;
            let times = n as u64;
            for round in 0..50 {
                dev.fill(&mut x, 1)?;
                dev.fill(&mut y, round + dev.rank() as u64)?;
                side.launch_graph(&first)?; // n
                other.launch_graph(&second)?; // n, n^2
                dev.all_reduce(&mut x, ReduceOp::Sum)?; // n^2, n^3
                other.launch_graph(&first)?; // n^3, n^4
                side.all_reduce(&mut x.slice_mut(..50), ReduceOp::Sum)?; // n^4, n^4
                assert_eq!(dev.download(&x)?, [times.pow(4); 100]);
                assert_eq!(dev.download(&y)?, vec![round + times - 1; 50_000]);
            }
            Ok(())
        })
        .unwrap();
    }

    2: fn a_graph_is_launched_in_later_scopes_and_other_gangs(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let mut kept = pool.per_device(|dev, _| Kept::new(dev)).unwrap();
        for _ in 0..3 {
            kept.run(|dev, _, kept| kept.check(dev, n)).unwrap();
        }
        // The ranks in the gang are others, the group's are not.
        let turned: Vec<usize> = (0..n).rev().collect();
        pool.run_on(&turned, |dev, _| kept.borrow_mut(dev)?.check(dev, n)).unwrap();
        // Without one of the devices there is no such group.
        let error = failure(pool.run_on(&turned[..n - 1], |dev, _| dev.launch_graph(&kept.borrow(dev)?.graph)));
        assert!(matches!(&error, Error::InvalidArgument { op: "launch_graph", .. }), "{error}");
        drop(kept);
        assert_nothing_kept(&pool);
    }

    3: fn a_group_of_some_members_and_two_groups_at_once(gpus) {
        let n = gpus.up_to(5);
        let pool = rig::pool(gpus, n);
        let odd: Vec<usize> = (0..n).rev().filter(|rank| rank % 2 == 1).collect();
        let even: Vec<usize> = (0..n).filter(|rank| rank % 2 == 0).collect();
        let kept = pool.per_device(|dev, _| {
            let ranks = if dev.rank() % 2 == 1 { &odd } else { &even };
            let mut x = dev.upload(&[1u64; 1000])?;
            // A group of one meets nobody, and is captured all the same.
            let (graph, ()) = dev.capture(|dev| dev.group(ranks)?.all_reduce(&mut x, ReduceOp::Sum))?;
            Ok(Mutex::new(Kept { x, graph }))
        });
        let kept = kept.unwrap();
        for members in [(0..n).collect::<Vec<_>>(), (0..n).rev().collect()] {
            pool.run_on(&members, |dev, _| {
                let count = if dev.index() % 2 == 1 { odd.len() } else { even.len() };
                for _ in 0..20 {
                    kept.borrow(dev)?.lock().check(dev, count)?;
                }
                sum_works(dev)
            })
            .unwrap();
        }
        // The group's devices are all that is needed.
        pool.run_on(&even, |dev, _| kept.borrow(dev)?.lock().check(dev, even.len())).unwrap();
    }

    3: fn a_second_group_in_one_graph_is_refused(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(10)?;
            let other: Vec<usize> = (0..n).rev().collect();
            let error = failure(dev.capture(|dev| {
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                let _ = dev.group(&other)?.all_reduce(&mut x, ReduceOp::Sum);
                Ok(())
            }));
            assert!(error.to_string().contains("one group"), "{error}");
            // Nobody has met for it, so all goes on.
            sum_works(dev)
        })
        .unwrap();
    }

    1: fn a_gang_of_one_captures_its_collectives_too(gpus) {
        let pool = rig::pool(gpus, 1);
        pool.run(|dev, _| {
            let mut x = dev.upload(&[3.0f32; 100])?;
            let mut y = dev.zeros::<f32>(100)?;
            let (graph, ()) = dev.capture(|dev| {
                dev.all_reduce(&mut x, ReduceOp::Scaled(2.0))?;
                dev.all_gather(&x, &mut y)
            })?;
            dev.launch_graph(&graph)?;
            dev.launch_graph(&graph)?;
            assert_eq!((dev.download(&x)?, dev.download(&y)?), (vec![12.0; 100], vec![12.0; 100]));
            Ok(())
        })
        .unwrap();
    }

    2: fn what_waits_or_meets_on_the_host_is_refused(gpus) {
        type Try = fn(&Device) -> Result<()>;
        let tries: [(&str, Try); 4] = [
            ("barrier", |dev| dev.barrier()),
            ("exchange", |dev| dev.exchange(1).map(drop)),
            ("recv", |dev| dev.recv(&mut dev.zeros::<f32>(1)?, 1 - dev.rank())),
            ("sendrecv", |dev| dev.sendrecv(&dev.zeros::<f32>(1)?, 1 - dev.rank(), &mut dev.zeros::<f32>(1)?, 1 - dev.rank())),
        ];
        let pool = rig::pool(gpus, 2);
        for (name, attempt) in tries {
            let error = failure(pool.run(|dev, _| {
                let mut x = dev.zeros::<f32>(10)?;
                let refused = dev.capture(|dev| {
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    let _ = attempt(dev);
                    Ok(())
                });
                sum_works(dev)?;
                refused.map(drop)
            }));
            assert!(matches!(&error, Error::InvalidArgument { op, .. } if name.contains(op)), "{name}: {error}");
            assert_works(&pool);
        }
    }

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

    // pytorch#158164 and others: what an abort leaves of a graph is an error, not a hang and not a wrong number.
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
            let error = failure(pool.run_on(&members, |dev, _| {
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

    // After the meeting the others count on the launch. Where kernels meet on the devices, theirs wait for ones that never come, and
    // are ended by the gang's failure, of which a graph's kernels learn by a word; and the one that failed counts its meetings all
    // the same, or the next collective would wait for ever.
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
            assert!(matches!(&error, Error::Driver { op: "capture", device: 1, .. }), "{failing}: {error}");
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
            if dev.rank() == 1 { Err(Error::custom("after the capture")) } else { until("it fails", || dev.check().is_err()) }
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
        let pool = rig::pool(gpus, n);
        pool.run(|dev, _| {
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
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }

    // What a graph has let go of in flight is used again only after its launch, on all devices (pytorch#196257).
    2: fn a_graph_is_dropped_in_flight(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        pool.run(|dev, _| {
            for round in 0..4u64 {
                let len = 100_000 << round;
                let mut x = dev.upload(&vec![round + 1; len])?;
                let mut out = dev.zeros::<u64>(len)?;
                let mut late = dev.zeros::<u32>(1)?;
                let (graph, ()) = dev.capture(|dev| {
                    slow_add(dev, &mut late, 1, if dev.rank() == 0 { 10_000 } else { 0 })?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    dev.copy(&x, &mut out)
                })?;
                dev.launch_graph(&graph)?;
                drop((graph, x, late));
                let again = dev.upload(&vec![u64::MAX; len])?;
                assert_eq!(dev.download(&out)?, vec![(round + 1) * n as u64; len]);
                assert_eq!(dev.download(&again)?, vec![u64::MAX; len]);
            }
            Ok(())
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }

    // Replays of one pool beside another's collectives on the same devices: they take turns.
    2: fn two_pools_at_once(gpus) {
        let n = gpus.up_to(3);
        let pools: [GpuPool; 2] = [rig::pool(gpus, n), rig::pool(gpus, n)];
        std::thread::scope(|s| {
            for pool in &pools {
                s.spawn(move || {
                    let kept = pool.per_device(|dev, _| Ok(Mutex::new(Kept::new(dev)?))).unwrap();
                    for _ in 0..20 {
                        pool.run(|dev, _| {
                            kept.borrow(dev)?.lock().check(dev, n)?;
                            sum_works(dev)
                        })
                        .unwrap();
                    }
                });
            }
        });
    }
}
