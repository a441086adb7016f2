//! Data parallel: replicas, optimizers, sharded state.
//!
//! Ports: PyTorch's `test_data_parallel_small_back`, `test_scatter_*`, `test_gather_*`, `test_replicate`,
//! `test_parallel_apply_passes_exception` (test/distributed/test_data_parallel.py and test/test_cuda.py), and issues
//! #15161, #52260 and #5039: fewer rows than devices.

use crate::{
    on_both,
    support::{Gpus, cases, failure, succeeds},
};
use gpu_pool::{
    Device, DeviceBuffer, DeviceCopy, Error, GpuPool, Parameter, ReduceOrder, Result,
    parallel::{DataParallel, Gradients, LearningRate, Model, Optimizer},
    testing::{Explorer, FaultPlan},
};
use half::{bf16, f16};
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// Parameters and nothing else.
pub struct Bag<T: DeviceCopy = f32>(pub Vec<DeviceBuffer<T>>);

impl<T: Parameter> Model<T> for Bag<T> {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>> {
        self.0.iter_mut().collect()
    }
}

/// A type of parameters, for these tests.
pub trait Real: Parameter {
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    /// A unit in the last place of 1.
    const EPSILON: f64;
}
impl Real for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }
    fn wide(self) -> f64 {
        self.into()
    }
    const EPSILON: f64 = f32::EPSILON as f64;
}
macro_rules! half {
    ($($T:ty, $epsilon:literal;)+) => {$(
        impl Real for $T {
            fn of(x: f64) -> Self {
                <$T>::from_f64(x)
            }
            fn wide(self) -> f64 {
                self.to_f64()
            }
            const EPSILON: f64 = $epsilon;
        }
    )+};
}
half! { f16, 0.000_976_562_5; bf16, 0.007_812_5; }

/// Numbers from -1 to 1, in quarters of a thousandth: exact sums in `f64`.
pub fn number(seed: u64, i: usize) -> f64 {
    let mut x = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 32;
    (x % 8001) as f64 / 4000.0 - 1.0
}

/// Lengths with all the corners: none, one, odd, whole grains, several chunks of the norm.
pub const SIZES: [usize; 6] = [7, 0, 64, 1, 5003, 33];

pub fn bag<T: Real>(dev: &Device, sizes: &[usize], seed: u64) -> Result<Bag<T>> {
    let parameter = |(k, len): (usize, &usize)| {
        let x: Vec<T> = (0..*len).map(|i| T::of(number(seed + k as u64, i))).collect();
        dev.upload(&x)
    };
    Ok(Bag(sizes.iter().enumerate().map(parameter).collect::<Result<_>>()?))
}

/// Writes this device's share of the gradients of a step, the last first: each row has the gradient `number(..)`.
pub fn backward<T: Real>(
    gradients: &mut Gradients<'_, T>,
    dev: &Device,
    sizes: &[usize],
    step: u64,
    rows: usize,
) -> Result<()> {
    let share = rows as f64 * f64::from(gradients.scale);
    for (k, len) in sizes.iter().enumerate().rev() {
        let g: Vec<T> = (0..*len).map(|i| T::of(share * number(1000 * (step + 1) + k as u64, i))).collect();
        gradients.write(k, |own| dev.upload_into(&g, own))?;
    }
    Ok(())
}

/// One step of a bag on `rows` rows.
pub fn step<T: Real>(model: &mut DataParallel<Bag<T>, T>, sizes: &[usize], number: u64, rows: usize) -> Result<()> {
    model
        .step(rows, |dev, shard, _, gradients| backward(gradients, dev, sizes, number, shard.range(rows).len()))
        .map(drop)
}

/// The parameters of every replica, as bits.
pub fn weights<T: Real>(model: &mut DataParallel<Bag<T>, T>) -> Result<Vec<Vec<T>>> {
    model.each(|dev, bag| Ok(bag.0.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>>>()?.concat()))
}

