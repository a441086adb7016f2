//! `ShardedOptimizer`: divided state, by one kernel where kernels meet, and else by three collectives.

use crate::{
    data_parallel::rig::{Real, SIZES, number},
    on_both,
    support::{Gpus, failure},
};
use gpu_pool::{DType, Device, DeviceBuffer, Error, GpuPool, ReduceOp, Result, collective::Algorithm};
use gpu_pool_train::{Optimizer, ShardedOptimizer, ShardedState};
use half::{bf16, f16};

/// Multiples of 1/64: their sums, averages over 2 and 4, and the sums of their squares are exact in any order.
pub fn exact(seed: u64, i: usize) -> f64 {
    (number(seed, i) * 64.0).round() / 64.0
}

pub fn bytes<T: Real>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// Kernels do not meet where a checker watches.
pub fn pool_of(gpus: Gpus, count: usize) -> GpuPool {
    gpus.unwatched(count).build().unwrap()
}

/// One device's optimizer, gradients and parameters.
struct Rig<T: Real> {
    own: ShardedOptimizer<T>,
    grads: DeviceBuffer<T>,
    weights: Vec<DeviceBuffer<T>>,
    sizes: Vec<usize>,
}

impl<T: Real> Rig<T> {
    fn new(dev: &Device, optimizer: Optimizer, reduce: ReduceOp, sizes: &[usize]) -> Result<Self> {
        let group = dev.group(&(0..dev.count()).collect::<Vec<_>>())?;
        let own = ShardedOptimizer::new(&group, optimizer, reduce, sizes)?;
        let weight = |(k, &len): (usize, &usize)| dev.upload(&start::<T>(k, len));
        let weights = sizes.iter().enumerate().map(weight).collect::<Result<_>>()?;
        Ok(Rig { grads: dev.zeros(own.len())?, own, weights, sizes: sizes.into() })
    }

    /// Writes the gradients that `of` gives for each element of each parameter.
    fn write(&mut self, dev: &Device, of: impl Fn(usize, usize) -> f64) -> Result<()> {
        let mut all = vec![T::of(0.0); self.own.len()];
        for (k, &len) in self.sizes.iter().enumerate() {
            let place = &mut all[self.own.place(k)];
            (0..len).for_each(|i| place[i] = T::of(of(k, i)));
        }
        dev.upload_into(&all, &mut self.grads)
    }

    fn step(&mut self, dev: &Device) -> Result<Option<f32>> {
        let norm = self.own.step(dev, &mut self.grads, &mut self.weights)?;
        norm.map(|norm| Ok(dev.download(&norm)?[0])).transpose()
    }

    fn download(&self, dev: &Device) -> Result<Vec<Vec<T>>> {
        self.weights.iter().map(|x| dev.download(x)).collect()
    }
}

/// Rounded once, as the kernels do it.
fn narrow<T: Real>(x: f32) -> T {
    match T::DTYPE {
        DType::F32 => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&x)),
        DType::F16 => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&f16::from_f32(x))),
        _ => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&bf16::from_f32(x))),
    }
}

pub fn start<T: Real>(parameter: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of(number(100 + parameter as u64, i))).collect()
}

/// The seed of a device's gradients in a step.
pub fn seed(step: usize, device: usize, parameter: usize) -> u64 {
    (1000 * step + 100 * device + parameter) as u64
}

