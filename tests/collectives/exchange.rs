//! Slices that go to their owners, are added up there, and come back, piece by piece: by copy engines, or by one kernel
//! on each device. The other tests have parts of one piece.

use crate::{
    cases::{Case, Kind, Prepared, check_all, kinds},
    numbers::{Num, Rng},
    on_both,
    rig::{assert_nothing_kept, assert_works, builder},
    support::{self, Gpus, failure, on_cuda},
};
use gpu_pool::{DType, Error, GpuPool, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use half::bf16;

fn pool(gpus: Gpus, count: usize) -> GpuPool {
    builder(gpus, count).algorithm(Algorithm::Copies).build().unwrap()
}

/// More pieces of a part than scratch has slots for, on software GPUs.
const COUNT: usize = 1_100_003;

fn cases(n: usize, op: ReduceOp) -> impl Iterator<Item = Case> {
    kinds().map(move |kind| {
        let whole = matches!(kind, Kind::AllReduce | Kind::AllReduceInto | Kind::Reduce | Kind::Broadcast);
        let count = if whole { COUNT } else { COUNT / n };
        Case { kind, op, root: n - 1, count, starts: (1, 2), salt: 17 }
    })
}

fn check<T: Num>(gpus: Gpus, n: usize, op: ReduceOp) {
    let pool = pool(gpus, n);
    check_all::<T>(&pool, &(0..n).collect::<Vec<_>>(), cases(n, op));
    assert_nothing_kept(&pool);
}

/// Bits of a sum in place, of a part of each member's buffer, and of its part by itself.
fn bits<T: Num + bytemuck::Pod>(pool: &GpuPool, len: usize, op: ReduceOp, (a, b): (usize, usize)) -> Vec<Vec<u8>> {
    let found = pool.run(|dev, shard| {
        let mut rng = Rng(shard.index() as u64 + 3);
        let mut noise = || (0..a + len).map(|_| T::of((rng.next() >> 40) as f64 / 1e6 - 8.0)).collect::<Vec<_>>();
        let (mut x, src) = (dev.upload(&noise())?, dev.upload(&noise())?);
        let op = if let ReduceOp::Scaled(by) = op { ReduceOp::Scaled(by + shard.index() as f64) } else { op };
        dev.all_reduce(&mut x.slice_mut(a..), op)?;
        let (n, mut y) = (dev.count(), dev.zeros::<T>(b + len)?);
        let each = len / n;
        dev.reduce_scatter(&src.slice(a..a + n * each), &mut y.slice_mut(b..b + each), op)?;
        dev.reduce(&mut y.slice_mut(b..), op, n - 1)?;
        Ok(bytemuck::cast_slice(&[dev.download(&x)?, dev.download(&y)?].concat()).to_vec())
    });
    found.unwrap()
}

on_both! {
    // On software GPUs the race checker watches the slots.
    2: fn every_collective_in_many_pieces(gpus) {
        check::<f64>(gpus, 2, ReduceOp::Sum);
    }

    3: fn every_collective_of_three_in_several_pieces(gpus) {
        check::<i64>(gpus, 3, ReduceOp::Avg);
    }

    // By kernels, where they meet: all that adds up, of every size of element, with factors, in rank order.
    2: fn sums_by_kernels_have_the_bits_of_direct_ones(gpus) {
        for &n in support::cases(&[gpus.up_to(3)][..], &[2, gpus.up_to(3), gpus.up_to(8)]) {
            let by = |algorithm| builder(gpus, n).algorithm(algorithm).build().unwrap();
            let (exchange, direct) = (by(Algorithm::Exchange), by(Algorithm::Direct));
            // Kernels do, wherever direct ones meet.
            let how = |pool: &GpuPool| pool.explain(DType::BF16, ReduceOp::Max, 8 << 20).unwrap();
            let meet = how(&direct).meets == "flags";
            let expected = if meet { (Algorithm::Exchange, "flags") } else { (Algorithm::Copies, "events") };
            assert_eq!((how(&exchange).algorithm, how(&exchange).meets), expected);
            if meet {
                // Several pieces for each block.
                let large = |pool| bits::<bf16>(pool, 9_000_011 * n, ReduceOp::Sum, (0, 0));
                assert!(large(&exchange) == large(&direct), "{n}");
            }
            for (len, op) in [
                (70_001, ReduceOp::Avg),
                (1, ReduceOp::Sum),
                (300_003, ReduceOp::Scaled(0.3)),
                (40_007, ReduceOp::Prod),
            ] {
                let starts = [(0, 0), (1, 3), (2, 2)];
                for (a, b) in starts {
                    assert!(
                        bits::<f32>(&exchange, len, op, (a, b)) == bits::<f32>(&direct, len, op, (a, b)),
                        "{n} {len} {op}"
                    );
                    assert!(
                        bits::<bf16>(&exchange, len, op, (a, b)) == bits::<bf16>(&direct, len, op, (a, b)),
                        "{n} {len} {op}"
                    );
                }
            }
            assert_nothing_kept(&exchange);
        }
    }

    // Slots are used many times, on GPUs by all blocks that there are.
    2: fn sums_by_kernels_in_many_pieces(gpus) {
        let n = gpus.up_to(4);
        let pool = builder(gpus, n).algorithm(Algorithm::Exchange).build().unwrap();
        let each = if gpus.is_cuda() { 25_000_003 } else { 10_007 };
        let sum = |i: usize| (0..n).map(|rank| (i % 17 + rank) as f32).sum::<f32>();
        pool.run(|dev, shard| {
            let own: Vec<bf16> = (0..n * each).map(|i| bf16::from_f32((i % 17 + shard.index()) as f32)).collect();
            let (mut x, mut part) = (dev.upload(&own)?, dev.zeros::<bf16>(each)?);
            for _ in 0..2 {
                dev.reduce_scatter(&x, &mut part, ReduceOp::Sum)?;
            }
            let mut sums = dev.zeros::<bf16>(n * each)?;
            dev.all_reduce_into(&x, &mut sums, ReduceOp::Sum)?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            let mut own = dev.upload(&own)?;
            dev.reduce(&mut own, ReduceOp::Sum, n - 1)?;
            if dev.rank() == n - 1 {
                assert!(dev.download(&own)?.iter().enumerate().all(|(i, x)| x.to_f32() == sum(i)));
            }
            let mine = shard.index() * each;
            assert!(dev.download(&part)?.iter().enumerate().all(|(i, x)| x.to_f32() == sum(mine + i)));
            assert!(dev.download(&x)?.iter().enumerate().all(|(i, x)| x.to_f32() == sum(i)));
            assert!(dev.download(&sums)?.iter().enumerate().all(|(i, x)| x.to_f32() == sum(i)));
            Ok(())
        })
        .unwrap();
        assert_nothing_kept(&pool);
    }

    // Nothing for an engine, whose stream does not capture.
    1: fn a_gang_of_one_in_a_graph(gpus) {
        let found = pool(gpus, 1).run(|dev, _| {
            let (mut x, mut y) = (dev.upload(&vec![3.0f32; 100_000])?, dev.zeros::<f32>(100_000)?);
            let (graph, ()) = dev.capture(|dev| {
                dev.all_reduce(&mut x, ReduceOp::Scaled(2.0))?;
                dev.all_gather(&x, &mut y)
            })?;
            dev.launch_graph(&graph)?;
            dev.download(&y)
        });
        assert_eq!(found.unwrap(), [vec![6.0; 100_000]]);
    }

    // One after the other, without a wait of the host: the streams of one begin behind those of the one before.
    2: fn in_a_row(gpus) {
        let n = gpus.up_to(3);
        // GPUs have larger slots.
        let len = if gpus.is_cuda() { 20_000_003 * n } else { COUNT };
        let found = pool(gpus, n).run(|dev, _| {
            let mut x = dev.upload(&vec![1.0f64; len])?;
            for round in 0..8 {
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                let root = round % n;
                dev.broadcast(&mut x, root)?;
                dev.all_reduce(&mut x.slice_mut(..1000), ReduceOp::Avg)?;
                dev.all_reduce(&mut x.slice_mut(1000..), ReduceOp::Avg)?;
            }
            dev.download(&x)
        });
        let expected = (n as f64).powi(8);
        assert!(found.unwrap().iter().flatten().all(|x| *x == expected));
    }
}

/// Whatever call of the driver fails in the middle: nothing runs on behind the scope's end, and nothing is kept.
#[test]
fn a_failure_between_the_pieces() {
    let prepared = Prepared::<f64>::new(
        Case { kind: Kind::AllReduce, op: ReduceOp::Sum, root: 0, count: COUNT, starts: (0, 0), salt: 3 },
        2,
    );
    for (op, nth) in [
        (FaultOp::CopyPeer, 1),
        (FaultOp::CopyPeer, 4),
        (FaultOp::CopyPeer, 9),
        (FaultOp::Launch, 3),
        (FaultOp::Record, 7),
        (FaultOp::Wait, 9),
    ] {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(1).op(op).nth(nth)).paused();
        let builder = GpuPool::builder().host(2).check(Check::Races).algorithm(Algorithm::Copies);
        let pool = builder.faults(plan.clone()).build().unwrap();
        plan.resume();
        let failed = pool.run(|dev, _| prepared.check(dev));
        plan.pause();
        assert!(!plan.fired().is_empty(), "{op:?} {nth}: it does not get that far");
        assert!(matches!(failure(failed), Error::Driver { .. } | Error::Aborted { .. }), "{op:?} {nth}");
        assert_works(&pool);
        pool.run(|dev, _| prepared.check(dev)).unwrap();
        assert_nothing_kept(&pool);
    }
}

// Of a member that has none for what others would send: all go by slices, which need none.
#[test]
fn without_memory_sums_by_kernels_are_made_all_the_same() {
    on_cuda(2, |gpus| {
        let n = gpus.up_to(4);
        let pool = builder(gpus, n).algorithm(Algorithm::Exchange).memory_limit(64 << 20).build().unwrap();
        if pool.explain(DType::BF16, ReduceOp::Sum, 8 << 20).unwrap().meets != "flags" {
            return println!("skipped: kernels do not meet here");
        }
        pool.run(|dev, _| {
            let mut x = dev.upload(&vec![bf16::from_f32(dev.rank() as f32); 4_000_000])?;
            let mut fills = Vec::new();
            if dev.rank() == 1 {
                for bytes in [4 << 20, 1 << 20, 64 << 10, 4 << 10, 512] {
                    while let Ok(fill) = dev.zeros::<u8>(bytes) {
                        fills.push(fill);
                    }
                }
            }
            for _ in 0..2 {
                dev.all_reduce(&mut x, ReduceOp::Max)?;
            }
            assert!(dev.download(&x)?.iter().all(|x| x.to_f32() == (n - 1) as f32));
            Ok(())
        })
        .unwrap();
    });
}
