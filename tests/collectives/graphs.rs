//! Collectives in graphs: what was captured once runs as often as it is launched, with the bits of plain calls, beside
//! plain ones and on any stream. `graph_failures.rs` has what goes wrong.

use crate::{
    cases::{Case, Kind, Prepared, kinds},
    numbers::{OPS, Rng, each_type},
    on_both, rig,
    rig::{assert_nothing_kept, assert_works, sum_works, ways},
    support::{self, failure, slow_add},
};
use gpu_pool::{DType, Device, DeviceBuffer, Element, Error, GpuPool, Graph, ReduceOp, Result};
use half::bf16;
use parking_lot::Mutex;

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
pub fn sum_graph<T: Element>(dev: &Device, x: &mut DeviceBuffer<T>) -> Result<Graph> {
    Ok(dev.capture(|dev| dev.all_reduce(x, ReduceOp::Sum))?.0)
}

/// A sum in a graph with its buffer, to be kept on the device: a launch multiplies by the number of members.
pub struct Kept {
    pub x: DeviceBuffer<u64>,
    pub graph: Graph,
}

impl Kept {
    pub fn new(dev: &Device) -> Result<Self> {
        let mut x = dev.upload(&[1u64; 1000])?;
        let graph = sum_graph(dev, &mut x)?;
        Ok(Kept { x, graph })
    }

    /// A launch from ones.
    #[track_caller]
    pub fn check(&mut self, dev: &Device, members: usize) -> Result<()> {
        dev.fill(&mut self.x, 1)?;
        dev.launch_graph(&self.graph)?;
        dev.launch_graph(&self.graph)?;
        assert_eq!(dev.download(&self.x)?, [(members * members) as u64; 1000]);
        Ok(())
    }
}

on_both! {
    2: fn every_collective_of_every_type_in_a_graph(gpus) {
        let n = gpus.up_to(4);
        let mut rng = Rng(71);
        for (way, pool) in ways(gpus, n) {
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
        for (each, steps) in [(33, support::cases(300, 1000)), (70_001, 10)] {
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

    // Sizes that go by copy engines when they are called, which would cut the graph.
    2: fn large_sums_stay_one_launch_with_the_bits_of_a_call(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let how = pool.explain(DType::F32, ReduceOp::Sum, 1 << 20).unwrap();
        let meet = ["flags", "packets", "data"].contains(&how.meets);
        let sizes: &[usize] = if gpus.is_cuda() { &[17_000_003, 135_000_001] } else { &[300_001] };
        let bits = |x: &DeviceBuffer<f32>, dev: &Device| -> Result<Vec<u32>> {
            Ok(dev.download(x)?.into_iter().map(f32::to_bits).collect())
        };
        pool.run(|dev, _| {
            for &len in sizes {
                let factor = 0x9e37_79b9 + dev.rank() as u32;
                let mine: Vec<f32> = (0..len as u32).map(|i| i.wrapping_mul(factor) as f32 / 1e9).collect();
                let (mut called, mut x) = (dev.upload(&mine)?, dev.upload(&mine)?);
                let mut parts = dev.zeros::<f32>(len / n)?;
                dev.all_reduce(&mut called, ReduceOp::Avg)?;
                let (graph, ()) = dev.capture(|dev| {
                    dev.all_reduce(&mut x, ReduceOp::Avg)?;
                    dev.reduce_scatter(&x.slice(..len / n * n), &mut parts, ReduceOp::Max)?;
                    dev.scale(&mut parts, 2.0)
                })?;
                assert_eq!(graph.parts(), if meet { 1 } else { 3 }, "{graph:?}");
                dev.launch_graph(&graph)?;
                assert!(bits(&called, dev)? == bits(&x, dev)?, "{len}");
                // All had the same.
                dev.scale(&mut called, 2.0)?;
                let part = len / n * dev.rank()..len / n * (dev.rank() + 1);
                assert!(bits(&called, dev)?[part] == bits(&parts, dev)?, "{len}");
            }
            Ok(())
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }

    // Two graphs by turns with plain collectives, on several streams: on each device they run in the order of the
    // calls. rccl#2179: graphs of one communicator that are replayed from several streams deadlock; pytorch#196133: so
    // do replays beside waits of the host.
    2: fn graphs_and_plain_collectives_by_turns(gpus) {
        let n = gpus.up_to(4);
        rig::run(gpus, n, |dev| {
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
        });
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
        pool.on(&turned).run(|dev, _| kept.borrow_mut(dev)?.check(dev, n)).unwrap();
        // Without one of the devices there is no such group.
        let error = failure(pool.on(&turned[..n - 1]).run(|dev, _| dev.launch_graph(&kept.borrow(dev)?.graph)));
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
            pool.on(&members).run(|dev, _| {
                let count = if dev.index() % 2 == 1 { odd.len() } else { even.len() };
                for _ in 0..20 {
                    kept.borrow(dev)?.lock().check(dev, count)?;
                }
                sum_works(dev)
            })
            .unwrap();
        }
        // The group's devices are all that is needed.
        pool.on(&even).run(|dev, _| kept.borrow(dev)?.lock().check(dev, even.len())).unwrap();
    }

    3: fn a_second_group_in_one_graph_is_refused(gpus) {
        let n = gpus.up_to(3);
        rig::run(gpus, n, |dev| {
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
        });
    }

    1: fn a_gang_of_one_captures_its_collectives_too(gpus) {
        rig::run(gpus, 1, |dev| {
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
        });
    }

    2: fn what_waits_or_meets_on_the_host_is_refused(gpus) {
        type Try = fn(&Device) -> Result<()>;
        let tries: [(&str, Try); 4] = [
            ("barrier", |dev| dev.barrier()),
            ("exchange", |dev| dev.exchange(1).map(drop)),
            ("recv", |dev| dev.recv(&mut dev.zeros::<f32>(1)?, 1 - dev.rank())),
            ("sendrecv", |dev| {
                dev.sendrecv(&dev.zeros::<f32>(1)?, 1 - dev.rank(), &mut dev.zeros::<f32>(1)?, 1 - dev.rank())
            }),
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

    // What a graph has let go of in flight is used again only after its launch, on all devices (pytorch#196257).
    2: fn a_graph_is_dropped_in_flight(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::run(gpus, n, |dev| {
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
        });
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