pub fn bits<T: DeviceCopy>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// PyTorch's formulas, in `f64`.
struct Reference {
    rate: f64,
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    betas: Option<(f64, f64)>,
    eps: f64,
    decay: f64,
    decoupled: bool,
    clip: Option<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    steps: i32,
}

impl Reference {
    fn new(rate: f64) -> Self {
        let (first, second) = (Vec::new(), Vec::new());
        let (momentum, dampening, nesterov, betas, eps) = (0.0, 0.0, false, None, 1e-8);
        let (decay, decoupled, clip, steps) = (0.0, false, None, 0);
        Reference { rate, momentum, dampening, nesterov, betas, eps, decay, decoupled, clip, first, second, steps }
    }

    fn step(&mut self, w: &mut [f64], g: &[f64]) {
        self.first.resize(w.len(), 0.0);
        self.second.resize(w.len(), 0.0);
        let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
        let scale = self.clip.map_or(1.0, |clip| (clip / (norm + 1e-6)).min(1.0));
        self.steps += 1;
        for i in 0..w.len() {
            let mut g = g[i] * scale;
            if self.decoupled {
                w[i] -= self.rate * self.decay * w[i];
            } else {
                g += self.decay * w[i];
            }
            let (m, v) = (&mut self.first[i], &mut self.second[i]);
            if let Some((b1, b2)) = self.betas {
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                let (c1, c2) = (1.0 - b1.powi(self.steps), 1.0 - b2.powi(self.steps));
                w[i] -= self.rate / c1 * *m / (v.sqrt() / c2.sqrt() + self.eps);
            } else if self.momentum != 0.0 {
                *m = if self.steps == 1 { g } else { self.momentum * *m + (1.0 - self.dampening) * g };
                w[i] -= self.rate * if self.nesterov { g + self.momentum * *m } else { *m };
            } else {
                w[i] -= self.rate * g;
            }
        }
    }
}

/// Every optimizer, and the same in `f64`.
fn optimizers() -> Vec<(Optimizer, Reference)> {
    let plain = || Reference::new(0.05);
    let adam = || Reference { betas: Some((0.9, 0.999)), ..plain() };
    vec![
        (Optimizer::sgd(0.05), plain()),
        (Optimizer::sgd(0.05).decay(0.1).clip(2.0), Reference { decay: 0.1, clip: Some(2.0), ..plain() }),
        (Optimizer::sgd(0.05).clip(1e9), Reference { clip: Some(1e9), ..plain() }),
        (Optimizer::sgd(0.05).momentum(0.9), Reference { momentum: 0.9, ..plain() }),
        (
            Optimizer::sgd(0.05).momentum(0.9).dampening(0.3).decay(0.01),
            Reference { momentum: 0.9, dampening: 0.3, decay: 0.01, ..plain() },
        ),
        (
            Optimizer::sgd(0.05).momentum(0.8).nesterov().decay(0.01),
            Reference { momentum: 0.8, nesterov: true, decay: 0.01, ..plain() },
        ),
        (Optimizer::adam(0.05), adam()),
        (Optimizer::adam(0.05).decay(0.1), Reference { decay: 0.1, ..adam() }),
        (
            Optimizer::adam_w(0.05).betas(0.8, 0.95).eps(1e-3).clip(1.0),
            Reference { betas: Some((0.8, 0.95)), eps: 1e-3, decay: 0.01, decoupled: true, clip: Some(1.0), ..plain() },
        ),
    ]
}

