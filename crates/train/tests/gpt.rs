//! `examples/gpt`: its gradients against finite differences, the halves of its kernels, one device against two, and the
//! program. `cargo test` builds the program; `cargo test --test gpt` does not.
#![cfg(feature = "blas")]

#[path = "../../../examples/gpt/attention.rs"]
mod attention;
#[path = "../../../examples/gpt/kernels.rs"]
mod kernels;
#[path = "../../../examples/gpt/model.rs"]
#[allow(dead_code, reason = "the program's shapes")]
mod model;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../../../examples/gpt/train.rs"]
#[allow(dead_code, reason = "what builds the program's pool")]
mod train;

use gpu_pool::{AsView, AsViewMut, Device, Error, LaunchDims, Result, half::bf16};
use gpu_pool_lab::twins;
use gpu_pool_train::Optimizer;
use kernels::{Heads, MODULE, Number, causal_softmax, merge_heads, split_heads};
use model::{Shape, Write, pass};
use std::process::Command;
use support::Gpus;
use train::Training;

const TINY: Shape = Shape { words: 11, context: 16, width: 16, heads: 2, layers: 2, block: 8 };
const SEQUENCES: usize = 2;

/// Numbers between -0.5 and 0.5.
fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

fn words(len: usize, seed: u64) -> Vec<u32> {
    numbers(len, seed).iter().map(|x| ((x + 0.5) * TINY.words as f64) as u32).collect()
}

/// Parameters of no special form; factors of norms are about 1.
fn parameters() -> Vec<Vec<f64>> {
    let sizes = TINY.sizes();
    let numbers = sizes.iter().enumerate().map(|(i, &len)| (len, numbers(len, i as u64 + 1)));
    let shifted = |(len, mut x): (usize, Vec<f64>)| {
        if len == 2 * TINY.width {
            x[..TINY.width].iter_mut().for_each(|x| *x += 1.0);
        }
        x
    };
    numbers.map(shifted).collect()
}

/// The mean loss, and its gradients.
fn found<T: Number + Into<f64>>(dev: &Device, parameters: &[Vec<f64>]) -> Result<(f64, Vec<Vec<f64>>)> {
    let upload = |x: &Vec<f64>| dev.upload(&x.iter().map(|&x| T::of(x)).collect::<Vec<_>>());
    let parameters = parameters.iter().map(upload).collect::<Result<Vec<_>>>()?;
    let views: Vec<_> = parameters.iter().map(|x| x.view()).collect();
    let rows = SEQUENCES * TINY.context;
    let (input, labels) = (dev.upload(&words(rows, 100))?, dev.upload(&words(rows, 101))?);
    let mut gradients = parameters.iter().map(|x| dev.zeros::<T>(x.len())).collect::<Result<Vec<_>>>()?;
    let mut order = Vec::new();
    let mut give = |i: usize, f: &Write<'_, T>| {
        order.push(i);
        // What is not written shows.
        dev.fill(&mut gradients[i], T::of(f64::NAN))?;
        f(&mut gradients[i].view_mut())
    };
    let losses = pass(dev, TINY, &views, (&input, &labels), 1.0 / rows as f64, &mut give)?;
    order.sort_unstable();
    assert_eq!(order, (0..parameters.len()).collect::<Vec<_>>(), "each gradient is given once");
    let losses: Vec<f64> = dev.download(&losses)?.into_iter().map(Into::into).collect();
    let wide = |x: Vec<T>| x.into_iter().map(Into::into).collect();
    let gradients = gradients.iter().map(|x| Ok(wide(dev.download(x)?))).collect::<Result<_>>()?;
    Ok((losses.iter().sum::<f64>() / rows as f64, gradients))
}

fn on_one<R: Send>(gpus: Gpus, f: impl Fn(&Device) -> Result<R> + Sync) -> R {
    gpus.builder(1).module(&MODULE).build().unwrap().run(|dev, _| f(dev)).unwrap().swap_remove(0)
}

/// All elements of each parameter at once: along a random direction the loss changes as the gradient says.
#[test]
fn gradients_are_slopes() {
    on_one(Gpus::software(), |dev| {
        let (mut parameters, h) = (parameters(), 1e-5);
        let (_, gradients) = found::<f64>(dev, &parameters)?;
        for (i, gradient) in gradients.iter().enumerate() {
            let direction = numbers(gradient.len(), 200 + i as u64);
            let mut at = |steps: f64| {
                parameters[i].iter_mut().zip(&direction).for_each(|(x, d)| *x += steps * h * d);
                found::<f64>(dev, &parameters)
            };
            let (ahead, behind) = (at(1.0)?.0, at(-2.0)?.0);
            at(1.0)?;
            let (slope, want) =
                ((ahead - behind) / (2.0 * h), gradient.iter().zip(&direction).map(|(g, d)| g * d).sum::<f64>());
            assert!(want.abs() > 1e-6, "parameter {i} has an effect: {want}");
            assert!((slope - want).abs() < 1e-4 * want.abs().max(1e-3), "parameter {i}: {slope}, not {want}");
        }
        Ok(())
    });
}

/// Largest difference from the gradients in `f64`, relative to the largest element of each parameter.
fn off(found: &[Vec<f64>], want: &[Vec<f64>]) -> f64 {
    let largest = |x: &[f64]| x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let off = |(found, want): (&Vec<f64>, &Vec<f64>)| {
        assert!(found.iter().all(|x| x.is_finite()));
        largest(&found.iter().zip(want).map(|(a, b)| a - b).collect::<Vec<_>>()) / largest(want)
    };
    found.iter().zip(want).map(off).fold(0.0, f64::max)
}

