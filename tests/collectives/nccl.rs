//! nccl-tests, written anew from what they do: every collective, element type, operation and root, in place and out of
//! place, aligned and not, for 1 to 8 devices. Inputs are such that every order of additions gives the same, and
//! results are compared exactly (`numbers.rs`). The product of all that is sampled, always in the same way; what is
//! never left out is in the tests' names.
//!
//! ```text
//! nccl-tests -o all -d all -r all -c 1 -u -b 0 -e ..
//! ```

use crate::{
    cases::{Case, Kind, MOVING, REDUCING, ROOTED, check_all, kinds},
    numbers::{OPS, Rng, each_type},
    on_both, rig,
    rig::{WAYS, Way, ways},
    support::cases,
};
use gpu_pool::{AsView, AsViewMut, GpuPool, ReduceOp};

/// Every collective of every type, the reducing ones with these operations, for a gang of `n` drawn from a pool.
fn every_type(pool: &GpuPool, rng: &mut Rng, n: usize, ops: &[ReduceOp]) {
    each_type!(T => {
        let mut cases: Vec<Case> = Vec::new();
        for kind in REDUCING {
            cases.extend(ops.iter().map(|op| Case::any(rng, kind, *op, n)));
        }
        cases.extend(MOVING.map(|kind| Case::any(rng, kind, ReduceOp::Sum, n)));
        check_all::<T>(pool, &rng.choose(n, pool.device_count()), cases);
    });
}

