//! Pieces of a batch: their number, their sizes and their order change nothing but rounding. References are loops in
//! `f64`.

use super::rig::{Bag, Real, bag, either, number};
use crate::{
    on_both,
    support::{Gpus, cases, failure},
};
use gpu_pool::{Device, Error, GpuPool, Result, Shard};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use gpu_pool_train::{DataParallel, Gradients, Optimizer};
use half::{bf16, f16};

/// What row `row` of a batch adds to the gradient of element `i` of parameter `k`.
type Row = fn(row: usize, k: usize, i: usize) -> f64;

const LENGTHS: [usize; 2] = [5, 3];

/// The mean over all rows.
fn mean(of: Row, rows: usize) -> Vec<f64> {
    let elements = LENGTHS.iter().enumerate().flat_map(|(k, &len)| (0..len).map(move |i| (k, i)));
    elements.map(|(k, i)| (0..rows).map(|row| of(row, k, i)).sum::<f64>() / rows as f64).collect()
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// A model of zeros, and one step on a batch in these pieces. The first gradient is written, the second one added.
fn one_step<T: Real>(
    pool: &GpuPool,
    optimizer: Optimizer,
    pieces: impl IntoIterator<Item = usize>,
    of: Row,
) -> Result<DataParallel<Bag<T>, T>> {
    let zeros = |dev: &Device| Ok(Bag(LENGTHS.iter().map(|&len| dev.zeros::<T>(len)).collect::<Result<_>>()?));
    let mut model = DataParallel::new(pool, optimizer, zeros)?;
    let (mut from, mut pieces) = (0, pieces.into_iter().peekable());
    while let Some(rows) = pieces.next() {
        let pass = |dev: &Device, shard: Shard, _: &mut Bag<T>, gradients: &mut Gradients<'_, T>| {
            let scale = f64::from(gradients.scale);
            let values = |k: usize| -> Vec<T> {
                let sum = |i| shard.range(rows).map(|row| of(from + row, k, i)).sum::<f64>();
                (0..LENGTHS[k]).map(|i| T::of(sum(i) * scale)).collect()
            };
            gradients.add(1, |own, beta| {
                let values = dev.upload(&values(1))?;
                if beta == 1.0 { dev.axpy(1.0, &values, own) } else { dev.copy(&values, own) }
            })?;
            gradients.write(0, |own| dev.upload_into(&values(0), own))
        };
        match pieces.peek() {
            Some(_) => drop(model.accumulate(rows, pass)?),
            None => drop(model.step(rows, pass)?),
        }
        from += rows;
    }
    Ok(model)
}

fn weights<T: Real>(model: &mut DataParallel<Bag<T>, T>) -> Vec<f64> {
    let all = super::weights(model).unwrap();
    assert!(all.iter().all(|own| super::bits(own) == super::bits(&all[0])));
    all[0].iter().map(|x| x.wide()).collect()
}

/// Weights and the norm are those of the mean, up to so many units in the last place of 1.
fn is_the_mean<T: Real>((gpus, n): (Gpus, usize), sharded: bool, pieces: &[usize], of: Row, units: f64) {
    let wanted = mean(of, pieces.iter().sum());
    let optimizer = either(Optimizer::sgd(1.0), sharded);
    let pool = gpus.pool(n);
    let mut model = one_step::<T>(&pool, optimizer, pieces.iter().copied(), of).unwrap();
    let found = weights(&mut model);
    for (found, wanted) in found.iter().zip(&wanted) {
        let far = (found + wanted).abs() / wanted.abs();
        assert!(far <= units * T::EPSILON, "{found}, not {wanted}; {:?} in {pieces:?}", T::DTYPE);
    }
    let (found, wanted) = (model.gradient_norms().unwrap().unwrap(), norm(&wanted));
    // The norm itself is an `f32`.
    let bound = units * T::EPSILON + f64::from(f32::EPSILON);
    let close = |found: &f32| (f64::from(*found) / wanted - 1.0).abs() <= bound;
    assert!(found.iter().all(close), "norms {found:?}, not {wanted}");
}