/// Five steps on 1 to 3 devices, of 12 rows each: the parameters are those of the formulas in `f64`, up to the
/// roundings of the gradients, which are of the parameters' type, of the steps, which are in `f32`, and of the result.
fn follows_the_formulas<T: Real>(gpus: Gpus) {
    for n in 1..=gpus.up_to(3) {
        let pool = gpus.pool(n);
        for (optimizer, mut reference) in optimizers() {
            let optimizer = optimizer.bucket_bytes(1000);
            let mut model = DataParallel::new(&pool, optimizer, |dev| bag::<T>(dev, &SIZES, 3)).unwrap();
            let mut w: Vec<f64> = weights(&mut model).unwrap().swap_remove(0).into_iter().map(Real::wide).collect();
            for number in 0..5 {
                step(&mut model, &SIZES, number, 12).unwrap();
                let all = SIZES.iter().enumerate();
                let g: Vec<f64> = all.flat_map(|(k, len)| numbers(number, k, *len)).collect();
                reference.step(&mut w, &g);
            }
            for found in weights(&mut model).unwrap() {
                for (i, (found, w)) in found.into_iter().zip(&w).enumerate() {
                    let error = (found.wide() - w).abs();
                    // A step is at most about as long as the rate; a gradient is off by some units of its type.
                    let bound = 4.0 * T::EPSILON * w.abs() + 5.0 * 0.05 * (8.0 * T::EPSILON + 1e-4);
                    assert!(error <= bound, "{n} devices, {optimizer:?}: element {i} is {found:?}, not {w}");
                }
            }
            model.verify().unwrap();
            assert_eq!(model.steps(), 5);
        }
    }
}

fn numbers(step: u64, k: usize, len: usize) -> impl Iterator<Item = f64> {
    (0..len).map(move |i| number(1000 * (step + 1) + k as u64, i))
}

