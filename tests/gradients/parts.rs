//! Buckets as a whole: flat views, and reduce-scatter, where each member has the results of its part.

use crate::{
    on_both,
    rig::{self, SIZES, backwards, give, numbers, refused},
};
use gpu_pool::{
    Device, Error, ReduceOp,
    gradients::{GradientExchange, GradientExchangeBuilder, Wire},
};
use std::ops::Range;

fn scattered() -> GradientExchangeBuilder {
    GradientExchange::builder().ready_order(false).reduce(ReduceOp::Sum).scatter(true)
}

/// Lengths of which one bucket has several chunks of 2048 elements, and one a single chunk.
const LARGE: [usize; 4] = [9000, 1, 0, 300];

/// One step, and all buckets as they are then.
fn buckets(dev: &Device, exchange: &mut GradientExchange, number: usize) -> Result<Vec<Vec<f32>>, Error> {
    for gradient in backwards(LARGE.len()) {
        give(dev, exchange, gradient, &numbers(number, dev.rank(), gradient, LARGE[gradient]))?;
    }
    exchange.finish(dev)?;
    (0..exchange.buckets()).map(|bucket| dev.download(&exchange.grads_in_bucket(bucket)?)).collect()
}

on_both! {
    // Every member has the bits of the all-reduce in its part, and the parts tile the bucket.
    1: fn parts_have_the_bits_of_an_all_reduce(gpus) {
        for n in 1..=gpus.up_to(4) {
            rig::run(gpus, n, |dev| {
                for bytes in [1000, 1 << 20] {
                    let builder = scattered().first_bucket_bytes(bytes).bucket_bytes(bytes);
                    let mut parts = builder.build(dev, &LARGE)?;
                    let mut whole = builder.clone().scatter(false).build(dev, &LARGE)?;
                    for number in 0..3 {
                        let (found, expected) = (buckets(dev, &mut parts, number)?, buckets(dev, &mut whole, number)?);
                        for (bucket, (found, expected)) in found.iter().zip(&expected).enumerate() {
                            assert_eq!(whole.part(bucket), 0..expected.len());
                            let part = parts.part(bucket);
                            assert!(part.start % 2048 == 0 || part.is_empty());
                            let of = |x: &[f32]| rig::bits(&[x[part.clone()].to_vec()]);
                            assert_eq!(of(found), of(expected));
                            let all = dev.exchange(part.clone())?;
                            let follows = |end, part: &Range<usize>| (part.start == end).then_some(part.end);
                            assert_eq!(all.iter().try_fold(0, follows), Some(found.len()));
                        }
                    }
                }
                Ok(())
            });
        }
    }

    2: fn scattered_buckets_accumulate_and_weigh(gpus) {
        rig::run(gpus, 2, |dev| {
            let mut exchange = scattered().reduce(ReduceOp::Scaled(0.5)).build(dev, &[4100])?;
            for sync in [false, true] {
                exchange.set_sync(sync)?;
                assert_eq!(exchange.holds(0), sync);
                let mut own = exchange.grad_mut(0)?;
                let ones = dev.upload(&[1.0f32; 4100])?;
                dev.axpy(1.0 + dev.rank() as f32, &ones, &mut own)?;
                exchange.ready(dev, 0)?;
                exchange.finish(dev)?;
            }
            let found = dev.download(&exchange.grads_in_bucket(0)?)?;
            assert!(found[exchange.part(0)].iter().all(|x| *x == 3.0), "2 * (1 + 2) * 0.5");
            Ok(())
        });
    }

    1: fn what_does_not_go_together(gpus) {
        rig::run(gpus, 1, |dev| {
            for builder in [scattered().ready_order(true), scattered().norm(true), scattered().wire(Wire::Bf16)] {
                assert!(refused(builder.build(dev, &[1])).contains("scattered"));
            }
            let mut exchange = scattered().build(dev, &[4, 2])?;
            assert!(refused(exchange.lend(0, dev.zeros(4)?)).contains("scattered"));
            refused(exchange.grads_in_bucket(1));
            give(dev, &mut exchange, 1, &[1.0; 2])?;
            refused(exchange.grads_in_bucket(0));
            give(dev, &mut exchange, 0, &[1.0; 4])?;
            exchange.finish(dev)?;
            assert_eq!(dev.download(&exchange.grads_in_bucket(0)?)?, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
            let mut lent = GradientExchange::builder().build(dev, &SIZES)?;
            lent.lend(3, dev.zeros(SIZES[3])?)?;
            assert!(refused(lent.grads_in_bucket(0)).contains("gradient 3"));
            Ok(())
        });
    }
}
