//! Sums without peer access that are not large: two kernels for one call, parts to their owners and sums to all. Where
//! kernels do not meet in the host's memory the same calls go in another way: there these tests show that they are
//! right themselves.

use crate::{
    cases::{Case, Kind, check_all},
    numbers::{OPS, Rng, each_type},
    on_both, rig,
    rig::{assert_launch_failure_is_told, assert_nothing_kept, run_as_counters_wrap},
    support::{self, Gpus, all_are, failure},
};
use gpu_pool::{Builder, DType, DeviceBuffer, Error, GpuPool, ReduceOp, Result, collective::Algorithm};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};

/// Elements of each member's part: too many for one trip, and few enough for two, of three or four.
const EACH: [usize; 2] = [3000, 8000];

fn builder(gpus: Gpus, count: usize) -> Builder {
    rig::builder(gpus, count).without_peer_access().check(Check::Off).algorithm(Algorithm::Auto)
}

fn pool(gpus: Gpus, count: usize) -> GpuPool {
    assured(builder(gpus, count))
}

fn assured(builder: Builder) -> GpuPool {
    let pool = builder.build().unwrap();
    let count = pool.device_count();
    let how = |len: usize| pool.explain(DType::F32, ReduceOp::Sum, len * 4).unwrap();
    // On GPUs whose kernels meet this is what is tested.
    if how(1).meets == "packets" {
        for len in EACH.map(|each| each * count) {
            assert!(how(len).meets == "packets" && how(len).reason.contains("sums to all"), "{len}: {}", how(len));
            // Parts that differ are no packets.
            assert_eq!(how(len + 1).meets, "flags", "{}", how(len + 1));
        }
    }
    pool
}

on_both! {
    3: fn every_type_and_operation(gpus) {
        let n = gpus.up_to(4);
        let mut rng = Rng(31);
        let pool = pool(gpus, n);
        for members in support::cases(n, 3)..=n {
            let gang: Vec<usize> = (0..members).collect();
            each_type!(T => {
                // As many bytes of every type.
                let counts = EACH.map(|each| each * members * 4 / size_of::<T>());
                let mut cases = Vec::new();
                for kind in [Kind::AllReduce, Kind::AllReduceInto] {
                    for op in OPS {
                        let (count, salt) = (rng.pick(&counts), rng.next());
                        let starts = (rng.pick(&[0, 1, 3]), rng.pick(&[0, 2, 5]));
                        cases.push(Case { kind, op, root: 0, count, starts, salt });
                    }
                }
                check_all::<T>(&pool, &gang, cases);
            });
        }
        assert_nothing_kept(&pool);
    }

    // With ways that count one meeting each, and past the last number.
    3: fn by_turns_with_other_ways(gpus) {
        let n = gpus.up_to(4);
        let pool = pool(gpus, n);
        let sizes = [EACH[0] * n, 5, EACH[1] * n, 300_001, 0, EACH[0] * n];
        let by_turns = |dev: &gpu_pool::Device| {
            let mut x = dev.upload(&vec![1.0f32; 300_001])?;
            for round in 0..60 {
                dev.all_reduce(&mut x.slice_mut(..sizes[round % sizes.len()]), ReduceOp::Avg)?;
                if round % 7 == 0 && dev.rank() < 3 {
                    dev.group(&[2, 0, 1])?.all_reduce(&mut x.slice_mut(..EACH[0] * 3), ReduceOp::Max)?;
                }
            }
            assert!(all_are(&dev.download(&x)?, 1.0));
            Ok(())
        };
        pool.run(|dev, _| by_turns(dev)).unwrap();
        run_as_counters_wrap(&pool, &[0, 1, 2, 13, 50], by_turns);
    }

    3: fn in_graphs(gpus) {
        let n = gpus.up_to(4);
        let pool = pool(gpus, n);
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f64>(EACH[0] / 2 * n)?;
            let mut small = dev.zeros::<f64>(10)?;
            let sum = |dev: &gpu_pool::Device, x: &mut DeviceBuffer<f64>| -> Result<()> {
                dev.all_reduce(x, ReduceOp::Sum)?;
                dev.scale(x, 0.5)
            };
            let (graph, ()) = dev.capture(|dev| {
                sum(dev, &mut x)?;
                sum(dev, &mut small)?;
                sum(dev, &mut x)
            })?;
            let all = |dev: &gpu_pool::Device, x: &DeviceBuffer<f64>, value: f64| -> Result<()> {
                assert!(all_are(&dev.download(x)?, value), "not {value}");
                Ok(())
            };
            for round in 0..100 {
                dev.fill(&mut x, 1.0 + f64::from(round))?;
                dev.fill(&mut small, 2.0)?;
                dev.launch_graph(&graph)?;
                let factor = n as f64 / 2.0;
                all(dev, &x, (1.0 + f64::from(round)) * factor * factor)?;
                all(dev, &small, 2.0 * factor)?;
                // Between launches, the same by calls.
                sum(dev, &mut x)?;
            }
            Ok(())
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }

    // In a capture nobody counts on anything: what fails there is not to be made up for.
    3: fn a_capture_that_fails(gpus) {
        let n = gpus.up_to(4);
        for nth in [1, 2] {
            let rule = FaultRule::new(Injected::Error).device(1).op(FaultOp::Launch).nth(nth);
            let plan = FaultPlan::new().on(rule).paused();
            let pool = assured(builder(gpus, n).faults(plan.clone()));
            let failed = failure(pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; EACH[0] * n])?;
                dev.barrier()?;
                plan.resume();
                let captured = dev.capture(|dev| {
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    // So that a second launch is there in any way.
                    dev.scale(&mut x, 2.0)?;
                    dev.scale(&mut x, 0.5)
                });
                let captured = captured.map(drop);
                dev.barrier()?;
                captured
            }));
            plan.pause();
            assert!(matches!(failed, Error::Driver { device: 1, code: 999, .. }), "{failed}");
            assert_eq!(plan.fired().len(), 1);
            let cases = EACH.map(|each| {
                Case { kind: Kind::AllReduce, op: ReduceOp::Sum, root: 0, count: each * n, starts: (0, 0), salt: 3 }
            });
            check_all::<f32>(&pool, &(0..n).collect::<Vec<_>>(), cases.into_iter().cycle().take(10));
        }
    }

    // nccl#829: all have agreed, and then a kernel cannot be launched: the first, or the second when the first already
    // runs. Both are counted by all the others.
    3: fn either_launch_fails(gpus) {
        let n = gpus.up_to(4);
        for (victim, nth) in [(0, 1), (n - 1, 2), (1, 1), (1, 2)] {
            let rule = FaultRule::new(Injected::Error).device(victim).op(FaultOp::Launch).nth(nth);
            let plan = FaultPlan::new().on(rule).paused();
            let pool = assured(builder(gpus, n).faults(plan.clone()));
            assert_launch_failure_is_told(&pool, (&plan, victim), EACH[0] * n, |dev, x| {
                (0..victim + 1).try_for_each(|_| dev.all_reduce(x, ReduceOp::Max))
            });
            check_all::<f32>(&pool, &(0..n).collect::<Vec<_>>(), EACH.map(|each| {
                Case { kind: Kind::AllReduce, op: ReduceOp::Sum, root: 0, count: each * n, starts: (0, 0), salt: 3 }
            }));
        }
    }
}
