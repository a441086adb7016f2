//! ZeRO-1: state in parts gives the same bits, and takes a part of the memory.

use super::rig::{Bag, Real, bag, bags, bits, number, step, weights};
use crate::{
    on_both,
    support::{Gpus, failure, on_cuda},
};
use gpu_pool::{
    Error, GpuPool, Result,
    collective::{Algorithm, ReduceOrder},
};
use gpu_pool_train::{DataParallel, LearningRate, Optimizer};
use half::{bf16, f16};

on_both! {
    2: fn sharded_state_gives_the_same_bits(gpus) {
        for n in [1, 2, gpus.up_to(4)] {
            same_bits::<f32>(gpus, n);
        }
        same_bits::<bf16>(gpus, gpus.up_to(3));
        same_bits::<f16>(gpus, 2);
    }

    // ZeRO-1: moments, and copies of half types in f32, of one part only.
    2: fn sharded_state_takes_a_part_of_the_memory(gpus) {
        for n in 2..=gpus.up_to(4) {
            part_of_the_memory::<f32>(gpus, n, 8);
            part_of_the_memory::<bf16>(gpus, n, 12);
        }
    }

    // Where kernels meet one of each device ends the step; with a wish for another algorithm there are calls.
    2: fn one_kernel_ends_the_step_with_the_bits_of_the_calls(gpus) {
        // Software GPUs have no such kernel: there it is the same twice.
        for n in 2..=gpus.up_to(if gpus.is_cuda() { 4 } else { 2 }) {
            one_kernel_is_the_calls::<f32>(gpus, n, &UNEVEN);
        }
        one_kernel_is_the_calls::<bf16>(gpus, gpus.up_to(3), &UNEVEN);
        one_kernel_is_the_calls::<f16>(gpus, 2, &UNEVEN);
        // Members without a part; more parameters in a part than the calls give to one launch.
        one_kernel_is_the_calls::<bf16>(gpus, gpus.up_to(4), &[3]);
        one_kernel_is_the_calls::<bf16>(gpus, 2, &[40; 150]);
    }

    // The new parameters are written where they are now, on each device.
    2: fn parameters_may_move_between_steps(gpus) {
        let pool = pool_of(gpus, gpus.up_to(3), Algorithm::Auto);
        let optimizer = Optimizer::adam(0.1).sharded();
        let make = || bags::<f32>(&pool, optimizer, &UNEVEN, 1);
        let (mut model, mut other) = (make(), make());
        for number in 0..3 {
            model.each(|dev, bag| {
                for (k, own) in bag.0.iter_mut().enumerate().filter(|(k, _)| (k + dev.rank()) % 2 == 0) {
                    let new = dev.upload(&dev.download(own)?)?;
                    assert_eq!(new.len(), UNEVEN[k]);
                    *own = new;
                }
                Ok(())
            }).unwrap();
            step(&mut model, &UNEVEN, number, 7).unwrap();
            step(&mut other, &UNEVEN, number, 7).unwrap();
        }
        model.verify().unwrap();
        assert!(bits(&weights(&mut model).unwrap()[0]) == bits(&weights(&mut other).unwrap()[0]));
    }
}

/// A step of several buckets of several chunks for each warp. Software GPUs have no such kernel.
#[test]
fn one_kernel_ends_the_step_of_a_larger_model() {
    on_cuda(2, |gpus| {
        one_kernel_is_the_calls::<bf16>(gpus, gpus.up_to(4), &[300_000, 5, 1_000_003, 77, 200_000]);
    });
}

/// Buckets of one chunk of the norm, of several, and of a part of one.
const UNEVEN: [usize; 7] = [9000, 3, 2048, 0, 901, 1, 4097];

/// Kernels do not meet where a checker watches.
fn pool_of(gpus: Gpus, n: usize, algorithm: Algorithm) -> GpuPool {
    gpus.unwatched(n).algorithm(algorithm).reduce_order(ReduceOrder::Rank).build().unwrap()
}