/// AdamW on one thread, with a rate for each parameter: the parameters, and the norms, after some steps on `n` devices.
pub fn by_hand<T: Real>(
    (sizes, rates): (&[usize], &[f64]),
    n: usize,
    reduce: ReduceOp,
    clip: f64,
    steps: usize,
) -> (Vec<Vec<T>>, Vec<f32>) {
    let by = if reduce == ReduceOp::Avg { 1.0 / n as f32 } else { 1.0 };
    let wide = |x: T| x.wide() as f32;
    let mut weights: Vec<Vec<T>> = sizes.iter().enumerate().map(|(k, &len)| start(k, len)).collect();
    let mut state: Vec<Vec<[f32; 3]>> =
        weights.iter().map(|w| w.iter().map(|&w| [0.0, 0.0, wide(w)]).collect()).collect();
    let mut norms = Vec::new();
    for step in 0..steps {
        let sum = |k: usize, i: usize| {
            let of = |d: usize| wide(T::of(exact(seed(step, d, k), i)));
            wide(narrow::<T>((1..n).fold(of(0), |sum, d| sum + of(d)) * by))
        };
        let grads: Vec<Vec<f32>> =
            sizes.iter().enumerate().map(|(k, &len)| (0..len).map(|i| sum(k, i)).collect()).collect();
        let norm = grads.iter().flatten().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt() as f32;
        norms.push(norm);
        let scale = (clip as f32 / (norm + 1e-6)).min(1.0);
        let left = |beta: f64| 1.0 - beta.powf((step + 1) as f64);
        let root = left(0.999).sqrt() as f32;
        for (k, &rate) in rates.iter().enumerate() {
            let (step, keep) = ((rate / left(0.9)) as f32, (1.0 - rate * 0.01) as f32);
            for ((w, state), g) in weights[k].iter_mut().zip(&mut state[k]).zip(&grads[k]) {
                let [first, second, master] = state;
                let (g, shrunk) = (g * scale, *master * keep);
                *first += (g - *first) * (1.0f64 - 0.9) as f32;
                *second = 0.999f32 * *second + (1.0f64 - 0.999) as f32 * (g * g);
                *master = shrunk - step * (*first / (second.sqrt() / root + 1e-8));
                *w = narrow(*master);
            }
        }
    }
    (weights, norms)
}

/// Steps of AdamW are those of one thread, bit for bit, on all devices.
fn follows_the_formula<T: Real>(gpus: Gpus, sizes: &[usize], clip: f64) {
    for n in 1..=gpus.up_to(4) {
        let pool = pool_of(gpus, n);
        let reduce = if n.is_power_of_two() { ReduceOp::Avg } else { ReduceOp::Sum };
        let (weights, norms) = by_hand::<T>((sizes, &vec![0.01; sizes.len()]), n, reduce, clip, 3);
        let optimizer = Optimizer::adam_w(0.01).clip(clip);
        let found = pool.run(|dev, shard| {
            let mut rig = Rig::<T>::new(dev, optimizer, reduce, sizes)?;
            let mut norms = Vec::new();
            for step in 0..3 {
                rig.write(dev, |k, i| exact(seed(step, shard.index(), k), i))?;
                norms.push(rig.step(dev)?.unwrap());
            }
            Ok((rig.download(dev)?, norms))
        });
        for (device, (own, own_norms)) in found.unwrap().into_iter().enumerate() {
            assert_eq!(own_norms, norms, "{n} devices, sizes {sizes:?}");
            for (k, (own, wanted)) in own.iter().zip(&weights).enumerate() {
                let at = (0..own.len()).find(|&i| bytes(&own[i..=i]) != bytes(&wanted[i..=i]));
                let what = at.map(|i| (i, own[i].wide(), wanted[i].wide()));
                assert_eq!(what, None, "device {device} of {n}, parameter {k} of {sizes:?}");
            }
        }
    }
}

/// What one run leaves on all devices: parameters, norms, state.
type Left<T> = (Vec<Vec<T>>, Vec<Option<f32>>, ShardedState);

/// Three steps with numbers of all kinds; `by_calls` in any case, or as they go.
fn run<T: Real>(
    pool: &GpuPool,
    (optimizer, reduce): (Optimizer, ReduceOp),
    sizes: &[usize],
    by_calls: bool,
) -> Vec<Left<T>> {
    let found = pool.run(|dev, shard| {
        let mut rig = Rig::<T>::new(dev, optimizer, reduce, sizes)?;
        rig.own = if by_calls { rig.own.by_calls() } else { rig.own };
        let mut norms = Vec::new();
        for step in 0..3 {
            rig.write(dev, |k, i| number(seed(step, shard.index(), k), i) * 0.01)?;
            norms.push(rig.step(dev)?);
        }
        Ok((rig.download(dev)?, norms, rig.own.state(dev)?))
    });
    found.unwrap()
}