on_both! {
    1: fn optimizers_follow_the_formulas(gpus) {
        follows_the_formulas::<f32>(gpus);
        follows_the_formulas::<f16>(gpus);
        follows_the_formulas::<bf16>(gpus);
    }

    // A step of 1e-4 is less than half a unit of bf16 at 1: without a copy in f32 nothing would ever change.
    1: fn small_steps_of_half_types_add_up(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let mut model = DataParallel::new(&pool, Optimizer::sgd(1e-4), |dev| Ok(Bag(vec![dev.upload(&[bf16::ONE])?]))).unwrap();
        for _ in 0..200 {
            model.step(4, |dev, shard, _, gradients| {
                let g = shard.range(4).len() as f32 * gradients.scale;
                gradients.write(0, |own| dev.fill(own, bf16::from_f32(g)))
            }).unwrap();
        }
        assert_eq!(weights(&mut model).unwrap(), vec![[bf16::from_f32(0.98)]; pool.devices()]);
        // What the user writes counts, not the old copy.
        model.each(|dev, bag| dev.fill(&mut bag.0[0], bf16::from_f32(5.0))).unwrap();
        step(&mut model, &[1], 0, 4).unwrap();
        assert_eq!(weights(&mut model).unwrap()[0], [bf16::from_f32(5.0)]);
    }

    2: fn sharded_state_gives_the_same_bits(gpus) {
        same_bits::<f32>(gpus);
        same_bits::<bf16>(gpus);
        same_bits::<f16>(gpus);
    }

    // ZeRO-1: moments, and copies of half types in f32, of one part only.
    2: fn sharded_state_takes_a_part_of_the_memory(gpus) {
        for n in 2..=gpus.up_to(4) {
            part_of_the_memory::<f32>(gpus, n, 8);
            part_of_the_memory::<bf16>(gpus, n, 12);
        }
    }

    // The first device's parameters are everyone's: `test_replicate`.
    2: fn replicas_begin_with_the_same_bits(gpus) {
        let pool = gpus.pool(gpus.up_to(4));
        let make = |dev: &Device| bag::<f32>(dev, &SIZES, 10 * dev.index() as u64);
        let mut model = DataParallel::new(&pool, Optimizer::sgd(0.1), make).unwrap();
        let all = weights(&mut model).unwrap();
        let first: Vec<f32> = SIZES.iter().enumerate().flat_map(|(k, len)| (0..*len).map(move |i| number(k as u64, i) as f32)).collect();
        assert!(all.iter().all(|own| bits(own) == bits(&first)));
    }

    // Batches of 30, 30, 30 and 10 rows, and of fewer rows than there are devices: the same parameters as on one
    // device, up to the order of sums; the results come in the order of the rows.
    1: fn any_number_of_devices_trains_alike(gpus) {
        let train = |n: usize, sharded: bool| {
            let pool = gpus.pool(n);
            let optimizer = Optimizer::sgd(0.2).momentum(0.5);
            let optimizer = if sharded { optimizer.sharded() } else { optimizer };
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
                assert!(found.iter().zip(&one).all(|(a, b)| (a - b).abs() < 1e-5), "{n} devices: {found:?}, not {one:?}");
            }
        }
    }

    // pytorch #15161, #52260, #5039; `test_gather_*`.
    1: fn a_forward_pass_gathers_in_order(gpus) {
        let pool = gpus.pool(gpus.up_to(4));
        let mut model = DataParallel::new(&pool, Optimizer::sgd(0.1), |dev| bag::<f32>(dev, &[1], 0)).unwrap();
        for rows in [11, 3, 1, 0] {
            let found = model.forward(rows, |_, shard, _| {
                assert!(!shard.range(rows).is_empty());
                Ok(shard.range(rows).collect())
            }).unwrap();
            assert_eq!(found, (0..rows).collect::<Vec<_>>());
        }
    }

    // Three pieces of different sizes are one batch.
    1: fn accumulated_gradients_have_the_weights_of_their_rows(gpus) {
        for (n, sharded) in [(1, false), (gpus.up_to(3), false), (gpus.up_to(3), true)] {
            let pool = gpus.pool(n);
            let optimizer = if sharded { Optimizer::sgd(0.1).clip(0.3).sharded() } else { Optimizer::sgd(0.1).clip(0.3) };
            let make = || DataParallel::new(&pool, optimizer, |dev| Ok(Bag(vec![dev.zeros::<f32>(2)?]))).unwrap();
            let (mut whole, mut pieces) = (make(), make());
            let pass = |dev: &Device, bag: &mut Bag, gradients: &mut Gradients<'_>, rows: std::ops::Range<usize>| {
                line_step(dev, bag, gradients, &rows.collect::<Vec<_>>())
            };
            for _ in 0..3 {
                whole.step(16, |dev, shard, bag, gradients| pass(dev, bag, gradients, shard.range(16))).unwrap();
                let mut from = 0;
                for rows in [9, 1, 6] {
                    let f = |dev: &Device, shard: gpu_pool::Shard, bag: &mut Bag, gradients: &mut Gradients<'_>| {
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
            DataParallel::new_on(&pool, &[3, which], Optimizer::adam(0.1).clip(0.5), |dev| bag::<f32>(dev, &[5000], which as u64)).unwrap()
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
        let [first, second] = lone.map(|mut model| weights(&mut model).unwrap());
        assert_eq!((first.len(), second.len()), (2, 2));
        for (found, expected) in found.iter().zip([&first[0], &second[0], &first[0], &second[0]]) {
            assert!(bits(found) == bits(expected));
        }
        assert!(matches!(failure(DataParallel::new_on(&pool, &[], Optimizer::sgd(0.1), |dev| bag::<f32>(dev, &[1], 0))), Error::InvalidArgument { .. }));
        assert!(matches!(failure(DataParallel::new_on(&pool, &[1, 9], Optimizer::sgd(0.1), |dev| bag::<f32>(dev, &[1], 0))), Error::InvalidArgument { .. }));
    }

    2: fn gradients_that_no_device_has_are_named(gpus) {
        let pool = gpus.pool(2);
        let mut model = DataParallel::new(&pool, Optimizer::sgd(1.0), |dev| bag::<f32>(dev, &[3, 2, 1], 0)).unwrap();
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

    // NaN and infinity are reported, and do not get into the parameters.
    1: fn gradients_that_are_not_finite_change_nothing(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        for (bad, sharded) in [(f32::NAN, false), (f32::INFINITY, true), (3e38, false)] {
            let optimizer = if sharded { Optimizer::adam(0.1).sharded() } else { Optimizer::adam(0.1) };
            let make = || DataParallel::new(&pool, optimizer, |dev| bag::<f32>(dev, &[3000, 2], 0)).unwrap();
            let (mut model, mut other) = (make(), make());
            step(&mut model, &[3000, 2], 0, 4).unwrap();
            step(&mut other, &[3000, 2], 0, 4).unwrap();
            let poison = |model: &mut DataParallel<Bag>| model.step(4, |dev, shard, _, gradients| {
                gradients.write(1, |g| dev.fill(g, if shard.index() == 0 { bad } else { 1.0 }))?;
                gradients.write(0, |g| dev.fill(g, bad))
            });
            poison(&mut model).unwrap();
            let error = failure(step(&mut model, &[3000, 2], 1, 4));
            let Error::NotFinite { op: "DataParallel::step", step: 1, norm, site } = &error else { panic!("{error}") };
            assert!(!norm.is_finite() && site.file().ends_with("data_parallel.rs"), "{error}");
            assert_eq!(model.steps(), 1);
            assert_eq!(bits(&weights(&mut model).unwrap()[0]), bits(&weights(&mut other).unwrap()[0]));
            // It goes on as if nothing had been, and the last step is seen, too.
            step(&mut model, &[3000, 2], 1, 4).unwrap();
            step(&mut other, &[3000, 2], 1, 4).unwrap();
            model.verify().unwrap();
            assert_eq!(bits(&weights(&mut model).unwrap()[0]), bits(&weights(&mut other).unwrap()[0]));
            poison(&mut model).unwrap();
            assert!(matches!(failure(model.verify()), Error::NotFinite { step: 2, .. }));
            model.verify().unwrap();
        }
    }

    1: fn wrong_calls_are_typed_errors(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        #[track_caller]
        fn refused<R: std::fmt::Debug>(result: Result<R>) -> String {
            let error = failure(result);
            let Error::InvalidArgument { site, .. } = &error else { panic!("{error}") };
            assert!(site.file().ends_with("data_parallel.rs") && !site.file().contains("src"), "{error}");
            error.to_string()
        }
        let new = |optimizer, sizes: &'static [usize]| DataParallel::new(&pool, optimizer, move |dev| bag::<f32>(dev, sizes, 0));
        assert!(refused(DataParallel::new(&pool, Optimizer::sgd(0.1), |_| Ok(Bag::<f32>(Vec::new())))).contains("no parameters"));
        refused(DataParallel::new(&pool, Optimizer::sgd(f64::NAN), |dev| bag::<f32>(dev, &[1], 0)));
        let mut model = new(Optimizer::sgd(0.1), &[4, 2]).unwrap();
        assert!(refused(model.step(0, |_, _, _, _| Ok(()))).contains("0 rows"));
        assert!(refused(model.accumulate(0, |_, _, _, _| Ok(()))).contains("0 rows"));
        refused(model.set_rate(-1.0));
        step(&mut model, &[4, 2], 0, 2).unwrap();
        // These fail in the scope: recover, and go on.
        assert!(refused(model.step(2, |_, _, _, _| Ok(()))).contains("no gradient"));
        assert!(matches!(failure(step(&mut model, &[4, 2], 0, 2)), Error::Poisoned { .. }));
        model.recover().unwrap();
        assert!(refused(model.step(2, |dev, _, _, g| {
            g.write(1, |g| dev.fill(g, 0.0))?;
            g.write(1, |g| dev.fill(g, 0.0))
        })).contains("gradient 1"));
        model.recover().unwrap();
        refused(model.step(2, |dev, _, _, g| g.write(2, |g| dev.fill(g, 0.0))));
        model.recover().unwrap();
        let error = refused(model.step(2, |dev, _, bag, g| {
            bag.0[1] = dev.zeros(3)?;
            g.write(1, |g| dev.fill(g, 0.0))
        }));
        assert!(error.contains("parameter 1 has 3 elements, and had 2"), "{error}");
        model.each(|dev, bag| { bag.0[1] = dev.zeros(2)?; Ok(()) }).unwrap_err();
        refused(model.recover());
    }

    2: fn members_that_differ(gpus) {
        let pool = gpus.pool(2);
        for (what, sizes) in [("count", [&[1, 2, 3][..], &[1, 2]]), ("size", [&[1, 2], &[1, 3]])] {
            let error = failure(DataParallel::new(&pool, Optimizer::sgd(0.1), |dev| bag::<f32>(dev, sizes[dev.index()], 0)));
            assert!(matches!(&error, Error::Mismatch { what: found, .. } if *found == what), "{error}");
        }
        let mut model = DataParallel::new(&pool, Optimizer::sgd(0.1), |dev| bag::<f32>(dev, &[5], 0)).unwrap();
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

/// Five steps with and without sharded state, with every kind of state, and with clipping.
fn same_bits<T: Real>(gpus: Gpus) {
    // Buckets of one chunk of the norm, of several, and of a part of one.
    const SIZES: [usize; 5] = [20_000, 3, 2048, 0, 9001];
    for n in 1..=gpus.up_to(4) {
        let pool = gpus.builder(n).reduce_order(ReduceOrder::Rank).build().unwrap();
        for optimizer in [
            Optimizer::sgd(0.1),
            Optimizer::sgd(0.1).momentum(0.9).clip(3.0),
            Optimizer::adam_w(0.1).clip(0.5).warm_up(3).schedule(LearningRate::Cosine { steps: 10, end: 0.0 }),
        ] {
            let train = |optimizer: Optimizer| {
                let optimizer = optimizer.bucket_bytes(30_000);
                let mut model = DataParallel::new(&pool, optimizer, |dev| bag::<T>(dev, &SIZES, 3))?;
                for number in 0..4 {
                    step(&mut model, &SIZES, number, 13)?;
                }
                model.verify()?;
                Ok::<_, Error>((weights(&mut model)?.swap_remove(0), model.gradient_norms()?.unwrap()[0]))
            };
            let (whole, parts) = (train(optimizer).unwrap(), train(optimizer.sharded()).unwrap());
            assert!(bits(&whole.0) == bits(&parts.0), "{n} devices, {optimizer:?}");
            assert_eq!(whole.1.to_bits(), parts.1.to_bits());
        }
    }
}

/// Checks the memory of sharded state, which without sharding has `whole` bytes for each parameter.
fn part_of_the_memory<T: Real>(gpus: Gpus, n: usize, whole: usize) {
    const LEN: usize = 1 << 20;
    let state = |optimizer: Optimizer| {
        let pool = gpus.pool(n);
        let memory = || pool.run(|dev, _| Ok(dev.stats().requested)).unwrap();
        let before = memory();
        let model = DataParallel::new(&pool, optimizer, |dev| Ok(Bag(vec![dev.zeros::<T>(LEN)?]))).unwrap();
        let after = memory();
        drop(model);
        // Besides the parameters and the gradients.
        let own = (2 * LEN * size_of::<T>()) as u64;
        after.into_iter().zip(before).map(|(after, before)| (after - before - own) as f64).collect::<Vec<_>>()
    };
    for (one, part) in state(Optimizer::adam_w(0.1)).into_iter().zip(state(Optimizer::adam_w(0.1).sharded())) {
        let expected = (whole * LEN) as f64;
        assert!((one / expected - 1.0).abs() < 0.02, "{one} bytes, not {expected}");
        assert!(part / one <= 1.0 / n as f64 + 0.02, "{part} of {one} bytes on {n} devices");
    }
}
