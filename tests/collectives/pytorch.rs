//! PyTorch's `test_multi_threaded_pg.py`, where ranks are threads of one process: there for tests only, here the thing
//! itself.

use crate::{
    on_both, rig,
    rig::{assert_works, sum_works},
    support::failure,
};
use gpu_pool::{AsView, AsViewMut, Error, ReduceOp};
use std::thread;

on_both! {
    2: fn broadcast(gpus) {
        let n = gpus.up_to(4);
        for root in 0..n {
            let found = rig::pool(gpus, n).run(|dev, _| {
                let mut x = dev.upload(&[dev.rank() as f32; 5])?;
                dev.broadcast(&mut x, root)?;
                dev.download(&x)
            });
            assert_eq!(found.unwrap(), vec![[root as f32; 5]; n]);
        }
    }

    2: fn scatter(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let all = (dev.rank() == n - 1).then(|| dev.upload(&(0..n as u32 * 3).collect::<Vec<_>>())).transpose()?;
            let mut x = dev.zeros::<u32>(3)?;
            dev.scatter(all.as_ref().map(|all| all.view()), &mut x, n - 1)?;
            dev.download(&x)
        });
        let expected: Vec<Vec<u32>> = (0..n as u32).map(|r| (3 * r..3 * r + 3).collect()).collect();
        assert_eq!(found.unwrap(), expected);
    }

    2: fn reduce(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut x = dev.upload(&[dev.rank() as f64; 4])?;
            dev.reduce(&mut x, ReduceOp::Sum, 0)?;
            dev.download(&x)
        });
        for (rank, x) in found.unwrap().into_iter().enumerate() {
            assert_eq!(x, [if rank == 0 { n * (n - 1) / 2 } else { rank } as f64; 4]);
        }
    }

    2: fn reduce_scatter(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let x = dev.upload(&(0..2 * n).map(|i| (i + dev.rank()) as i64).collect::<Vec<_>>())?;
            let mut y = dev.zeros::<i64>(2)?;
            dev.reduce_scatter(&x, &mut y, ReduceOp::Sum)?;
            dev.download(&y)
        });
        let at = |i: usize| (i * n + n * (n - 1) / 2) as i64;
        assert_eq!(found.unwrap(), (0..n).map(|r| [at(2 * r), at(2 * r + 1)]).collect::<Vec<_>>());
    }

    2: fn all_gather(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut all = dev.zeros::<u8>(3 * n)?;
            dev.all_gather(&dev.upload(&[dev.rank() as u8; 3])?, &mut all)?;
            dev.download(&all)
        });
        let all: Vec<u8> = (0..n as u8).flat_map(|r| [r; 3]).collect();
        assert_eq!(found.unwrap(), vec![all; n]);
    }

    2: fn gather(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut all = (dev.rank() == 0).then(|| dev.zeros::<i8>(n)).transpose()?;
            dev.gather(&dev.upload(&[-(dev.rank() as i8)])?, all.as_mut().map(|all| all.view_mut()), 0)?;
            all.map(|all| dev.download(&all)).transpose()
        });
        let mut expected = vec![None; n];
        expected[0] = Some((0..n as i8).map(|r| -r).collect::<Vec<_>>());
        assert_eq!(found.unwrap(), expected);
    }

    2: fn all_reduce(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        assert_works(&pool);
        for root in 0..n {
            let found = pool.run(|dev, _| {
                let mut x = dev.upload(&[if dev.rank() == root { 3.0f32 } else { 0.0 }; 3])?;
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.download(&x)
            });
            assert_eq!(found.unwrap(), vec![[3.0; 3]; n]);
        }
    }

    2: fn all_reduce_ops(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let ops =
                [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg, ReduceOp::Scaled(0.5)];
            let one = |op| {
                let mut x = dev.upload(&[dev.rank() as f64 + 1.0])?;
                dev.all_reduce(&mut x, op)?;
                Ok(dev.download(&x)?[0])
            };
            ops.map(one).into_iter().collect::<Result<Vec<f64>, Error>>()
        });
        let (sum, product) = ((n * (n + 1) / 2) as f64, (1..=n).product::<usize>() as f64);
        for found in found.unwrap() {
            assert!((found[4] - sum / n as f64).abs() < 1e-15);
            assert_eq!([found[0], found[1], found[2], found[3], found[5]], [sum, product, 1.0, n as f64, sum / 2.0]);
        }
    }

    // One call on many tensors there; here several calls, of other lengths, none waited for.
    2: fn all_reduce_coalesced(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let mut all = (1..30).map(|len| dev.upload(&vec![1.5f32; len * len])).collect::<Result<Vec<_>, _>>()?;
            all.iter_mut().try_for_each(|x| dev.all_reduce(x, ReduceOp::Sum))?;
            all.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>, _>>()
        });
        for (k, x) in found.unwrap().into_iter().flatten().enumerate() {
            let len = k % 29 + 1;
            assert_eq!(x, vec![1.5 * n as f32; len * len]);
        }
    }

    2: fn all_to_all(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let x = dev.upload(&(0..n).map(|to| (10 * dev.rank() + to) as u32).collect::<Vec<_>>())?;
            let mut y = dev.zeros::<u32>(n)?;
            dev.all_to_all(&x, &mut y)?;
            dev.download(&y)
        });
        assert_eq!(
            found.unwrap(),
            (0..n).map(|me| (0..n).map(|a| (10 * a + me) as u32).collect::<Vec<_>>()).collect::<Vec<_>>()
        );
    }

    2: fn broadcast_object_list(gpus) {
        let n = gpus.up_to(4);
        let found = rig::pool(gpus, n).run(|dev, _| {
            let own = (dev.rank() == 1).then(|| vec!["any".to_owned(), "value".to_owned()]);
            Ok(dev.exchange(own)?.swap_remove(1).unwrap())
        });
        assert_eq!(found.unwrap(), vec![["any", "value"]; n]);
    }

    2: fn collective_error_on_rank_zero(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for rank in [0, 1] {
            let error = failure(pool.run(|dev, _| match dev.rank() == rank {
                true => Err(Error::custom("mimic an error")),
                false => sum_works(dev),
            }));
            assert_eq!(error.to_string(), "mimic an error");
            assert_works(&pool);
        }
    }

    2: fn collective_error_on_all_but_rank_zero(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let error = failure(pool.run(|dev, _| match dev.rank() {
            0 => sum_works(dev),
            rank => Err(Error::custom(format!("error {rank}"))),
        }));
        assert!(error.to_string().starts_with("error "), "{error}");
        assert_works(&pool);
    }

    4: fn subpg(gpus) {
        let found = rig::pool(gpus, 4).run(|dev, _| {
            let group = dev.group(if dev.rank() < 2 { &[0, 1] } else { &[2, 3] })?;
            let mut x = dev.upload(&[dev.rank() as u32])?;
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        });
        assert_eq!(found.unwrap(), [[1], [1], [5], [5]]);
    }

    // Forward and backward are two scopes here: groups of the same members in both, with state that stays on the
    // devices.
    2: fn bwd_sees_fwd_pg(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let state = pool.per_device(|dev, _| dev.upload(&[dev.rank() as f32; 100])).unwrap();
        let ranks: Vec<usize> = (0..n).rev().collect();
        for step in 1..4 {
            pool.run(|dev, _| {
                let mut x = state.borrow_mut(dev)?;
                dev.group(&ranks)?.all_reduce(&mut *x, ReduceOp::Sum)
            })
            .unwrap();
            let found = pool.run(|dev, _| {
                let mut x = state.borrow_mut(dev)?;
                dev.group(&ranks)?.broadcast(&mut *x, step % n)?;
                dev.download(&*x)
            });
            let sum = n * (n - 1) / 2 * n.pow(step as u32 - 1);
            assert_eq!(found.unwrap(), vec![vec![sum as f32; 100]; n]);
        }
    }

    // test_using_pg_from_another_thread: a scope is called from any thread of the program.
    2: fn from_another_thread(gpus) {
        let pool = rig::pool(gpus, 2);
        thread::scope(|s| s.spawn(|| assert_works(&pool)).join()).unwrap();
        assert_works(&pool);
    }

    // test_c10d_ops_nccl: empty tensors, and tensors of no dimension.
    2: fn empty_tensors(gpus) {
        let n = gpus.up_to(4);
        rig::pool(gpus, n)
            .run(|dev, _| {
                let (mut x, mut y) = (dev.zeros::<f32>(0)?, dev.zeros::<f32>(0)?);
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.broadcast(&mut x, 0)?;
                dev.reduce(&mut x, ReduceOp::Max, n - 1)?;
                dev.all_gather(&x, &mut y)?;
                dev.reduce_scatter(&x, &mut y, ReduceOp::Sum)?;
                dev.all_to_all(&x, &mut y)?;
                dev.gather(&x, (dev.rank() == 0).then(|| y.view_mut()), 0)?;
                dev.scatter((dev.rank() == 0).then(|| x.view()), &mut y, 0)?;
                dev.sendrecv(&x, (dev.rank() + 1) % n, &mut y, (dev.rank() + n - 1) % n)?;
                sum_works(dev)
            })
            .unwrap();
    }

    // test_pg_wrapper's test_collectives_op_mismatch: 500 that match, and then some that do not.
    2: fn five_hundred_that_match_and_then_one_that_does_not(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; 200])?;
            (0..500).try_for_each(|_| dev.all_reduce(&mut x, ReduceOp::Max))?;
            let first = dev.rank() == 0;
            let (mut all, own) = (dev.zeros::<f32>(200 * n)?, dev.zeros::<f32>(200)?);
            let found = [
                rig::mismatch(if first {
                    dev.all_reduce(&mut x, ReduceOp::Sum)
                } else {
                    dev.reduce(&mut x, ReduceOp::Sum, 0)
                }),
                rig::mismatch(if first { dev.reduce(&mut x, ReduceOp::Sum, 0) } else { dev.barrier() }),
                rig::mismatch(if first { dev.broadcast(&mut x, 0) } else { dev.all_gather(&own, &mut all) }),
            ];
            assert_eq!(dev.download(&x)?, [1.0; 200]);
            Ok(found)
        });
        for found in found.unwrap() {
            let says = |at: usize, calls: [&str; 2]| {
                let text = &found[at].text;
                assert!(found[at].what == "operation" && calls.iter().all(|call| text.contains(call)), "{text}");
            };
            says(0, ["all_reduce(200 x F32, Sum)", "reduce(200 x F32, Sum, root 0)"]);
            says(1, ["reduce(200 x F32, Sum, root 0)", "barrier()"]);
            says(2, ["broadcast(200 x F32, root 0)", "all_gather(200 x F32)"]);
        }
        assert_works(&pool);
    }
}