/// One kernel gives the bits of the calls, and all devices have the same.
fn one_kernel_is_the_calls<T: Real>(gpus: Gpus, sizes: &[usize]) {
    let optimizers = [
        (Optimizer::adam_w(0.01).clip(0.5), ReduceOp::Avg),
        (Optimizer::adam_w(0.01).decay(0.0), ReduceOp::Sum),
        (Optimizer::sgd(0.1).momentum(0.9).nesterov().decay(0.01).clip(1e-3), ReduceOp::Avg),
        (Optimizer::sgd(0.1), ReduceOp::Sum),
    ];
    // Of the largest, one is enough.
    let some = if sizes.iter().sum::<usize>() > 100_000 { 1 } else { optimizers.len() };
    // Software GPUs have no such kernel: there it is the same twice.
    for n in 2..=gpus.up_to(if gpus.is_cuda() { 8 } else { 3 }) {
        // With a wish for another algorithm there are three calls.
        let [one, calls] = [Algorithm::Auto, Algorithm::Direct]
            .map(|algorithm| gpus.unwatched(n).algorithm(algorithm).build().unwrap());
        for (k, &(optimizer, reduce)) in optimizers[..some].iter().enumerate() {
            let terms = (optimizer, reduce);
            // Once also by calls with the algorithms that are best for each.
            let best = (k == 0).then(|| run::<T>(&one, terms, sizes, true));
            let (one, calls) = (run::<T>(&one, terms, sizes, false), run::<T>(&calls, terms, sizes, false));
            let calls = calls.iter().chain(best.iter().flatten());
            for (device, (a, b)) in one.iter().cycle().zip(calls).enumerate() {
                let context = format!("device {} of {n}, {optimizer:?}, {sizes:?}", device % n);
                assert_eq!(a.1, b.1, "norms: {context}");
                assert!(a.2 == b.2, "state: {context}");
                assert!(a.2 == one[0].2 && a.1 == one[0].1, "devices differ: {context}");
                for ((a, b), first) in a.0.iter().zip(&b.0).zip(&one[0].0) {
                    assert!(bytes(a) == bytes(b), "parameters: {context}");
                    assert!(bytes(a) == bytes(first), "parameters of devices differ: {context}");
                }
            }
        }
    }
}