on_both! {
    // In `bf16` a sum of ones stops at 256 of them.
    1: fn many_equal_pieces_are_one_batch(gpus) {
        // The tests below have the checker.
        let pool = gpus.builder(gpus.up_to(2)).check(Check::Off).build().unwrap();
        for sharded in [false, true] {
            let (optimizer, pieces) = (either(Optimizer::sgd(1.0), sharded), std::iter::repeat_n(2, 1024));
            let mut model = one_step::<bf16>(&pool, optimizer, pieces, |_, _, _| 1.0).unwrap();
            assert_eq!(weights(&mut model), [-1.0; 8]);
        }
    }

    // 4 roundings of half a unit each.
    1: fn many_different_pieces_are_one_batch(gpus) {
        let of: Row = |row, k, i| 1.5 + number(row as u64, 10 * k + i);
        let pieces: Vec<usize> = (0..256).map(|k| 1 + k * 7 % 4).collect();
        let n = gpus.up_to(2);
        for sharded in [false, true] {
            is_the_mean::<bf16>((gpus, n), sharded, &pieces, of, 2.0);
        }
        let fewer = &pieces[..cases(40, 256)];
        is_the_mean::<f16>((gpus, n), true, fewer, of, 2.0);
        // In `f32` the additions are the caller's, in the gradients' type: one for each piece.
        is_the_mean::<f32>((gpus, n), false, fewer, of, 16.0);
    }

    // What counts is the mean: 100 in all orders; 40,000, of which twice is no `f16`; and the same for `f32`.
    1: fn the_cut_of_a_batch_does_not_decide_whether_it_is_finite(gpus) {
        let n = gpus.up_to(2);
        for sharded in [false, true] {
            for pieces in [&[1, 1023][..], &[1023, 1], &[1, 1, 1022], &[3, 1, 1020]] {
                is_the_mean::<f16>((gpus, n), sharded, pieces, |_, _, _| 100.0, 2.0);
            }
            is_the_mean::<f16>((gpus, n), sharded, &[4, 4], |_, _, _| 40_000.0, 2.0);
            is_the_mean::<f16>((gpus, n), sharded, &[1, 4, 2, 2], |_, _, _| 40_000.0, 2.0);
        }
        // Squares of these are no `f32` either.
        for pieces in [&[4, 4][..], &[1, 7], &[7, 1], &[2, 2, 2]] {
            is_the_mean::<f32>((gpus, n), false, pieces, |_, _, _| 1e38, 8.0);
            is_the_mean::<bf16>((gpus, n), false, pieces, |_, _, _| 1e38, 2.0);
        }
    }

    // Pieces of 6 and of 2 rows whose gradients are all 1.
    1: fn norms_are_of_the_mean(gpus) {
        for sharded in [false, true] {
            is_the_mean::<f32>((gpus, gpus.up_to(2)), sharded, &[6, 2], |_, _, _| 1.0, 2.0);
            is_the_mean::<bf16>((gpus, gpus.up_to(2)), sharded, &[6, 2], |_, _, _| 1.0, 0.0);
            is_the_mean::<f32>((gpus, gpus.up_to(3)), sharded, &[9, 1, 6], |row, _, _| row as f64, 2.0);
            // Some devices have no rows before the last piece.
            is_the_mean::<bf16>((gpus, gpus.up_to(3)), sharded, &[1, 1, 6], |row, _, _| 1.0 + row as f64, 2.0);
        }
    }

    // A gradient that only some of the pieces have, and devices without rows.
    1: fn what_a_piece_does_not_have_is_zero(gpus) {
        fn found<T: Real>(gpus: Gpus, pieces: &[(usize, bool, bool)]) -> Vec<f64> {
            let pool = gpus.pool(gpus.up_to(3));
            let mut model = DataParallel::new(&pool, Optimizer::sgd(1.0), |dev| {
                Ok(Bag(vec![dev.zeros::<T>(9)?, dev.zeros::<T>(2)?]))
            }).unwrap();
            for (at, &(rows, first, second)) in pieces.iter().enumerate() {
                let pass = |dev: &Device, shard: Shard, _: &mut Bag<T>, gradients: &mut Gradients<'_, T>| {
                    let sum = T::of(shard.range(rows).len() as f64 * f64::from(gradients.scale));
                    for k in [(1, second), (0, first)].into_iter().filter_map(|(k, has)| has.then_some(k)) {
                        gradients.write(k, |own| dev.fill(own, sum))?;
                    }
                    Ok(())
                };
                match at + 1 == pieces.len() {
                    true => model.step(rows, pass).map(drop).unwrap(),
                    false => model.accumulate(rows, pass).map(drop).unwrap(),
                }
            }
            let found = weights(&mut model);
            assert!(found[..9].iter().all(|x| *x == found[0]) && found[9] == found[10]);
            vec![found[0], found[9]]
        }
        let all = [(6, true, true), (1, false, true), (1, true, false)];
        assert_eq!(found::<bf16>(gpus, &all), [-7.0 / 8.0, -7.0 / 8.0]);
        assert_eq!(found::<f32>(gpus, &all).map_near(), [-7.0 / 8.0, -7.0 / 8.0]);
        let one = [(6, true, false), (2, false, true)];
        assert_eq!(found::<f16>(gpus, &one), [-6.0 / 8.0, -2.0 / 8.0]);
        assert_eq!(found::<f32>(gpus, &one).map_near(), [-6.0 / 8.0, -2.0 / 8.0]);
    }

    // Accumulated gradients of a step that fails are forgotten; those of one that is refused are not.
    1: fn half_types_forget_what_failed(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let mut model = DataParallel::new(&pool, Optimizer::sgd(1.0), |dev| bag::<bf16>(dev, &[3], 1)).unwrap();
        let before = weights(&mut model);
        let pass = |value: f32| move |dev: &Device, shard: Shard, _: &mut Bag<bf16>, g: &mut Gradients<'_, bf16>| {
            let sum = shard.range(2).len() as f32 * g.scale * value;
            g.write(0, |own| dev.fill(own, bf16::from_f32(sum)))
        };
        model.accumulate(2, pass(5.0)).unwrap();
        let failed = model.step(2, |_, _, _, _| Err::<(), _>(Error::custom("on purpose")));
        assert_eq!(failure(failed).to_string(), "on purpose");
        model.clear_poison().unwrap();
        model.accumulate(2, pass(0.5)).unwrap();
        for result in [model.accumulate(0, pass(9.0)), model.step(0, pass(9.0))] {
            assert!(matches!(failure(result), Error::InvalidArgument { .. }));
        }
        model.step(2, pass(0.25)).unwrap();
        assert_eq!(model.gradient_norms().unwrap().unwrap()[0], 0.375 * 3f32.sqrt());
        let moved = before.iter().zip(weights(&mut model)).map(|(a, b)| a - b);
        assert!(moved.into_iter().all(|x| (x - 0.375).abs() < 0.01));
    }
}

/// Rounded to a millionth.
trait Near {
    fn map_near(self) -> Vec<f64>;
}
impl Near for Vec<f64> {
    fn map_near(self) -> Vec<f64> {
        self.into_iter().map(|x| (x * 1e6).round() / 1e6).collect()
    }
}
