//! Data parallel: replicas, optimizers, sharded state.
//!
//! Ports: PyTorch's `test_data_parallel_small_back`, `test_scatter_*`, `test_gather_*`, `test_replicate`,
//! `test_parallel_apply_passes_exception` (test/distributed/test_data_parallel.py), and issues #15161, #52260 and
//! #5039: fewer rows than devices.

mod accumulation;
mod captured;
mod failures;
mod formulas;
pub mod rig;
mod sharded;

use crate::{on_both, support::failure};
use gpu_pool::{Device, Error, Result, Shard};
use gpu_pool_train::{DataParallel, Gradients, Optimizer};
use rig::{Bag, SIZES, backward, bag, bags, bits, either, number, step, weights};

on_both! {
    // The first device's parameters are everyone's: `test_replicate`.
    2: fn replicas_begin_with_the_same_bits(gpus) {
        let pool = gpus.pool(gpus.up_to(4));
        let make = |dev: &Device| bag::<f32>(dev, &SIZES, 10 * dev.index() as u64);
        let mut model = DataParallel::new(&pool, Optimizer::sgd(0.1), make).unwrap();
        let all = weights(&mut model).unwrap();
        let parameter = |(k, len): (usize, &usize)| (0..*len).map(move |i| number(k as u64, i) as f32).collect();
        let first = SIZES.iter().enumerate().map(parameter).collect::<Vec<Vec<f32>>>().concat();
        assert!(all.iter().all(|own| bits(own) == bits(&first)));
    }

    // Batches of 30, 30, 30 and 10 rows, and of fewer rows than there are devices: the same parameters as on one
    // device, up to the order of sums; the results come in the order of the rows.
    1: fn any_number_of_devices_trains_alike(gpus) {
        let train = |n: usize, sharded: bool| {
            let pool = gpus.pool(n);
            let optimizer = Optimizer::sgd(0.2).momentum(0.5);
            let optimizer = either(optimizer, sharded);
            let mut model = DataParallel::new(&pool, optimizer, |dev| Ok(Bag(vec![dev.zeros::<f32>(2)?]))).unwrap();
            for batch in [30, 30, 30, 10, 3, 2, 1] {
                let seen = model.step(batch, |dev, shard, line, gradients| {
                    let rows: Vec<usize> = shard.range(batch).collect();
                    line_step(dev, line, gradients, &rows)?;
                    Ok(rows)
                }).unwrap();
                assert_eq!(seen.len(), n.min(batch));
                assert_eq!(seen.concat(), (0..batch).collect::<Vec<_>>());
            }
            model.verify().unwrap();
            weights(&mut model).unwrap().swap_remove(0)
        };
        let one = train(1, false);
        assert!(one[0] > 0.5 && one[1] > 0.1, "it learns nothing: {one:?}");
        for n in 2..=gpus.up_to(4) {
            for sharded in [false, true] {
                let found = train(n, sharded);
                let close = found.iter().zip(&one).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(close, "{n} devices: {found:?}, not {one:?}");
            }
        }
    }

    // pytorch #15161, #52260, #5039; `test_gather_*`.
    1: fn a_forward_pass_gathers_in_order(gpus) {
        let pool = gpus.pool(gpus.up_to(4));
        let mut model = bags::<f32>(&pool, Optimizer::sgd(0.1), &[1], 0);
        for rows in [11, 3, 1, 0] {
            let found = model.forward(rows, |_, shard, _| {
                assert!(!shard.range(rows).is_empty());
                Ok(shard.range(rows).collect())
            }).unwrap();
            assert_eq!(found, (0..rows).collect::<Vec<_>>());
        }
    }

    // By the ranks in the group; several groups have all rows each.
    2: fn a_forward_pass_of_groups_gathers_in_order(gpus) {
        let pool = gpus.pool(2);
        let rows = |ranks: fn(usize) -> Vec<usize>| {
            let make = |dev: &Device| bag::<f32>(dev, &[1], 0);
            let mut model =
                DataParallel::new_in(&pool, |dev| dev.group(&ranks(dev.rank())), Optimizer::sgd(0.1), make).unwrap();
            model.forward(4, |_, shard, _| Ok(shard.range(4).collect())).unwrap()
        };
        assert_eq!(rows(|_| vec![1, 0]), [0, 1, 2, 3]);
        assert_eq!(rows(|rank| vec![rank]), [0, 1, 2, 3, 0, 1, 2, 3]);
    }

    4: fn a_forward_pass_of_a_grid_gathers_in_order(gpus) {
        let (pool, make) = (gpus.pool(4), |dev: &Device| bag::<f32>(dev, &[1], 0));
        let column = |dev: &Device| vec![dev.rank() % 2, dev.rank() % 2 + 2];
        let mut model =
            DataParallel::new_in(&pool, |dev| dev.group(&column(dev)), Optimizer::sgd(0.1), make).unwrap();
        let found = model.forward(4, |dev, shard, _| Ok(vec![(dev.rank() % 2, shard.range(4))])).unwrap();
        assert_eq!(found, [(0, 0..2), (0, 2..4), (1, 0..2), (1, 2..4)]);
    }

    // Three pieces of different sizes are one batch.
    1: fn accumulated_gradients_have_the_weights_of_their_rows(gpus) {
        for (n, sharded) in [(1, false), (gpus.up_to(3), false), (gpus.up_to(3), true)] {
            let pool = gpus.pool(n);
            let optimizer = either(Optimizer::sgd(0.1).clip(0.3), sharded);
            let make = || DataParallel::new(&pool, optimizer, |dev| Ok(Bag(vec![dev.zeros::<f32>(2)?]))).unwrap();
            let (mut whole, mut pieces) = (make(), make());
            let pass = |dev: &Device, bag: &mut Bag, gradients: &mut Gradients<'_>, rows: std::ops::Range<usize>| {
                line_step(dev, bag, gradients, &rows.collect::<Vec<_>>())
            };
            for _ in 0..3 {
                whole.step(16, |dev, shard, bag, gradients| pass(dev, bag, gradients, shard.range(16))).unwrap();
                let mut from = 0;
                for rows in [9, 1, 6] {
                    let f = |dev: &Device, shard: Shard, bag: &mut Bag, gradients: &mut Gradients<'_>| {
                        let range = shard.range(rows);
                        pass(dev, bag, gradients, from + range.start..from + range.end)
                    };
                    let found = if rows == 6 { pieces.step(rows, f) } else { pieces.accumulate(rows, f) };
                    assert_eq!(found.unwrap().len(), n.min(rows));
                    from += rows;
                }
            }
            assert_eq!((whole.steps(), pieces.steps()), (3, 3));
            let (whole, pieces) = (weights(&mut whole).unwrap(), weights(&mut pieces).unwrap());
            let far = whole.iter().flatten().zip(pieces.iter().flatten()).any(|(a, b)| (a - b).abs() > 1e-6);
            assert!(!far, "{n} devices: {pieces:?}, not {whole:?}");
        }
    }

    4: fn groups_and_some_devices(gpus) {
        let pool = gpus.pool(4);
        // Two models, each on two devices, which see different gradients.
        let mut grid = DataParallel::new_in(
            &pool,
            |dev| dev.group(&[dev.rank() % 2, dev.rank() % 2 + 2]),
            Optimizer::adam(0.1).clip(0.5).sharded(),
            |dev| bag::<f32>(dev, &[5000], dev.index() as u64 % 2),
        ).unwrap();
        let mut lone = [0, 1].map(|which| {
            let build = |dev: &Device| bag::<f32>(dev, &[5000], which as u64);
            DataParallel::new_on(&pool, &[3, which], Optimizer::adam(0.1).clip(0.5), build).unwrap()
        });
        for number in 0..3 {
            grid.step(4, |dev, shard, _, gradients| {
                backward(gradients, dev, &[5000], number + 10 * (dev.index() as u64 % 2), shard.range(4).len())
            }).unwrap();
            for (which, model) in (0..).zip(&mut lone) {
                step(model, &[5000], number + 10 * which, 4).unwrap();
            }
        }
        grid.verify().unwrap();
        let found = weights(&mut grid).unwrap();
        let own = |lone: &mut [DataParallel<Bag>; 2]| lone.each_mut().map(|model| weights(model).unwrap());
        let same = |found: &[Vec<f32>], [first, second]: [Vec<Vec<f32>>; 2]| {
            assert_eq!((first.len(), second.len()), (2, 2));
            for (found, expected) in found.iter().zip([&first[0], &second[0], &first[0], &second[0]]) {
                assert!(bits(found) == bits(expected));
            }
        };
        same(&found, own(&mut lone));
        // One group's gradients are not finite: the other one has made the step, and all stay at one number.
        let nan = |model: &mut DataParallel<Bag>| model.step(4, |dev, _, _, gradients| {
            gradients.write(0, |g| dev.fill(g, if dev.index() % 2 == 1 { f32::NAN } else { 1.0 }))
        });
        nan(&mut grid).unwrap();
        lone[0].step(4, |dev, _, _, gradients| gradients.write(0, |g| dev.fill(g, 1.0))).unwrap();
        let fails = |model: &mut DataParallel<Bag>| model.step(4, |dev, shard, _, gradients| match dev.index() {
            1 => Err(Error::custom("no step")),
            _ => backward(gradients, dev, &[5000], 7, shard.range(4).len()),
        });
        assert!(matches!(failure(nan(&mut grid)), Error::NotFinite { step: 3, .. }));
        assert_eq!(grid.steps(), 4);
        same(&weights(&mut grid).unwrap(), own(&mut lone));
        // A closure fails in one group: none has made the step, and `clear_poison` says so.
        failure(fails(&mut grid));
        grid.clear_poison().unwrap();
        assert_eq!(grid.steps(), 4);
        same(&weights(&mut grid).unwrap(), own(&mut lone));
        for wrong in [&[][..], &[9], &[1, 9], &[2, 2]] {
            let found = DataParallel::new_on(&pool, wrong, Optimizer::sgd(0.1), |dev| bag::<f32>(dev, &[1], 0));
            assert!(matches!(failure(found), Error::InvalidArgument { .. }), "{wrong:?}");
        }
    }

    // Devices of different speeds have different numbers of rows; the mean is over all rows.
    2: fn weighted_shards(gpus) {
        let pool = gpus.builder(2).weights(&[3.0, 1.0]).build().unwrap();
        let mut model = bags::<f32>(&pool, Optimizer::sgd(1.0), &[1], 0);
        let before = weights(&mut model).unwrap()[0][0];
        let rows = model.step(8, |dev, shard, _, gradients| {
            let own = shard.range(8);
            let sum = own.clone().sum::<usize>() as f32 * gradients.scale;
            gradients.write(0, |g| dev.fill(g, sum))?;
            Ok(own)
        });
        assert_eq!(rows.unwrap(), [0..6, 6..8]);
        assert!((before - weights(&mut model).unwrap()[1][0] - 3.5).abs() < 1e-6);
    }

    1: fn parameters_without_elements(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        for sharded in [false, true] {
            let mut model = bags::<f32>(&pool, either(Optimizer::adam(0.1).clip(1.0), sharded), &[0, 0], 0);
            for number in 0..3 {
                step(&mut model, &[0, 0], number, 2).unwrap();
            }
            model.verify().unwrap();
            assert_eq!(model.gradient_norms().unwrap(), Some(vec![0.0; pool.device_count()]));
        }
    }

    2: fn gradients_that_no_device_has_are_named(gpus) {
        let pool = gpus.pool(2);
        let mut model = bags::<f32>(&pool, Optimizer::sgd(1.0), &[3, 2, 1], 0);
        let before = weights(&mut model).unwrap();
        model.step(2, |dev, _, _, gradients| {
            // Parameter 2 has a gradient on one device only, parameter 1 on none.
            gradients.write(0, |g| dev.fill(g, 0.5))?;
            if dev.rank() == 1 { gradients.write(2, |g| dev.fill(g, 2.0)) } else { Ok(()) }
        }).unwrap();
        assert_eq!(model.unused(), [1]);
        let moved: Vec<f32> = before[0].iter().zip(&weights(&mut model).unwrap()[1]).map(|(a, b)| a - b).collect();
        assert!(moved.iter().zip([1.0, 1.0, 1.0, 0.0, 0.0, 2.0]).all(|(a, b)| (a - b).abs() < 1e-6), "{moved:?}");
    }

    2: fn members_that_differ(gpus) {
        let pool = gpus.pool(2);
        for (what, sizes) in [("count", [&[1, 2, 3][..], &[1, 2]]), ("size", [&[1, 2], &[1, 3]])] {
            let build = |dev: &Device| bag::<f32>(dev, sizes[dev.index()], 0);
            let error = failure(DataParallel::new(&pool, Optimizer::sgd(0.1), build));
            assert!(matches!(&error, Error::Mismatch { what: found, .. } if *found == what), "{error}");
        }
        let mut model = bags::<f32>(&pool, Optimizer::sgd(0.1), &[5], 0);
        model.each(|dev, bag| dev.fill(&mut bag.0[0], dev.index() as f32)).unwrap();
        assert!(matches!(failure(model.verify()), Error::Mismatch { what: "parameters", .. }));
    }
}

/// The line `y = x / 10 + 1`, learnt from rows `x = row % 7`: the gradient of the mean of the squared errors.
fn line_step(dev: &Device, line: &mut Bag, gradients: &mut Gradients<'_>, rows: &[usize]) -> Result<()> {
    let w = dev.download(&line.0[0])?;
    let mut g = [0.0; 2];
    for row in rows {
        let x = (row % 7) as f32 / 7.0;
        let error = w[0] + w[1] * x - (x + 1.0);
        g[0] += 2.0 * error * gradients.scale;
        g[1] += 2.0 * error * x * gradients.scale;
    }
    gradients.write(0, |own| dev.upload_into(&g, own))
}
