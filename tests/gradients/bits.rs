//! The same numbers as a plain all-reduce, bit for bit.

use crate::{
    on_both,
    rig::{self, Rng, SIZES, all, backwards, bits, plain, small, step},
    support::{Gpus, cases},
};
use gpu_pool::{Builder, ReduceOp, collective::Algorithm, gradients::GradientExchange};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

/// Some steps of all operations, in any memory, against plain all-reduces.
fn is_plain(pool: Builder, sizes: &[usize], exchange: gpu_pool::gradients::GradientExchangeBuilder) {
    let pool = pool.build().unwrap();
    let weighted = |rank: usize| ReduceOp::Scaled(0.25 + rank as f64);
    for op in [ReduceOp::Avg, ReduceOp::Sum, ReduceOp::Scaled(1.0)] {
        let made = exchange.clone().reduce(op);
        let mut state = pool.per_device(|dev, _| made.build(dev, sizes)).unwrap();
        for number in 0..3 {
            state
                .run(|dev, _, exchange| {
                    let op = match op {
                        ReduceOp::Scaled(_) => {
                            exchange.set_weight(0.25 + dev.rank() as f64)?;
                            weighted(dev.rank())
                        }
                        op => op,
                    };
                    let done = step(dev, exchange, sizes, number, &backwards(sizes.len()))?;
                    assert!(done.was_exchanged() && done.unused().is_empty());
                    let found = all(dev, exchange)?;
                    assert_eq!(bits(&found), bits(&plain(dev, sizes, number, op, |_| true)?), "{op} in step {number}");
                    Ok(())
                })
                .unwrap();
        }
    }
}

on_both! {
    1: fn of_every_length(gpus) {
        for n in [1, gpus.up_to(2), gpus.up_to(4)] {
            is_plain(rig::builder(gpus, n), &SIZES, small());
        }
        is_plain(rig::builder(gpus, 1), &[], small());
        is_plain(rig::builder(gpus, gpus.up_to(2)), &[0], small());
    }

    2: fn by_every_way(gpus) {
        let n = gpus.up_to(3);
        for algorithm in [Algorithm::Direct, Algorithm::Copies, Algorithm::Ring] {
            is_plain(rig::builder(gpus, n).algorithm(algorithm), &SIZES, small());
        }
        is_plain(rig::builder(gpus, n).without_peer_access(), &SIZES, small());
    }

    // pytorch#118421 asks for larger ones.
    2: fn bucket_sizes_do_not_matter(gpus) {
        for bytes in [1, 4, 100, 4096, 1 << 30] {
            is_plain(rig::builder(gpus, 2), &SIZES, small().first_bucket_bytes(bytes).bucket_bytes(bytes));
        }
    }

    2: fn one_giant_among_hundreds_of_tiny_ones(gpus) {
        let mut sizes: Vec<usize> = (0..300).map(|i| i % 5).collect();
        sizes[150] = cases(100_003, 1_000_003);
        is_plain(rig::builder(gpus, 2), &sizes, GradientExchange::builder().bucket_bytes(1 << 16).norm(true));
        // Tiny ones in one bucket.
        is_plain(rig::builder(gpus, 2), &vec![3; 200], GradientExchange::builder().norm(true));
    }

    // Buckets that are summed beside the backward pass go by copy engines from 8 MB on, or by fewer blocks; the last
    // goes as a call does.
    2: fn large_buckets_beside_the_backward_pass(gpus) {
        let megabyte = if gpus.is_cuda() { 1 << 20 } else { 1 << 12 };
        let sizes = [9, 3, 1, 9].map(|megabytes| megabytes * megabyte / 4 + 3);
        let exchange = GradientExchange::builder().first_bucket_bytes(megabyte).bucket_bytes(4 * megabyte);
        is_plain(rig::builder(gpus, gpus.up_to(4)), &sizes, exchange.norm(true));
    }

    // Streams of several priorities: buckets may pass each other on the devices, but not meet each other.
    2: fn priorities_do_not_matter(gpus) {
        for priorities in [&[0, -1][..], &[3, -7, 0, 1], &[]] {
            is_plain(rig::builder(gpus, 2), &SIZES, small().bucket_priorities(priorities));
        }
    }

    // Devices whose backward passes differ, with gradients that some or all do not have; no flag says so beforehand.
    2: fn any_order_on_any_device(gpus) { any_order(gpus); }

    // nccl#1497, #2360, sglang#34159.
    2: fn the_same_in_every_run(gpus) {
        let n = gpus.up_to(4);
        let run = || {
            let pool = rig::pool(gpus, n);
            let mut state = pool.per_device(|dev, _| small().build(dev, &SIZES)).unwrap();
            let found = (0..4).map(|number| {
                state.run(|dev, _, exchange| {
                    let done = step(dev, exchange, &SIZES, number, &backwards(SIZES.len()))?;
                    let norm = dev.download(&done.norm().unwrap())?[0].to_bits();
                    Ok((bits(&all(dev, exchange)?), norm))
                })
            });
            found.collect::<Result<Vec<_>, _>>().unwrap()
        };
        let first = run();
        for step in &first {
            assert!(step.iter().all(|device| *device == step[0]), "members have different bits");
        }
        assert_eq!(run(), first);
    }
}

fn any_order(gpus: Gpus) {
    let n = gpus.up_to(4);
    let pool = rig::pool(gpus, n);
    let cases = if gpus.is_cuda() { 8 } else { cases(5, 16) };
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let sizes = prop::collection::vec(0..80usize, 1..20);
    let tried = runner.run(&(sizes, 1..200usize, any::<u64>()), |(sizes, bytes, seed)| {
        let exchange = small().first_bucket_bytes(bytes).bucket_bytes(2 * bytes);
        let mut state = pool.per_device(|dev, _| exchange.build(dev, &sizes)).unwrap();
        for number in 0..3 {
            state
                .run(|dev, _, exchange| {
                    let mut rng = Rng(seed ^ ((dev.rank() as u64 + 1) << 32) ^ (number as u64 + 1));
                    let mut order = backwards(sizes.len());
                    rng.shuffle(&mut order);
                    order.truncate(sizes.len() - (rng.next() % 3) as usize % sizes.len());
                    let used = |gradient| order.contains(&gradient);
                    let theirs = dev.exchange(order.clone())?;
                    let done = step(dev, exchange, &sizes, number, &order)?;
                    let nobodys: Vec<usize> =
                        (0..sizes.len()).filter(|g| theirs.iter().all(|order| !order.contains(g))).collect();
                    assert_eq!(done.unused(), nobodys);
                    let expected = plain(dev, &sizes, number, ReduceOp::Avg, used)?;
                    assert_eq!(bits(&all(dev, exchange)?), bits(&expected));
                    Ok(())
                })
                .unwrap();
        }
        Ok(())
    });
    tried.unwrap_or_else(|failure| panic!("{failure}"));
}
