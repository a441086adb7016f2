//! Each optimizer against its formulas in `f64`.

use super::rig::{Bag, Real, SIZES, bags, number, step, weights};
use crate::{on_both, support::Gpus};
use gpu_pool::Device;
use gpu_pool_train::{DataParallel, Optimizer};
use half::{bf16, f16};

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

/// Five steps on some devices, of 12 rows each: the parameters are those of the formulas in `f64`, up to the
/// roundings of the gradients, which are of the parameters' type, of the steps, which are in `f32`, and of the result.
fn follows_the_formulas<T: Real>(gpus: Gpus, n: usize) {
    let pool = gpus.pool(n);
    for (optimizer, mut reference) in optimizers() {
        let optimizer = optimizer.bucket_bytes(1000);
        let mut model = bags::<T>(&pool, optimizer, &SIZES, 3);
        let mut w: Vec<f64> = weights(&mut model).unwrap().swap_remove(0).into_iter().map(Real::wide).collect();
        for number in 0..5 {
            step(&mut model, &SIZES, number, 12).unwrap();
            let all = SIZES.iter().enumerate();
            let g: Vec<f64> = all.flat_map(|(k, len)| numbers(number, k, *len)).collect();
            reference.step(&mut w, &g);
        }
        for found in weights(&mut model).unwrap() {
            for (i, (found, w)) in found.into_iter().zip(&w).enumerate() {
                let error = (Real::wide(found) - w).abs();
                // A step is at most about as long as the rate; a gradient is off by some units of its type.
                let bound = 4.0 * T::EPSILON * w.abs() + 5.0 * 0.05 * (8.0 * T::EPSILON + 1e-4);
                assert!(error <= bound, "{n} devices, {optimizer:?}: element {i} is {}, not {w}", Real::wide(found));
            }
        }
        model.verify().unwrap();
        assert_eq!(model.steps(), 5);
    }
}

fn numbers(step: u64, k: usize, len: usize) -> impl Iterator<Item = f64> {
    (0..len).map(move |i| number(1000 * (step + 1) + k as u64, i))
}

on_both! {
    1: fn optimizers_follow_the_formulas(gpus) {
        follows_the_formulas::<f32>(gpus, 1);
        follows_the_formulas::<f32>(gpus, gpus.up_to(3));
        follows_the_formulas::<f16>(gpus, gpus.up_to(2));
        follows_the_formulas::<bf16>(gpus, 1);
    }

    // A step of 1e-4 is less than half a unit of bf16 at 1: without a copy in f32 nothing would ever change.
    1: fn small_steps_of_half_types_add_up(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let build = |dev: &Device| Ok(Bag(vec![dev.upload(&[bf16::ONE])?]));
        let mut model = DataParallel::new(&pool, Optimizer::sgd(1e-4), build).unwrap();
        for _ in 0..200 {
            model.step(4, |dev, shard, _, gradients| {
                let g = shard.range(4).len() as f32 * gradients.scale;
                gradients.write(0, |own| dev.fill(own, bf16::from_f32(g)))
            }).unwrap();
        }
        assert_eq!(weights(&mut model).unwrap(), vec![[bf16::from_f32(0.98)]; pool.device_count()]);
        // What the user writes counts, not the old copy.
        model.each(|dev, bag| dev.fill(&mut bag.0[0], bf16::from_f32(5.0))).unwrap();
        step(&mut model, &[1], 0, 4).unwrap();
        assert_eq!(weights(&mut model).unwrap()[0], [bf16::from_f32(5.0)]);
    }
}
