//! Devices that cannot name each other's memory: everything goes through stages in the host's. On CUDA by kernels that
//! meet there (peer access is switched off), on software GPUs by the same plan, ordered by events.

use crate::{
    cases::{Case, Kind, Prepared, check_all, kinds},
    numbers::{Num, OPS, Rng},
    on_both,
    rig::{assert_failure_is_told, assert_nothing_kept, builder, check_with_late_members},
    support::{self, Gpus},
};
use gpu_pool::{
    Builder, DType, GpuPool, ReduceOp,
    collective::{Algorithm, ReduceOrder},
};
use half::bf16;
use std::time::Duration;

fn staged(gpus: Gpus, count: usize) -> Builder {
    // By itself it is chosen on GPUs only: software GPUs have nothing to gain.
    let algorithm = if gpus.is_cuda() { Algorithm::Auto } else { Algorithm::Staged };
    builder(gpus, count).without_peer_access().algorithm(algorithm)
}

fn pool(gpus: Gpus, count: usize) -> GpuPool {
    staged(gpus, count).build().unwrap()
}

/// Every kind, with so many elements, at places that are aligned and at some that are not.
fn cases(rng: &mut Rng, n: usize, counts: &[usize]) -> Vec<Case> {
    let mut all = Vec::new();
    for kind in kinds() {
        for &count in counts {
            for starts in [(0, 0), (1, 3)] {
                let (op, root, salt) = (rng.pick(&OPS), rng.below(n), rng.next());
                all.push(Case { kind, op, root, count, starts, salt });
            }
        }
    }
    all
}

fn check<T: Num>(gpus: Gpus, seed: u64, counts: &[usize]) {
    let n = gpus.up_to(4);
    let pool = pool(gpus, n);
    let mut rng = Rng(seed);
    for members in support::cases(n, 2)..=n {
        let gang: Vec<usize> = (0..members).collect();
        check_all::<T>(&pool, &gang, cases(&mut rng, members, counts));
    }
    assert_nothing_kept(&pool);
}

on_both! {
    2: fn every_collective_of_few_elements(gpus) {
        check::<f32>(gpus, 91, &[0, 1, 3, 1023]);
        check::<u8>(gpus, 92, &[0, 1, 3, 1023]);
    }

    // Several pieces, and blocks with nothing to do in the last one.
    2: fn every_collective_of_many_pieces(gpus) {
        let host = support::cases(&[40_003][..], &[4099, 40_003]);
        let counts = if gpus.is_cuda() { &[4099, 100_003, (1 << 20) + 1] } else { host };
        check::<bf16>(gpus, 93, counts);
        check::<f64>(gpus, 94, counts);
        check::<i8>(gpus, 95, counts);
    }

    // Slots are used over and over.
    2: fn twenty_megabytes(gpus) {
        let n = gpus.up_to(3);
        let len = if gpus.is_cuda() { 5_000_011 } else { 300_011 };
        let case = |kind| Case { kind, op: ReduceOp::Sum, root: n - 1, count: len, starts: (0, 0), salt: 5 };
        let kinds =
            [Kind::AllReduce, Kind::AllReduceInto, Kind::ReduceScatterInPlace, Kind::AllGather, Kind::Broadcast];
        check_all::<f32>(&pool(gpus, n), &(0..n).collect::<Vec<_>>(), kinds.map(case));
    }

    // Small ones whose data carry their flags, larger ones in one piece and in several, and none, by turns and in
    // place: each finds slots, flags and epochs as the one before has left them.
    2: fn hundreds_in_a_row_of_changing_sizes(gpus) {
        let n = gpus.up_to(4);
        let sizes = [1, 40_000, 1000, 0, 17_000, 5, 300_000, 8192];
        let found = pool(gpus, n).run(|dev, _| {
            let mut x = dev.upload(&vec![1.0f32; 300_000])?;
            for round in 0..support::cases(80, 200) {
                let len = sizes[round % sizes.len()];
                dev.all_reduce(&mut x.slice_mut(..len), ReduceOp::Avg)?;
                if round % 5 == 0 {
                    let (pair, other) = (dev.rank() / 2 * 2, dev.rank() / 2 * 2 + 1);
                    if other < n {
                        dev.group(&[pair, other])?.all_reduce(&mut x.slice_mut(..len), ReduceOp::Max)?;
                    }
                }
            }
            dev.download(&x)
        });
        assert!(found.unwrap().iter().flatten().all(|x| *x == 1.0));
    }

    // The order of a fold is that of ranks, however it is carried out: bits are the direct way's.
    2: fn the_bits_of_the_direct_way(gpus) {
        let n = gpus.up_to(4);
        for len in [1000, 30_011, 200_003] {
            let sums = |builder: Builder| {
                let pool = builder.reduce_order(ReduceOrder::Rank).build().unwrap();
                pool.run(|dev, _| {
                    let mut rng = Rng(7 + dev.rank() as u64);
                    let x: Vec<f32> = (0..len).map(|_| rng.next() as f32 * 1e-19 - 0.9).collect();
                    let mut x = dev.upload(&x)?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    Ok(dev.download(&x)?.into_iter().map(f32::to_bits).collect::<Vec<_>>())
                })
                .unwrap()
            };
            let (ours, direct) = (sums(staged(gpus, n)), sums(builder(gpus, n)));
            assert!(ours.windows(2).all(|two| two[0] == two[1]) && ours[0] == direct[0], "{len} elements");
        }
    }

    // jax#38503: late on the host, and late on the device.
    2: fn a_member_that_is_late(gpus) {
        let n = gpus.up_to(3);
        let prepared: Vec<_> = kinds()
            .map(|kind| Case { kind, op: ReduceOp::Max, root: 0, count: 20_000, starts: (0, 0), salt: 3 })
            .map(|case| Prepared::<f32>::new(case, n))
            .collect();
        check_with_late_members(&pool(gpus, n), &prepared, Duration::from_millis(20));
    }

    // pytorch#113281: the others wait for one that has failed, in the middle of a row of collectives.
    2: fn a_member_that_fails_ends_the_others_waiting(gpus) {
        let n = gpus.up_to(3);
        let pool = pool(gpus, n);
        for len in [100, 50_000, 1_000_000] {
            assert_failure_is_told(&pool, (n - 1, len), |dev, x| {
                (0..5).try_for_each(|_| dev.all_reduce(x, ReduceOp::Avg))
            });
        }
    }

    2: fn it_says_so(gpus) {
        let pool = pool(gpus, 2);
        let how = |bytes| pool.explain(DType::F32, ReduceOp::Sum, bytes).unwrap();
        assert_eq!(how(1 << 20).algorithm, Algorithm::Staged, "{}", how(1 << 20));
        // Where a checker or blocking launches keep kernels from meeting, it is events.
        let meets = how(1 << 20).meets;
        assert!(if gpus.is_cuda() { meets == "flags" || meets == "events" } else { meets == "events" }, "{meets}");
    }
}
