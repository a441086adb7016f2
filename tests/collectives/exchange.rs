//! Slices that go to their owners by copy engines, are added up there, and come back, piece by piece. The other tests have parts of
//! one piece.

use crate::{
    cases::{Case, Kind, Prepared, check_all, kinds},
    numbers::Num,
    on_both,
    rig::{assert_nothing_kept, assert_works, builder},
    support::{Gpus, failure},
};
use gpu_pool::{
    Algorithm, Check, Error, GpuPool, ReduceOp,
    testing::{FaultOp, FaultPlan, FaultRule, Injected},
};

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

on_both! {
    // On software GPUs the race checker watches the slots.
    2: fn every_collective_in_many_pieces(gpus) {
        check::<f64>(gpus, 2, ReduceOp::Sum);
    }

    3: fn every_collective_of_three_in_several_pieces(gpus) {
        check::<i64>(gpus, 3, ReduceOp::Avg);
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