/// Steps of all kinds: of all parameters, without some of them, with a norm that is not finite, with a closure that
/// fails. The parameters of all replicas, and the norms.
fn steps<T: Real>(pool: &GpuPool, optimizer: Optimizer, sizes: &[usize]) -> Result<(Vec<Vec<T>>, Vec<u32>)> {
    let mut model = bags::<T>(pool, optimizer, sizes, 3);
    let mut norms = Vec::new();
    for k in 0..2 {
        step(&mut model, sizes, k, 13)?;
        norms.extend(model.gradient_norms()?.unwrap().iter().map(|norm| norm.to_bits()));
        // Some parameters have no gradient: it counts as zero.
        model.step(13, |dev, _, _, gradients| {
            for i in (0..sizes.len()).rev().filter(|i| i % 2 == 0) {
                let g: Vec<T> = (0..sizes[i]).map(|j| T::of(number(50 + k, j))).collect();
                gradients.write(i, |own| dev.upload_into(&g, own))?;
            }
            Ok(())
        })?;
        let before = weights(&mut model)?;
        let nan = model.step(13, |dev, shard, _, gradients| {
            let value = if shard.index() == 1 { f64::NAN } else { 1.0 };
            (0..sizes.len()).rev().try_for_each(|i| gradients.write(i, |own| dev.fill(own, T::of(value))))
        });
        nan?;
        assert!(matches!(failure(model.verify()), Error::NotFinite { .. }));
        assert!(equal(&weights(&mut model)?, &before));
        failure(model.step(13, |dev, shard, _, gradients| match shard.index() {
            0 => Err(Error::custom("no step")),
            _ => gradients.write(0, |own| dev.fill(own, T::of(9.0))),
        }));
        model.clear_poison()?;
        assert!(equal(&weights(&mut model)?, &before));
    }
    step(&mut model, sizes, 9, 13)?;
    model.verify()?;
    Ok((weights(&mut model)?, norms))
}

/// Bit for bit.
fn equal<T: Real>(a: &[Vec<T>], b: &[Vec<T>]) -> bool {
    a.iter().zip(b).all(|(a, b)| bits(a) == bits(b))
}

fn one_kernel_is_the_calls<T: Real>(gpus: Gpus, n: usize, sizes: &[usize]) {
    let [one, calls] = [Algorithm::Auto, Algorithm::Direct].map(|algorithm| pool_of(gpus, n, algorithm));
    let optimizers = [
        Optimizer::adam_w(0.01).clip(0.5),
        Optimizer::adam_w(0.01),
        Optimizer::sgd(0.1).momentum(0.9).nesterov().decay(0.01).clip(1e-3),
        Optimizer::sgd(0.1),
    ];
    let some = if sizes.iter().sum::<usize>() > 100_000 { 1 } else { optimizers.len() };
    for optimizer in &optimizers[..some] {
        let optimizer = optimizer.bucket_bytes(if some == 1 { 1 << 20 } else { 9_000 });
        let run = |pool: &GpuPool, optimizer: Optimizer| steps::<T>(pool, optimizer, sizes).unwrap();
        let (found, norms) = run(&one, optimizer.sharded());
        for other in [run(&calls, optimizer.sharded()), run(&calls, optimizer)] {
            assert_eq!(norms, other.1, "{n} devices, {optimizer:?}");
            for (device, own) in found.iter().enumerate() {
                let at = (0..own.len()).find(|&i| bits(&own[i..=i]) != bits(&other.0[0][i..=i]));
                assert_eq!(at, None, "device {device} of {n}, {optimizer:?}, {} parameters", sizes.len());
            }
        }
    }
}

/// Five steps with and without sharded state, with every kind of state, and with clipping.
fn same_bits<T: Real>(gpus: Gpus, n: usize) {
    // Buckets of one chunk of the norm, of several, and of a part of one.
    const SIZES: [usize; 5] = [9000, 3, 2048, 0, 901];
    let pool = gpus.builder(n).reduce_order(ReduceOrder::Rank).build().unwrap();
    for optimizer in [
        Optimizer::sgd(0.1),
        Optimizer::sgd(0.1).momentum(0.9).clip(3.0),
        Optimizer::adam_w(0.1).clip(0.5).warm_up(3).schedule(LearningRate::Cosine { steps: 10, end: 0.0 }),
    ] {
        let train = |optimizer: Optimizer| {
            let optimizer = optimizer.bucket_bytes(9_000);
            let mut model = DataParallel::new(&pool, optimizer, |dev| bag::<T>(dev, &SIZES, 3))?;
            for number in 0..3 {
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
