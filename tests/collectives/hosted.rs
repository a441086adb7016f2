//! Sums by the host's threads: what is particular to them. What they have in common with other ways goes through
//! `rig::WAYS`.

use crate::{
    cases::{Case, Prepared, check_all, kinds},
    numbers::{OPS, Rng},
    on_both,
    rig::{self, assert_nothing_kept, assert_works, check_with_late_members, one_of_each, sum_works},
    support::{self, Gpus, all_are, failure, slow_add, until},
};
use gpu_pool::{
    Builder, DType, Error, GpuPool, ReduceOp,
    collective::{Algorithm, ReduceOrder},
};
use gpu_pool_lab::{Check, Explorer, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use half::{bf16, f16};
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

fn hosted(gpus: Gpus, count: usize) -> Builder {
    rig::builder(gpus, count).algorithm(Algorithm::Host)
}

fn pool(gpus: Gpus, count: usize) -> GpuPool {
    hosted(gpus, count).build().unwrap()
}

/// Every kind with so many elements, aligned and not.
fn cases(rng: &mut Rng, n: usize, counts: &[usize]) -> Vec<Case> {
    let starts = [(0, 0), (1, 3)];
    let all = kinds().flat_map(|kind| counts.iter().flat_map(move |&count| starts.map(|starts| (kind, count, starts))));
    let case = |(kind, count, starts)| {
        let (op, root, salt) = (rng.pick(&OPS), rng.below(n), rng.next());
        Case { kind, op, root, count, starts, salt }
    };
    all.map(case).collect()
}

on_both! {
    2: fn every_collective_in_no_one_and_many_pieces(gpus) {
        // For 1 to 8 members, `nccl.rs` does it.
        let n = gpus.up_to(3);
        let pool = pool(gpus, n);
        let mut rng = Rng(121);
        for members in 2..=n {
            let gang: Vec<usize> = (0..members).rev().collect();
            check_all::<bf16>(&pool, &gang, cases(&mut rng, members, &[0, 1, 1023]));
            check_all::<f64>(&pool, &gang, cases(&mut rng, members, &[20_003]));
        }
        assert_nothing_kept(&pool);
    }

    // More pieces than slots, each as large as a slot has room for.
    2: fn slots_are_used_over_and_over(gpus) {
        let n = gpus.up_to(3);
        let (pool, len) = (pool(gpus, n), 2_500_001);
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&(0..len).map(|i| (i % 1000 + dev.rank()) as f32).collect::<Vec<_>>())?;
            dev.all_reduce(&mut x, ReduceOp::Max)?;
            let mut first = dev.zeros::<f32>(len)?;
            dev.copy(&x, &mut first)?;
            dev.broadcast(&mut first, n - 1)?;
            Ok((dev.download(&x)?, dev.download(&first)?))
        });
        let right = |x: &[f32]| x.iter().enumerate().all(|(i, x)| *x == (i % 1000 + n - 1) as f32);
        assert!(found.unwrap().iter().all(|(x, first)| right(x) && right(first)));
        assert_nothing_kept(&pool);
    }

    // "Is it the kernel?": bits are the kernels', also of half types and of factors.
    2: fn the_bits_of_the_direct_way(gpus) {
        let n = gpus.up_to(4);
        let len = 50_021;
        let bits = |builder: Builder| {
            let pool = builder.reduce_order(ReduceOrder::Rank).build().unwrap();
            pool.run(|dev, _| {
                let mut rng = Rng(122 + dev.rank() as u64);
                let own: Vec<f32> = (0..len).map(|_| rng.next() as f32 * 1e-19 - 0.9).collect();
                let mut all = Vec::new();
                for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Scaled(0.3 + dev.rank() as f64)] {
                    let mut x = dev.upload(&own)?;
                    let mut y = dev.upload(&own.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>())?;
                    let mut z = dev.upload(&own.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())?;
                    dev.all_reduce(&mut x, op)?;
                    dev.all_reduce(&mut y, op)?;
                    dev.all_reduce(&mut z, op)?;
                    all.extend(dev.download(&x)?.into_iter().map(f32::to_bits));
                    all.extend(dev.download(&y)?.into_iter().map(|y| u32::from(y.to_bits())));
                    all.extend(dev.download(&z)?.into_iter().map(|z| u32::from(z.to_bits())));
                }
                Ok(all)
            })
            .unwrap()
        };
        let (ours, direct) = (bits(hosted(gpus, n)), bits(rig::builder(gpus, n)));
        assert!(ours.windows(2).all(|two| two[0] == two[1]) && ours[0] == direct[0]);
    }

    2: fn in_unified_memory_and_on_any_stream(gpus) {
        let n = gpus.up_to(3);
        let pool = pool(gpus, n);
        let mut table = pool.unified::<f32>(n * 40_001).unwrap();
        table.as_mut_slice().unwrap().fill(2.0);
        pool.with(table.rows_mut(40_001)).run(|dev, _, mut row| {
            let side = dev.stream()?;
            dev.on(&side).all_reduce(&mut row, ReduceOp::Sum)?;
            let mut sum = dev.zeros::<f32>(40_001)?;
            // Ordered behind it, on another stream.
            dev.all_reduce_into(&row, &mut sum, ReduceOp::Avg)?;
            assert_eq!(dev.download(&sum)?, vec![2.0 * n as f32; 40_001]);
            Ok(())
        })
        .unwrap();
        assert!(table.as_slice().unwrap().iter().all(|x| *x == 2.0 * n as f32));
    }

    // jax#38503: late on the device and on the host. The wait for the device is one of its own here.
    2: fn members_that_are_late(gpus) {
        let n = gpus.up_to(3);
        check_with_late_members(&pool(gpus, n), &one_of_each(123, n), Duration::from_millis(5));
    }

    // pytorch#113281: one that panics while the others wait for it, before and between collectives of several pieces.
    2: fn a_member_that_panics_ends_the_others(gpus) {
        let n = gpus.up_to(3);
        let pool = pool(gpus, n);
        for rounds in [0, 3] {
            let waiting = AtomicUsize::new(0);
            let error = failure(pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; 200_000])?;
                (0..rounds).try_for_each(|_| dev.all_reduce(&mut x, ReduceOp::Avg))?;
                if dev.rank() == n - 1 {
                    until("the others wait", || waiting.load(SeqCst) == n - 1)?;
                    panic!("mid-operation");
                }
                waiting.fetch_add(1, SeqCst);
                dev.all_reduce(&mut x, ReduceOp::Avg)
            }));
            assert!(matches!(&error, Error::Panicked { device, .. } if *device == n - 1), "{error}");
            assert_works(&pool);
        }
        assert_nothing_kept(&pool);
    }

    // pytorch#118369: it is named.
    2: fn a_member_that_never_comes_is_named(gpus) {
        let n = gpus.up_to(3);
        let pool = hosted(gpus, n).timeout(Duration::from_millis(300)).build().unwrap();
        let error = failure(pool.run(|dev, _| match dev.rank() {
            1 => until("the others have given up", || dev.check().is_err()),
            _ => sum_works(dev),
        }));
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
        assert_works(&pool);
    }

    2: fn it_says_so(gpus) {
        let pool = pool(gpus, 2);
        let how = pool.explain(DType::BF16, ReduceOp::Max, 1 << 20).unwrap();
        assert_eq!((how.algorithm, how.meets, how.blocks), (Algorithm::Host, "host threads", 0), "{how}");
    }

    // Gangs that share a device take turns; those that do not run beside each other.
    2: fn two_scopes_at_once(gpus) {
        let n = gpus.up_to(4);
        let pool = pool(gpus, n);
        thread::scope(|s| {
            for gang in [(0..n).collect::<Vec<_>>(), (0..n / 2).collect(), (n / 2..n).rev().collect()] {
                let pool = &pool;
                s.spawn(move || {
                    for _ in 0..20 {
                        pool.on(&gang).run(|dev, _| {
                            let mut x = dev.upload(&vec![1.0f32; 30_000])?;
                            (0..3).try_for_each(|_| dev.all_reduce(&mut x, ReduceOp::Sum))?;
                            assert_eq!(dev.download(&x)?, vec![gang.len().pow(3) as f32; 30_000]);
                            Ok(())
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_nothing_kept(&pool);
    }
}

/// Three software GPUs, and one thing that goes wrong.
fn with(rule: FaultRule, timeout: Duration) -> (FaultPlan, GpuPool) {
    let plan = FaultPlan::new().on(rule).paused();
    let pool = hosted(Gpus::software(), 3).timeout(timeout).faults(plan.clone()).build().unwrap();
    plan.resume();
    (plan, pool)
}

/// At the `nth` operation of this kind of device 1.
fn once(fault: Injected, op: FaultOp, nth: u64) -> (FaultPlan, GpuPool) {
    let timeout = if fault == Injected::Stuck { Duration::from_millis(300) } else { support::TIMEOUT / 2 };
    with(FaultRule::new(fault).device(1).op(op).nth(nth), timeout)
}

/// The pool works after a failure, also with a collective of several pieces, and keeps no memory.
#[track_caller]
fn assert_goes_on(pool: &GpuPool) {
    assert_works(pool);
    several_pieces(pool).unwrap();
    assert_nothing_kept(pool);
}

fn several_pieces(pool: &GpuPool) -> Result<(), Error> {
    pool.run(|dev, _| dev.all_reduce(&mut dev.zeros::<f32>(200_000)?, ReduceOp::Sum)).map(drop)
}

/// Whoever is short of page-locked memory says so before anybody has begun, and the pool goes on.
#[test]
fn no_page_locked_memory() {
    support::guarded(|| {
        // Whatever the pool tries before it says so.
        let (plan, pool) = with(FaultRule::new(Injected::OutOfMemory).op(FaultOp::HostAlloc), support::TIMEOUT / 2);
        let error = failure(several_pieces(&pool));
        assert!(matches!(&error, Error::OutOfMemory { op: "all_reduce", .. }), "{error}");
        assert!(!plan.fired().is_empty());
        plan.pause();
        assert_goes_on(&pool);
    });
}

/// In the middle of a collective, as every host waits for its device: a deadline, not a hang, and everybody learns it.
#[test]
fn a_stream_that_is_stuck() {
    support::guarded(|| {
        for (op, nth) in [(FaultOp::CopyDown, 1), (FaultOp::CopyDown, 4), (FaultOp::CopyUp, 5), (FaultOp::Record, 3)] {
            let (plan, pool) = once(Injected::Stuck, op, nth);
            let error = failure(several_pieces(&pool));
            assert!(matches!(&error, Error::Timeout { .. }), "{op:?}: {error}");
            assert_eq!(plan.fired().len(), 1, "{op:?}");
            plan.release();
            assert_works(&pool);
            pool.close().unwrap();
        }
    });
}

/// What a host calls ahead of its device takes page-locked memory, and so there is an end to it.
#[test]
fn calls_far_ahead_of_a_device() {
    support::guarded(|| {
        for algorithm in [Algorithm::Host, Algorithm::Staged] {
            // Without a bound it is a piece of memory for each call.
            let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(FaultOp::HostAlloc).nth(20)).paused();
            let builder = GpuPool::builder().host(2).module(&support::MODULE).check(Check::Off).algorithm(algorithm);
            let pool = builder.faults(plan.clone()).build().unwrap();
            plan.resume();
            let found = pool.run(|dev, _| {
                let mut busy = dev.zeros::<u32>(1)?;
                slow_add(dev, &mut busy, 1, 200_000)?;
                let mut x = dev.upload(&vec![dev.rank() as u8; 9 << 20])?;
                for _ in 0..60 {
                    dev.broadcast(&mut x, 1)?;
                }
                Ok(all_are(&dev.download(&x)?, 1))
            });
            assert_eq!((found.unwrap(), plan.fired().len()), (vec![true; 2], 0), "{algorithm:?}");
        }
    });
}

/// A call that fails is the caller's error, and the others'.
#[test]
fn a_copy_that_fails() {
    support::guarded(|| {
        for (op, nth) in [(FaultOp::CopyDown, 2), (FaultOp::CopyUp, 4), (FaultOp::Record, 2), (FaultOp::Wait, 3)] {
            let (plan, pool) = once(Injected::Error, op, nth);
            let error = failure(several_pieces(&pool));
            assert!(matches!(&error, Error::Driver { device: 1, op: "all_reduce", .. }), "{op:?}: {error}");
            assert_eq!(plan.fired().len(), 1, "{op:?}");
            assert_goes_on(&pool);
        }
    });
}

/// Its survivors go on in the same way.
#[test]
fn a_device_that_is_lost() {
    support::guarded(|| {
        for (op, nth) in [(FaultOp::CopyDown, 2), (FaultOp::CopyUp, 4)] {
            let (_plan, pool) = once(Injected::DeviceLost, op, nth);
            let error = failure(several_pieces(&pool));
            assert!(matches!(&error, Error::DeviceLost { device: 1, .. }), "{op:?}: {error}");
            let rest = pool.survivors().unwrap();
            assert_eq!(rest.explain(DType::F32, ReduceOp::Sum, 8).unwrap().algorithm, Algorithm::Host);
            assert_works(&rest);
            several_pieces(&rest).unwrap();
        }
    });
}

/// Whatever the order of the devices' operations, and the host's steps between them.
#[test]
fn the_same_in_every_schedule() {
    let explorer = Explorer::new().devices(3).seeds(6).configure(|builder| builder.algorithm(Algorithm::Host));
    let explored = explorer.run(|pool| {
        let cases: Vec<_> = one_of_each(124, 3);
        pool.run(|dev, _| cases.iter().try_for_each(|case: &Prepared<f32>| case.check(dev)))?;
        several_pieces(pool)
    });
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}