on_both! {
    1: fn sharded_steps_follow_the_formula(gpus) {
        follows_the_formula::<f32>(gpus, &[1], 0.5);
        follows_the_formula::<f32>(gpus, &[1003], 5.0);
        follows_the_formula::<bf16>(gpus, &[2049], 1e9);
        follows_the_formula::<f32>(gpus, &SIZES, 3.0);
        follows_the_formula::<f16>(gpus, &SIZES, 3.0);
        // More parameters in a part than one launch names.
        follows_the_formula::<bf16>(gpus, &[40; 150], 7.0);
    }

    2: fn one_kernel_has_the_bits_of_the_calls(gpus) {
        one_kernel_is_the_calls::<f32>(gpus, &[1]);
        one_kernel_is_the_calls::<bf16>(gpus, &[1]);
        one_kernel_is_the_calls::<f32>(gpus, &[1000]);
        one_kernel_is_the_calls::<bf16>(gpus, &[1000]);
        one_kernel_is_the_calls::<bf16>(gpus, &SIZES);
        if gpus.is_cuda() {
            one_kernel_is_the_calls::<f16>(gpus, &[5003, 3, 12_000]);
            one_kernel_is_the_calls::<f32>(gpus, &[256 << 10]);
            one_kernel_is_the_calls::<bf16>(gpus, &[256 << 10]);
            one_kernel_is_the_calls::<bf16>(gpus, &[100_000, 70_001, 9]);
        }
    }

    // Apart from the one above, since the host needs seconds for the numbers.
    2: fn one_kernel_has_the_bits_of_the_calls_at_three_million(gpus) {
        if gpus.is_cuda() {
            one_kernel_is_the_calls::<bf16>(gpus, &[3_200_000]);
            one_kernel_is_the_calls::<f32>(gpus, &[3_200_000]);
        }
    }

    // A graph of one step, launched with new gradients and new numbers, is as many steps.
    1: fn graphs_hold_steps(gpus) {
        for (sizes, clip) in [(&[3000][..], true), (&SIZES[..], true), (&[3000][..], false)] {
            let optimizer = Optimizer::adam_w(0.01);
            let optimizer = if clip { optimizer.clip(0.5) } else { optimizer };
            let pool = pool_of(gpus, gpus.up_to(3));
            let plain = run::<bf16>(&pool, (optimizer, ReduceOp::Avg), sizes, false);
            let found = pool.run(|dev, shard| {
                let mut rig = Rig::<bf16>::new(dev, optimizer, ReduceOp::Avg, sizes)?;
                let (graph, ()) = dev.capture(|dev| {
                    rig.own.step(dev, &mut rig.grads, &mut rig.weights).map(drop)
                })?;
                assert_eq!(rig.own.steps(), 0);
                for step in 0..3 {
                    rig.write(dev, |k, i| number(seed(step, shard.index(), k), i) * 0.01)?;
                    rig.own.prepare(dev)?;
                    dev.launch_graph(&graph)?;
                }
                Ok((rig.download(dev)?, rig.own.state(dev)?))
            });
            for (own, plain) in found.unwrap().into_iter().zip(plain) {
                assert!(own.1 == plain.2, "sizes {sizes:?}");
                for (k, (own, plain)) in own.0.iter().zip(&plain.0).enumerate() {
                    let at = (0..own.len()).filter(|&i| bytes(&own[i..=i]) != bytes(&plain[i..=i]));
                    assert_eq!(at.count(), 0, "parameter {k} of {sizes:?}, clip {clip}");
                }
            }
        }
    }

    // The gradients are the first device's, so the sums do not depend on the number of devices.
    1: fn state_goes_on_with_other_devices(gpus) {
        let steps = |pool: &GpuPool, range: std::ops::Range<usize>, from: Option<(ShardedState, Vec<Vec<f32>>)>| {
            let found = pool.run(|dev, shard| {
                let mut rig = Rig::<f32>::new(dev, Optimizer::adam_w(0.01).clip(0.5), ReduceOp::Sum, &[5000, 77])?;
                if let Some((state, weights)) = &from {
                    rig.own.set_state(dev, state)?;
                    assert_eq!(rig.own.steps(), 2);
                    for (own, weights) in rig.weights.iter_mut().zip(weights) {
                        dev.upload_into(weights, own)?;
                    }
                }
                for step in range.clone() {
                    let own = if shard.index() == 0 { 1.0 } else { 0.0 };
                    rig.write(dev, |k, i| own * exact(seed(step, 0, k), i))?;
                    rig.step(dev)?;
                }
                Ok((rig.own.state(dev)?, rig.download(dev)?))
            });
            found.unwrap().swap_remove(0)
        };
        let pools = [1, gpus.up_to(2), gpus.up_to(3)].map(|n| pool_of(gpus, n));
        let whole = steps(&pools[0], 0..4, None);
        let first = steps(&pools[1], 0..2, None);
        assert!(steps(&pools[2], 2..4, Some(first)) == whole);
    }

    // torch's GradScaler skips such a step, too.
    1: fn a_norm_that_is_not_finite_changes_nothing(gpus) {
        let pool = pool_of(gpus, gpus.up_to(3));
        for sizes in [&[6000][..], &SIZES[..]] {
            pool.run(|dev, shard| {
                let mut rig = Rig::<bf16>::new(dev, Optimizer::adam_w(0.01).clip(1.0), ReduceOp::Sum, sizes)?;
                let before = rig.download(dev)?;
                let last = shard.index() + 1 == shard.count();
                rig.write(dev, |k, i| if last && (k, i) == (0, 5) { f64::NAN } else { 0.5 })?;
                assert!(rig.step(dev)?.unwrap().is_nan());
                assert_eq!(rig.download(dev)?, before);
                rig.write(dev, |_, _| 0.5)?;
                assert!(rig.step(dev)?.unwrap().is_finite());
                assert_ne!(rig.download(dev)?, before);
                Ok(())
            }).unwrap();
        }
    }

    2: fn groups_step_by_themselves(gpus) {
        let n = gpus.up_to(4) / 2 * 2;
        let pool = pool_of(gpus, n);
        let found = pool.run(|dev, shard| {
            let half = shard.index() % 2;
            let ranks: Vec<usize> = (half..n).step_by(2).collect();
            let group = dev.group(&ranks)?;
            let mut own = ShardedOptimizer::new(&group, Optimizer::sgd(1.0).clip(1e9), ReduceOp::Sum, &[5000])?;
            let (mut grads, mut weights) = (dev.zeros(own.len())?, [dev.zeros::<f32>(5000)?]);
            for _ in 0..3 {
                dev.fill(&mut grads, 1.0 + half as f32)?;
                own.step(dev, &mut grads, &mut weights)?;
            }
            dev.download(&weights[0])
        });
        for (device, found) in found.unwrap().into_iter().enumerate() {
            let each = 3.0 * (n / 2) as f32 * (1.0 + (device % 2) as f32);
            assert!(found.iter().all(|&x| x == -each), "device {device}: {} and not {}", found[0], -each);
        }
    }

    2: fn wrong_steps_are_told(gpus) {
        let pool = pool_of(gpus, 2);
        let make = |sizes: [usize; 2], optimizers: [Optimizer; 2], reduce: [ReduceOp; 2]| {
            failure(pool.run(|dev, shard| {
                let own = shard.index();
                let group = dev.group(&[0, 1])?;
                ShardedOptimizer::<f32>::new(&group, optimizers[own], reduce[own], &[sizes[own]]).map(drop)
            }))
        };
        let (sum, avg, sgd) = (ReduceOp::Sum, ReduceOp::Avg, Optimizer::sgd(0.1));
        let what = |error| match error {
            Error::Mismatch { what, .. } => what,
            other => panic!("{other}"),
        };
        assert_eq!(what(make([3, 4], [sgd; 2], [sum; 2])), "size");
        assert_eq!(what(make([3, 3], [sgd; 2], [sum, avg])), "reduce op");
        assert_eq!(what(make([3, 3], [sgd, Optimizer::adam(0.1)], [sum; 2])), "optimizer");
        let invalid = |error: Error| assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        invalid(make([3, 3], [sgd; 2], [ReduceOp::Max; 2]));
        invalid(make([3, 3], [Optimizer::sgd(-1.0); 2], [sum; 2]));
        invalid(make([usize::MAX; 2], [sgd; 2], [sum; 2]));
        pool.run(|dev, _| {
            let mut rig = Rig::<f32>::new(dev, sgd, sum, &[8, 3])?;
            let mut short = dev.zeros::<f32>(11)?;
            invalid(rig.own.step(dev, &mut short, &mut rig.weights).unwrap_err());
            invalid(rig.own.step(dev, &mut rig.grads, &mut rig.weights[..1]).unwrap_err());
            let mut more = dev.zeros::<f32>(20)?;
            invalid(rig.own.step(dev, &mut more.slice_mut(1..13), &mut rig.weights).unwrap_err());
            let mut swapped = [dev.zeros::<f32>(3)?, dev.zeros::<f32>(8)?];
            invalid(rig.own.step(dev, &mut rig.grads, &mut swapped).unwrap_err());
            let mut state = rig.own.state(dev)?;
            state.first.push(0.0);
            invalid(rig.own.set_state(dev, &state).unwrap_err());
            for steps in [u64::MAX, (1 << 53) + 1] {
                let state = ShardedState { steps, ..rig.own.state(dev)? };
                invalid(rig.own.set_state(dev, &state).unwrap_err());
            }
            invalid(rig.own.set_rate(1e300).unwrap_err());
            // None of them has met anyone, and nothing has failed.
            rig.step(dev).map(drop)
        }).unwrap();
    }

    // Steps do not wait, so whether they were done where their scope has failed is not known.
    2: fn a_scope_that_fails_after_a_step_was_its_last(gpus) {
        let pool = pool_of(gpus, 2);
        let make = |dev: &Device| Rig::<f32>::new(dev, Optimizer::adam(0.1), ReduceOp::Sum, &[5000]);
        let mut rigs = pool.per_device(|dev, _| make(dev)).unwrap();
        let state = rigs.run(|dev, _, rig| {
            rig.step(dev)?;
            rig.own.state(dev)
        }).unwrap().swap_remove(0);
        // A scope without a step is none of theirs.
        failure(pool.run(|dev, _| if dev.rank() == 1 { Err(Error::custom("another")) } else { Ok(()) }));
        rigs.run(|dev, _, rig| rig.step(dev).map(drop)).unwrap();
        failure(rigs.run(|dev, shard, rig| {
            rig.own.step(dev, &mut rig.grads, &mut rig.weights)?;
            // Who has left a scope before it fails is through with its steps.
            if shard.index() == 1 { Err(Error::custom("after the step")) } else { dev.barrier() }
        }));
        rigs.clear_poison().unwrap();
        rigs.run(|dev, _, rig| {
            assert!(matches!(rig.step(dev).unwrap_err(), Error::InvalidArgument { op: "step", .. }));
            assert!(matches!(rig.own.prepare(dev).unwrap_err(), Error::InvalidArgument { op: "prepare", .. }));
            rig.own.set_state(dev, &state)?;
            rig.step(dev).map(drop)
        }).unwrap();
    }

    // A graph that is launched without its numbers.
    1: fn a_launch_that_was_not_prepared_changes_nothing(gpus) {
        let pool = pool_of(gpus, gpus.up_to(2));
        for (sizes, clips) in [(&[3000][..], true), (&SIZES[..], true), (&[3000][..], false), (&SIZES[..], false)] {
            pool.run(|dev, _| {
                let adam_w = Optimizer::adam_w(0.01);
                let optimizer = if clips { adam_w.clip(0.5) } else { adam_w };
                let mut rig = Rig::<bf16>::new(dev, optimizer, ReduceOp::Avg, sizes)?;
                // Which a subtraction of zero would change.
                dev.fill(&mut rig.weights[0], bf16::NEG_ZERO)?;
                let before = rig.download(dev)?;
                let (graph, ()) = dev.capture(|dev| {
                    rig.own.step(dev, &mut rig.grads, &mut rig.weights).map(drop)
                })?;
                for gradient in [0.5, -0.5, f64::INFINITY] {
                    rig.write(dev, |_, _| gradient)?;
                    dev.launch_graph(&graph)?;
                    assert!(rig.download(dev)? == before, "{gradient}");
                }
                Ok(())
            }).unwrap();
        }
    }

    // A device that never calls fails the others' step; a state sets them right.
    2: fn a_failed_step_is_the_last_one(gpus) {
        let pool = pool_of(gpus, 2);
        let make = |dev: &Device| Rig::<f32>::new(dev, Optimizer::adam(0.1), ReduceOp::Sum, &[5000]);
        let mut rigs = pool.per_device(|dev, _| make(dev)).unwrap();
        let state = rigs.run(|dev, _, rig| {
            rig.step(dev)?;
            rig.own.state(dev)
        }).unwrap().swap_remove(0);
        let error = failure(rigs.run(|dev, shard, rig| match shard.index() {
            0 => rig.step(dev).map(drop),
            _ => Err(Error::custom("no step")),
        }));
        assert!(error.to_string().contains("no step"), "{error}");
        rigs.clear_poison().unwrap();
        rigs.run(|dev, shard, rig| {
            if shard.index() == 0 {
                assert!(matches!(rig.step(dev).unwrap_err(), Error::InvalidArgument { op: "step", .. }));
            }
            rig.own.set_state(dev, &state)?;
            rig.step(dev).map(drop)
        }).unwrap();
    }
}