on_both! {
    1: fn narrow_types_have_the_gradients_of_f64(gpus) {
        let (loss, want) = on_one(Gpus::software(), |dev| found::<f64>(dev, &parameters()));
        let (found_32, gradients) = on_one(gpus, |dev| found::<f32>(dev, &parameters()));
        let off_32 = off(&gradients, &want);
        assert!((found_32 - loss).abs() < 1e-5 && off_32 < 1e-4, "{found_32}, {loss}: {off_32}");
        let (found_16, gradients) = on_one(gpus, |dev| found::<bf16>(dev, &parameters()));
        let off_16 = off(&gradients, &want);
        assert!((found_16 - loss).abs() < 0.03 && off_16 < 0.1, "{found_16}, {loss}: {off_16}");
    }

    2: fn two_devices_learn_as_one(gpus) {
        let learn = |devices: usize| {
            let pool = gpus.builder(devices).module(&MODULE).build().unwrap();
            let optimizer = Optimizer::adam_w(3e-3).clip(1.0);
            let mut training = Training::<f32>::new(&pool, TINY, optimizer, 3).unwrap();
            let loss = |step: u32| {
                // Each word is followed by the one two further on.
                let text: Vec<u32> = (0..3 * 17).map(|i| (step + 3 * (i / 17) + 2 * (i % 17)) % 11).collect();
                training.load(&text).unwrap();
                training.step().unwrap();
                training.loss().unwrap()
            };
            let losses: Vec<f64> = (0..12).map(loss).collect();
            training.verify().unwrap();
            losses
        };
        let (one, two) = (learn(1), learn(2));
        assert!(one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-4 * a), "{one:?} {two:?}");
        assert!(one[11] < one[0] - 0.3, "{one:?}");
    }

    1: fn wrong_shapes_are_errors(gpus) {
        on_one(gpus, |dev| {
            let x = dev.zeros::<f32>(2 * 16 * 16)?;
            for (context, head) in [(12, 8), (16, 4), (0, 8)] {
                let of = Heads { rows: 32, context, heads: 2, head };
                let errors = [split_heads(dev, of, 1, &x, None).unwrap_err(), merge_heads(dev, of, 1, &x).unwrap_err()];
                assert!(errors.iter().all(|error| matches!(error, Error::Custom(_))), "{errors:?}");
            }
            let of = Heads { rows: 32, context: 16, heads: 2, head: 8 };
            assert!(split_heads(dev, of, 3, &x, None).is_err() && merge_heads(dev, of, 2, &x).is_err());
            let mut scores = dev.zeros::<f32>(256)?;
            assert!(causal_softmax(dev, &mut scores, 16, 4).is_err());
            assert!(causal_softmax(dev, &mut scores, 24, 8).is_err());
            causal_softmax(dev, &mut scores, 16, 8)
        });
    }
}

/// Without a GPU it prints "skipped: no CUDA device".
#[test]
fn cuda_code_agrees_with_the_rust_halves() {
    fn of<T: Number + Into<f64>>(tolerance: f64) {
        let random = |len: usize, seed: u64| numbers(len, seed).iter().map(|&x| T::of(4.0 * x)).collect::<Vec<_>>();
        let dims = LaunchDims { grid: (2, 3, 2), block: (256, 1, 1), shared_bytes: 0 };
        let (context, heads, head, parts) = (24u32, 3u32, 16u32, 3u32);
        let (rows, len) = (48u64, 48 * 3 * 16 * 3);
        for biased in [0, 1] {
            let inputs = (random(len, 1), random(144, 2), random(len, 3), rows, context, heads, head, parts, biased);
            // SAFETY: both halves fit the signature; the buffers have the elements of the shape.
            unsafe { twins(T::SPLIT, dims, inputs, tolerance) }
        }
        let inputs = (random(len, 4), random(len, 5), rows, context, heads, head, parts);
        // SAFETY: as above.
        unsafe { twins(T::MERGE, dims, inputs, tolerance) }
        // Rows that are kept in registers, and longer ones.
        for (context, block) in [(64usize, 16u32), (1024, 256), (2048, 512)] {
            let (rows, dims) = (2 * context, LaunchDims { grid: (5, 1, 1), block: (32, 8, 1), shared_bytes: 0 });
            let len = rows * context;
            // SAFETY: both halves fit the signature; the buffers have the rows.
            unsafe { twins(T::SOFTMAX, dims, (random(len, 6), rows as u64, context as u32, block), tolerance) }
            // All are positive, so each sum is far from its terms: the differences lose no digits.
            let above = |seed: u64| numbers(len, seed).iter().map(|&x| T::of(2.0 + x)).collect::<Vec<_>>();
            // SAFETY: as above.
            unsafe {
                twins(T::SOFTMAX_BACKWARD, dims, (above(7), above(8), rows as u64, context as u32, block), tolerance)
            }
        }
    }
    of::<f32>(1e-5);
    of::<bf16>(1e-2);
}

#[test]
fn the_program_learns() {
    let test = std::env::current_exe().unwrap();
    let program =
        test.ancestors().nth(2).unwrap().join("examples").join(format!("gpt{}", std::env::consts::EXE_SUFFIX));
    assert!(program.exists(), "{} is missing: `cargo build --example gpt`", program.display());
    let output = Command::new(program).env("GPU_POOL_BACKEND", "host:2").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("on 2 devices"), "{out}{err}");
}
