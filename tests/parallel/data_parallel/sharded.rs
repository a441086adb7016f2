//! ZeRO-1: state in parts gives the same bits, and takes a part of the memory.

use super::rig::{Bag, Real, bag, bits, step, weights};
use crate::{on_both, support::Gpus};
use gpu_pool::{
    Error, ReduceOrder,
    parallel::{DataParallel, LearningRate, Optimizer},
};
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