on_both! {
    // Each operation at two sizes of gangs at least; at the last one all of them.
    1: fn every_collective_type_and_operation_for_1_to_8_devices(gpus) {
        let of = gpus.up_to(8);
        let pool = rig::pool(gpus, of);
        let mut rng = Rng(1);
        for n in 1..of {
            every_type(&pool, &mut rng, n, &[OPS[2 * n % 6], OPS[(2 * n + 1) % 6]][..cases(1, 2)]);
        }
        every_type(&pool, &mut rng, of, &OPS[cases(3, 0)..]);
    }

    2: fn every_collective_and_type_in_every_way(gpus) {
        let mut rng = Rng(2);
        for (k, way) in WAYS.into_iter().enumerate() {
            let of = gpus.up_to(5);
            let pool = way.pool(gpus, of);
            let sizes = [2.max(of - 2), of];
            for &n in cases(&sizes[k % 2..=k % 2], &sizes) {
                println!("{way:?}, {n} devices");
                let op = rng.pick(&OPS);
                every_type(&pool, &mut rng, n, &[op]);
            }
        }
    }

    1: fn every_root(gpus) {
        let of = gpus.up_to(8);
        let pool = rig::pool(gpus, of);
        let mut rng = Rng(3);
        for n in 1..=of {
            let mut cases = Vec::new();
            for root in 0..n {
                cases.extend(ROOTED.map(|kind| {
                    let op = rng.pick(&OPS);
                    Case { root, ..Case::any(&mut rng, kind, op, n) }
                }));
            }
            let gang = rng.choose(n, of);
            match n % 3 {
                0 => check_all::<half::f16>(&pool, &gang, cases),
                1 => check_all::<i64>(&pool, &gang, cases),
                _ => check_all::<f32>(&pool, &gang, cases),
            }
        }
    }

    2: fn many_sizes_of_every_collective(gpus) {
        let most = gpus.up_to(8);
        let mut rng = Rng(4);
        for way in [Way::Default, Way::Staged] {
            let pool = way.pool(gpus, most);
            for n in [2, 3, 7] {
                if n > most {
                    continue;
                }
                let edges = [2, 3, n - 1, n, n + 1, 31, 32, 33, 127, 511, 512, 513, 4095, 4096, 4097];
                for kind in kinds() {
                    let sizes = [0, 1, rng.pick(&edges), rng.pick(&edges), rng.pick(&edges), rng.pick(&edges)];
                    let cases = sizes.map(|count| {
                        let op = rng.pick(&OPS);
                        Case { count, ..Case::any(&mut rng, kind, op, n) }
                    });
                    match rng.below(4) {
                        0 => check_all::<u8>(&pool, &rng.choose(n, most), cases),
                        1 => check_all::<half::bf16>(&pool, &rng.choose(n, most), cases),
                        2 => check_all::<i32>(&pool, &rng.choose(n, most), cases),
                        _ => check_all::<f64>(&pool, &rng.choose(n, most), cases),
                    }
                }
            }
        }
    }

    // More than a block's share, more than a piece of a staged copy, and no multiple of anything.
    2: fn a_hundred_thousand_and_three(gpus) {
        let n = gpus.up_to(3);
        let mut rng = Rng(5);
        for (_, pool) in ways(gpus, n) {
            let gang = rng.choose(n, n);
            // Those that have a way of their own; the others are made of the same parts.
            let kinds = [
                Kind::AllReduce,
                Kind::ReduceScatter,
                Kind::AllGatherV,
                Kind::Broadcast,
                Kind::AllToAllV,
                Kind::SendRecv,
            ];
            let cases = kinds.map(|kind| Case { count: 100_003, ..Case::any(&mut rng, kind, ReduceOp::Sum, n) });
            check_all::<f32>(&pool, &gang, cases);
        }
    }

    // Each step across one dimension of a cube: at the end everybody has what everybody had.
    2: fn hypercube(gpus) {
        for n in [2, 4, 8] {
            if n > gpus.up_to(8) {
                continue;
            }
            let found = rig::pool(gpus, n).run(|dev, _| {
                let (rank, each) = (dev.rank(), 1001);
                let mut x = dev.zeros::<u32>(n * each)?;
                let own: Vec<u32> = (0..each as u32).map(|i| i * 8 + rank as u32).collect();
                dev.upload_into(&own, &mut x.slice_mut(rank * each..(rank + 1) * each))?;
                let mut have = 1;
                while have < n {
                    let first = rank / have * have;
                    let theirs = first ^ have;
                    let mine = dev.upload(&dev.download(&x.slice(first * each..(first + have) * each))?)?;
                    let mut into = x.slice_mut(theirs * each..(theirs + have) * each);
                    dev.sendrecv(&mine, rank ^ have, &mut into, rank ^ have)?;
                    have *= 2;
                }
                dev.download(&x)
            });
            let all: Vec<u32> = (0..n as u32).flat_map(|r| (0..1001).map(move |i| i * 8 + r)).collect();
            assert_eq!(found.unwrap(), vec![all; n]);
        }
    }

    // `-m`: several calls one after the other, none waited for.
    2: fn several_collectives_under_way_at_once(gpus) {
        let n = gpus.up_to(4);
        for (_, pool) in ways(gpus, n) {
            let found = pool.run(|dev, _| {
                let mut all =
                    (0..20).map(|k| dev.upload(&vec![(k + dev.rank()) as f32; 777])).collect::<Result<Vec<_>, _>>()?;
                for x in &mut all {
                    dev.all_reduce(x, ReduceOp::Sum)?;
                }
                all.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>, _>>()
            });
            for results in found.unwrap() {
                for (k, x) in results.into_iter().enumerate() {
                    assert_eq!(x, vec![(k * n + n * (n - 1) / 2) as f32; 777]);
                }
            }
        }
    }

    // What has room for it at the far end of a buffer of more than 4 GiB: indices do not fit into 32 bits.
    2: fn beyond_four_gib(gpus) {
        if !gpus.is_cuda() {
            return;
        }
        let n = gpus.up_to(2);
        let len = (1usize << 32) + 4097;
        let ends = rig::pool(gpus, n).run(|dev, _| {
            let mut x = dev.zeros::<u8>(len)?;
            dev.upload_into(&[1, 2, 3], &mut x.slice_mut(len - 3..))?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.broadcast(&mut x, n - 1)?;
            Ok((dev.download(&x.slice(len - 4..))?, dev.download(&x.slice(..2))?))
        });
        let sum = |x: u8| x * n as u8;
        assert_eq!(ends.unwrap(), vec![(vec![0, sum(1), sum(2), sum(3)], vec![0, 0]); n]);
    }

    // In place means the same element of the same buffer; anything else that overlaps cannot be written in safe Rust,
    // and a source that is a view of the destination's buffer does not compile. Two parts of one buffer may be source
    // and destination.
    2: fn source_and_destination_in_one_buffer(gpus) {
        let n = gpus.up_to(3);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let mut x = dev.upload(&(0..20).map(|i| i as f32).collect::<Vec<_>>())?;
                let (a, b) = x.view_mut().split_at_mut(9);
                dev.all_reduce_into(&a, &mut b.slice_mut(1..10), ReduceOp::Sum)?;
                dev.download(&x)
            });
            let expected: Vec<f32> =
                (0..20).map(|i| if (10..19).contains(&i) { n * (i - 10) } else { i } as f32).collect();
            assert_eq!(found.unwrap(), vec![expected; n]);
        }
    }

    1: fn lengths_that_do_not_fit_are_refused_at_once(gpus) {
        let n = gpus.up_to(3);
        rig::run(gpus, n, |dev| {
            let x = dev.zeros::<f32>(2 * n + 1)?;
            let mut y = dev.zeros::<f32>(2 * n + 2)?;
            let me = dev.rank();
            let fits = vec![2; n];
            let none = vec![usize::MAX; n + 1];
            let refused = [
                rig::invalid(dev.all_reduce_into(&x, &mut y, ReduceOp::Sum)),
                rig::invalid(dev.reduce(&mut y, ReduceOp::Sum, n)),
                rig::invalid(dev.reduce_scatter(&x, &mut y, ReduceOp::Sum)),
                rig::invalid(dev.reduce_scatter_v(&x, &mut y, &fits, ReduceOp::Sum)),
                rig::invalid(dev.reduce_scatter_v(&x, &mut y, &none, ReduceOp::Sum)),
                rig::invalid(dev.all_gather(&x, &mut y)),
                rig::invalid(dev.all_gather_v(&x, &mut y, &fits)),
                rig::invalid(dev.broadcast(&mut y, n)),
                rig::invalid(dev.gather(&x, Some(y.view_mut()), me)),
                rig::invalid(dev.gather(&x, None, me)),
                rig::invalid(dev.gather_v(&x, None, &fits, n)),
                rig::invalid(dev.scatter(Some(x.view()), &mut y, me)),
                rig::invalid(dev.scatter(None, &mut y, me)),
                rig::invalid(dev.scatter_v(None, &mut y, &fits, 0)),
                rig::invalid(dev.all_to_all_v(&x, &fits, &mut y, &fits)),
                rig::invalid(dev.send(&x, n)),
                rig::invalid(dev.recv(&mut y, n)),
            ];
            assert!(refused.iter().all(|why| !why.is_empty()), "{refused:?}");
            if n > 1 {
                let mut odd = dev.zeros::<f32>(n + 1)?;
                rig::invalid(dev.reduce_scatter_in_place(&mut odd, ReduceOp::Sum));
                rig::invalid(dev.all_gather_in_place(&mut odd));
                rig::invalid(dev.all_to_all(&odd, &mut dev.zeros::<f32>(n + 1)?));
                // Only the root gives the whole buffer.
                let not_me = (me + 1) % n;
                rig::invalid(dev.gather(&dev.zeros::<f32>(1)?, Some(odd.view_mut()), not_me));
                rig::invalid(dev.scatter(Some(odd.view()), &mut dev.zeros::<f32>(1)?, not_me));
            }
            // It met nobody, so nobody has to have been refused alike.
            rig::sum_works(dev)
        });
    }
}

/// Kinds that this file runs, so that a new one is not forgotten.
#[test]
fn every_kind_is_listed() {
    let all: Vec<Kind> = kinds().collect();
    assert_eq!(all.len(), Kind::SendRecv as usize + 1);
    assert!(all.iter().enumerate().all(|(at, kind)| !all[..at].contains(kind)));
    assert!(ROOTED.iter().all(|kind| all.contains(kind)));
}
