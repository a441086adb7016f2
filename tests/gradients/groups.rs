//! Exchanges of a group's members: data parallel within a part of the devices, and in each dimension of a grid.

use crate::{
    on_both,
    rig::{self, SIZES, all, backwards, bits, give, norm_of, numbers, refused, small, step},
    support::failure,
};
use gpu_pool::{
    Error, Group, ReduceOp, Result,
    gradients::{GradientExchange, Wire},
};
use parking_lot::Mutex;
use std::time::Duration;

/// What must come of a step: each gradient by a plain all-reduce of the group. What is not `used` by this member is
/// zeros.
fn plain(group: &Group<'_>, number: usize, op: ReduceOp, used: impl Fn(usize) -> bool) -> Result<Vec<Vec<f32>>> {
    let dev = group.device();
    rig::plain_with(dev, &SIZES, number, used, |x| group.all_reduce(x, op))
}

on_both! {
    // Who is first is who the group says, not who has the lowest number; with three, sums tell the order, too.
    2: fn all_in_another_order(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for wire in [Wire::Same, Wire::Bf16] {
            pool.run(|dev, _| {
                let ranks: Vec<usize> = (0..n).rev().collect();
                let group = dev.group(&ranks)?;
                let mut exchange = small().wire(wire).first_bucket_bytes(1).bucket_bytes(1).build_in(&group, &SIZES)?;
                for number in 0..3 {
                    let mut order = backwards(SIZES.len());
                    if dev.index() == n - 1 {
                        order.reverse();
                    }
                    let before: Vec<usize> =
                        (0..exchange.buckets()).flat_map(|b| exchange.bucket(b).to_vec()).collect();
                    assert_eq!(
                        before[0],
                        if number == 0 { SIZES.len() - 1 } else { 0 },
                        "the order of the last device"
                    );
                    step(dev, &mut exchange, &SIZES, number, &order)?;
                    let found = all(dev, &exchange)?;
                    if wire == Wire::Same {
                        assert_eq!(bits(&found), bits(&plain(&group, number, ReduceOp::Avg, |_| true)?));
                    }
                    assert!(dev.exchange(bits(&found))?.iter().all(|other| *other == bits(&found)));
                }
                Ok(())
            })
            .unwrap();
        }
    }

    1: fn a_group_of_one(gpus) {
        let n = gpus.up_to(3);
        rig::run(gpus, n, |dev| {
            let group = dev.group(&[dev.rank()])?;
            let mut exchange = small().build_in(&group, &SIZES)?;
            for number in 0..3 {
                // As often as each likes: nobody meets.
                for again in 0..=dev.rank() {
                    step(dev, &mut exchange, &SIZES, number + again, &backwards(SIZES.len()))?;
                }
                let own: Vec<_> =
                    (0..SIZES.len()).map(|g| numbers(number + dev.rank(), dev.rank(), g, SIZES[g])).collect();
                assert_eq!(bits(&all(dev, &exchange)?), bits(&own));
            }
            Ok(())
        });
    }

    // Sums, averages, norms, what is unused, and the order of buckets are the group's.
    4: fn each_group_by_itself(gpus) {
        let pool = rig::pool(gpus, 4);
        for op in [ReduceOp::Avg, ReduceOp::Sum, ReduceOp::Scaled(1.0)] {
            let mut state = pool
                .per_device(|dev, shard| {
                    let ranks = [[0, 2], [3, 1]][shard.index() % 2];
                    small().reduce(op).build_in(&dev.group(&ranks)?, &SIZES)
                })
                .unwrap();
            for number in 0..3 {
                state
                    .run(|dev, shard, exchange| {
                        let group = dev.group(&[[0, 2], [3, 1]][shard.index() % 2])?;
                        let mut op = op;
                        if let ReduceOp::Scaled(_) = op {
                            exchange.set_weight(0.5 + dev.rank() as f64)?;
                            op = ReduceOp::Scaled(0.5 + dev.rank() as f64);
                        }
                        // 2 is nobody's among the odd ones, 3 is only the first one's among the even ones.
                        let used = |gradient: usize| match (shard.index() % 2, gradient) {
                            (1, 2) => false,
                            (0, 3) => group.rank() == 0,
                            _ => true,
                        };
                        let mut order: Vec<usize> = backwards(SIZES.len()).into_iter().filter(|g| used(*g)).collect();
                        if shard.index() == 3 {
                            order.reverse();
                        }
                        let done = step(dev, exchange, &SIZES, number, &order)?;
                        assert_eq!(done.moved(), number == 0 && shard.index() % 2 == 1);
                        assert_eq!(done.unused(), if shard.index() % 2 == 1 { &[2][..] } else { &[] });
                        let norm = f64::from(dev.download(&done.norm().expect("asked for"))?[0]);
                        let expected = plain(&group, number, op, used)?;
                        assert_eq!(bits(&all(dev, exchange)?), bits(&expected), "{op} in step {number}");
                        assert!((norm / norm_of(&expected) - 1.0).abs() < 1e-7, "{norm}");
                        Ok(())
                    })
                    .unwrap();
            }
        }
    }

    // Two exchanges on each device: of its row, and of its column. Steps of both go on at once.
    4: fn a_grid_of_two_dimensions(gpus) {
        let pool = rig::pool(gpus, 4);
        for wire in [Wire::Same, Wire::F16] {
            pool.run(|dev, shard| {
                let at = shard.index();
                let row = dev.group(&[at / 2 * 2, at / 2 * 2 + 1])?;
                let column = dev.group(&[at % 2, at % 2 + 2])?;
                let mut by_row = small().wire(wire).build_in(&row, &SIZES)?;
                let mut by_column = small().wire(wire).reduce(ReduceOp::Sum).build_in(&column, &SIZES)?;
                for number in 0..4 {
                    for gradient in backwards(SIZES.len()) {
                        let x = numbers(number, dev.rank(), gradient, SIZES[gradient]);
                        give(dev, &mut by_row, gradient, &x)?;
                        give(dev, &mut by_column, gradient, &x)?;
                    }
                    by_column.finish(dev)?;
                    by_row.finish(dev)?;
                    let (rows, columns) = (all(dev, &by_row)?, all(dev, &by_column)?);
                    if wire == Wire::Same {
                        assert_eq!(bits(&rows), bits(&plain(&row, number, ReduceOp::Avg, |_| true)?));
                        assert_eq!(bits(&columns), bits(&plain(&column, number, ReduceOp::Sum, |_| true)?));
                    }
                    assert_eq!(row.exchange(bits(&rows))?, vec![bits(&rows); 2]);
                    assert_eq!(column.exchange(bits(&columns))?, vec![bits(&columns); 2]);
                }
                Ok(())
            })
            .unwrap();
        }
    }

    // Each waits for one that waits for another: no two of them can see it by themselves.
    4: fn a_grid_in_orders_that_make_a_ring(gpus) {
        let pool = rig::builder(gpus, 4).timeout(Duration::from_secs(2)).build().unwrap();
        let error = failure(pool.run(|dev, shard| {
            let at = shard.index();
            let row = dev.group(&[at / 2 * 2, at / 2 * 2 + 1])?;
            let column = dev.group(&[at % 2, at % 2 + 2])?;
            let mut by_row = small().build_in(&row, &[4])?;
            let mut by_column = small().build_in(&column, &[4])?;
            // 0 waits for 1, and so on to 3, 2 and back.
            let [first, second] = match at {
                0 | 3 => [&mut by_row, &mut by_column],
                _ => [&mut by_column, &mut by_row],
            };
            give(dev, first, 0, &[1.0; 4])?;
            give(dev, second, 0, &[1.0; 4])?;
            by_row.finish(dev)?;
            by_column.finish(dev).map(drop)
        }));
        assert!(matches!(error, Error::Timeout { .. } | Error::Deadlock { .. }), "{error}");
    }

    3: fn others_need_not_know_of_it(gpus) {
        rig::run(gpus, 3, |dev| {
            if dev.rank() == 1 {
                return Ok(());
            }
            let group = dev.group(&[2, 0])?;
            let mut exchange = small().build_in(&group, &SIZES)?;
            for number in 0..3 {
                step(dev, &mut exchange, &SIZES, number, &backwards(SIZES.len()))?;
                assert_eq!(bits(&all(dev, &exchange)?), bits(&plain(&group, number, ReduceOp::Avg, |_| true)?));
            }
            exchange.reset(dev)?;
            group.barrier()
        });
    }

    4: fn in_later_gangs(gpus) {
        let pool = rig::pool(gpus, 4);
        let state = pool.per_device(|_, _| Ok(None)).unwrap();
        pool.run(|dev, _| {
            if dev.index() % 2 == 1 {
                let exchange: GradientExchange = small().build_in(&dev.group(&[1, 3])?, &SIZES)?;
                *state.borrow_mut(dev)? = Some(exchange);
            }
            Ok(())
        })
        .unwrap();
        // In any gang that has its members, whatever their ranks there.
        for (number, gang) in [&[3, 1, 0][..], &[1, 3], &[3, 1], &[0, 1, 2, 3]].into_iter().enumerate() {
            pool.on(gang).run(|dev, _| {
                if let Some(exchange) = state.borrow_mut(dev)?.as_mut() {
                    let ranks = [1, 3].map(|device| gang.iter().position(|other| *other == device).unwrap());
                    step(dev, exchange, &SIZES, number, &backwards(SIZES.len()))?;
                    let expected = plain(&dev.group(&ranks)?, number, ReduceOp::Avg, |_| true)?;
                    assert_eq!(bits(&all(dev, exchange)?), bits(&expected));
                }
                Ok(())
            })
            .unwrap();
        }
        let error = failure(pool.on(&[1, 2]).run(|dev, _| match state.borrow_mut(dev)?.as_mut() {
            Some(exchange) => exchange.ready(dev, 0),
            None => Ok(()),
        }));
        let why = refused::<()>(Err(error));
        assert!(why.contains("[1, 3]") && why.contains("[1, 2]"), "{why}");
    }

    // nccl#1417. The devices are named, not ranks in the group; and nobody else is to blame.
    4: fn members_that_differ(gpus) {
        let pool = rig::pool(gpus, 4);
        let differ = |f: &(dyn Fn(&Group<'_>) -> Result<()> + Sync)| {
            let error = failure(pool.run(|dev, shard| {
                f(&dev.group(&[[2, 0], [3, 1]][shard.index() % 2])?)
            }));
            let Error::Mismatch { what, a, b, a_site, b_site, .. } = &error else { panic!("no mismatch: {error}") };
            assert!([a_site, b_site].iter().all(|site| site.file().ends_with("groups.rs")), "{error}");
            (*what, *a, *b)
        };
        let sizes = differ(&|group| {
            let sizes = if group.device().index() == 1 { [3, 5] } else { [3, 4] };
            small().build_in(group, &sizes).map(drop)
        });
        assert_eq!(sizes, ("size", 3, 1));
        let steps = differ(&|group| {
            let dev = group.device();
            let mut exchange = small().build_in(group, &[4])?;
            for number in 0..4 {
                let skips = if dev.index() == 1 { 2 } else { 0 };
                exchange.set_sync(number == 3 || number == skips)?;
                give(dev, &mut exchange, 0, &[1.0; 4])?;
                exchange.finish(dev)?;
            }
            Ok(())
        });
        assert_eq!(steps, ("step", 3, 1));
    }

    // pytorch#113281: a gang fails as a whole, so the other group does not wait either.
    4: fn a_member_of_one_group_fails(gpus) {
        let pool = rig::pool(gpus, 4);
        let ranks = |index: usize| [[0, 2], [3, 1]][index % 2];
        let mut state =
            pool.per_device(|dev, shard| small().build_in(&dev.group(&ranks(shard.index()))?, &SIZES)).unwrap();
        for round in 0..2 {
            let told = Mutex::new(Vec::new());
            let error = failure(state.run(|dev, shard, exchange| {
                let mut run = || {
                    for (k, gradient) in backwards(SIZES.len()).into_iter().enumerate() {
                        if shard.index() == 1 && k == 4 {
                            return Err(Error::custom("the backward pass failed"));
                        }
                        give(dev, exchange, gradient, &vec![1.0; SIZES[gradient]])?;
                    }
                    exchange.finish(dev)?;
                    dev.barrier()
                };
                run().inspect_err(|error| told.lock().push((dev.index(), error.clone())))
            }));
            assert_eq!(error.to_string(), "the backward pass failed");
            for (device, error) in told.into_inner() {
                let aborted = matches!(&error, Error::Aborted { by: 1, .. });
                assert!(device == 1 || aborted || matches!(error, Error::Mismatch { .. }), "{device}: {error}");
            }
            state.clear_poison().unwrap();
            state.run(|dev, _, exchange| exchange.reset(dev)).unwrap();
            state
                .run(|dev, shard, exchange| {
                    let group = dev.group(&ranks(shard.index()))?;
                    step(dev, exchange, &SIZES, round, &backwards(SIZES.len()))?;
                    let expected = plain(&group, round, ReduceOp::Avg, |_| true)?;
                    assert_eq!(bits(&all(dev, exchange)?), bits(&expected));
                    Ok(())
                })
                .unwrap();
        }
    }
}
