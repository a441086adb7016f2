//! Two exchanges of one group: what is of one never meets what is of the other, however alike they are.

use crate::{
    on_both,
    rig::{self, all, give, refused, small},
    support::{Gpus, failure},
};
use gpu_pool::{
    Device, Error, ReduceOp, Result,
    gradients::{GradientExchange, GradientExchangeBuilder, Wire},
};

/// What differs, and that it is told with the two members and their own lines.
#[track_caller]
fn differs<R: std::fmt::Debug>(result: Result<R>) -> &'static str {
    let error = failure(result);
    let Error::Mismatch { what, a, b, a_site, b_site, .. } = &error else { panic!("no mismatch: {error}") };
    assert_eq!((*a, *b), (0, 1), "{error}");
    assert!([a_site, b_site].iter().all(|site| site.file().ends_with("crossed.rs")), "{error}");
    what
}

/// A step in which every gradient of an exchange is `x`.
#[track_caller]
fn whole(dev: &Device, exchange: &mut GradientExchange, x: f32) -> Result<()> {
    for gradient in (0..exchange.len()).rev() {
        dev.fill(&mut exchange.grad_mut(gradient)?, x)?;
        exchange.ready(dev, gradient)?;
    }
    exchange.finish(dev).map(drop)
}

/// Two exchanges, of which member 1 uses the second one first.
fn cross(
    gpus: Gpus,
    builder: &GradientExchangeBuilder,
    (a, b): (&[usize], &[usize]),
    body: impl Fn(&Device, &mut GradientExchange, &mut GradientExchange) -> Result<()> + Sync,
) -> Result<Vec<()>> {
    let pool = rig::pool(gpus, 2);
    pool.run(|dev, _| {
        let (mut x, mut y) = (builder.build(dev, a)?, builder.build(dev, b)?);
        match dev.rank() {
            0 => body(dev, &mut x, &mut y),
            _ => body(dev, &mut y, &mut x),
        }
    })
}

on_both! {
    // Buckets of the same lengths: nothing but the exchange differs. In other lists of gradients, the order and what is
    // unused would have been another's, too.
    2: fn buckets_of_two_exchanges(gpus) {
        let sum = GradientExchange::builder().reduce(ReduceOp::Sum);
        let lists: [(&[usize], &[usize]); 4] = [(&[4], &[4]), (&[4, 8], &[8, 4]), (&[4, 4], &[8]), (&[8], &[4, 4])];
        for builder in [sum.clone(), sum.clone().find_unused(false), sum.wire(Wire::Bf16)] {
            for list in lists {
                let found = cross(gpus, &builder, list, |dev, first, second| {
                    whole(dev, first, 1.0)?;
                    whole(dev, second, 100.0)
                });
                assert_eq!(differs(found), "exchange", "{list:?}");
            }
        }
    }

    // All buckets have met in one order, and only the ends of the steps are crossed.
    2: fn ends_of_steps_of_two_exchanges(gpus) {
        let pool = rig::pool(gpus, 2);
        for sizes in [&[4][..], &[2, 3]] {
            let error = pool.run(|dev, _| {
                let (mut x, mut y) = (small().build(dev, &[4])?, small().build(dev, sizes)?);
                give(dev, &mut x, 0, &[1.0; 4])?;
                for gradient in (0..sizes.len()).rev() {
                    give(dev, &mut y, gradient, &vec![2.0; sizes[gradient]])?;
                }
                let [first, second] = if dev.rank() == 0 { [&mut x, &mut y] } else { [&mut y, &mut x] };
                first.finish(dev)?;
                second.finish(dev).map(drop)
            });
            assert_eq!(differs(error), "exchange");
        }
    }

    2: fn joins_of_two_exchanges(gpus) {
        let found = cross(gpus, &small(), (&[4], &[3]), |dev, first, second| {
            first.join(dev, dev.rank() == 0)?;
            second.join(dev, false).map(drop)
        });
        assert_eq!(differs(found), "exchange");
    }

    // A bucket is not anybody's all-reduce of so many elements either.
    2: fn a_bucket_and_a_plain_sum(gpus) {
        let pool = rig::pool(gpus, 2);
        let error = pool.run(|dev, _| {
            let mut exchange = GradientExchange::builder().reduce(ReduceOp::Sum).build(dev, &[4])?;
            match dev.rank() {
                0 => dev.all_reduce(&mut dev.zeros::<f32>(4)?, ReduceOp::Sum),
                _ => give(dev, &mut exchange, 0, &[1.0; 4]),
            }
        });
        assert_eq!(differs(error), "exchange");
    }

    // In one order on all members nothing is wrong: in one scope and in later ones, with different numbers of steps.
    2: fn two_exchanges_by_turns(gpus) {
        let pool = rig::pool(gpus, 2);
        let sum = GradientExchange::builder().reduce(ReduceOp::Sum);
        let made = |dev: &Device| Ok((sum.build(dev, &[4])?, sum.build(dev, &[4])?));
        let mut state = pool.per_device(|dev, _| made(dev)).unwrap();
        for number in 0..4 {
            let found = state.run(|dev, _, (x, y)| {
                whole(dev, x, 1.0)?;
                if number % 2 == 0 {
                    whole(dev, y, 100.0)?;
                }
                assert_eq!(x.join(dev, true)? + y.join(dev, false)?, 2);
                Ok((all(dev, x)?, all(dev, y)?))
            });
            assert_eq!(found.unwrap(), vec![(vec![vec![2.0; 4]], vec![vec![200.0; 4]]); 2]);
        }
    }

    // Its buckets would be in the first order, and all others' in that of rank 0.
    2: fn a_reset_of_one_member(gpus) {
        let pool = rig::pool(gpus, 2);
        for find in [true, false] {
            let builder = GradientExchange::builder().first_bucket_bytes(1).bucket_bytes(1).find_unused(find);
            let mut state = pool.per_device(|dev, _| builder.build(dev, &[4, 4])).unwrap();
            let ready = |dev: &Device, exchange: &mut GradientExchange| {
                for gradient in [0, 1] {
                    give(dev, exchange, gradient, &[gradient as f32; 4])?;
                }
                exchange.finish(dev).map(drop)
            };
            let error = state.run(|dev, _, exchange| {
                ready(dev, exchange)?;
                if dev.rank() == 1 {
                    exchange.reset(dev)?;
                }
                ready(dev, exchange)
            });
            assert_eq!(differs(error), "step", "{find}");
            // Of all, however often each has called it before.
            state.clear_poison().unwrap();
            let found = state.run(|dev, _, exchange| {
                exchange.reset(dev)?;
                ready(dev, exchange)?;
                all(dev, exchange)
            });
            assert_eq!(found.unwrap(), vec![vec![vec![0.0; 4], vec![1.0; 4]]; 2]);
        }
    }

    // "It is being exchanged" would be no help.
    2: fn memory_of_a_failed_step(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().build(dev, &[4])).unwrap();
        failure(state.run(|dev, _, exchange| {
            give(dev, exchange, 0, &[1.0; 4])?;
            dev.barrier()?;
            Err::<(), _>(Error::custom("no"))
        }));
        state.clear_poison().unwrap();
        state
            .run(|dev, _, exchange| {
                let lent = dev.zeros(4)?;
                let told = [
                    refused(exchange.grad(0)),
                    refused(exchange.grad_mut(0)),
                    refused(exchange.grads_mut([0])),
                    refused(exchange.lend(0, lent)),
                    refused(exchange.take(0)),
                    refused(exchange.set_sync(false)),
                ];
                assert!(told.iter().all(|why| why.contains("`reset`")), "{told:?}");
                assert!(refused(exchange.grad(1)).contains("gradient 1 of 1"));
                exchange.reset(dev)?;
                exchange.grad(0).map(drop)
            })
            .unwrap();
    }

    // The twin begins its sum where the kernel does: `Iterator::sum` of no numbers is -0.0.
    1: fn the_norm_of_nothing(gpus) {
        let pool = rig::pool(gpus, 1);
        for sizes in [&[][..], &[0], &[3]] {
            pool.run(|dev, _| {
                let mut exchange = small().build(dev, sizes)?;
                exchange.nothing();
                let step = exchange.finish(dev)?;
                assert_eq!(dev.download(&step.norm().expect("asked for"))?[0].to_bits(), 0, "{sizes:?}");
                Ok(())
            })
            .unwrap();
        }
    }

    2: fn roots_of_no_parameters(gpus) {
        rig::run(gpus, 2, |dev| {
            let exchange = small().build(dev, &[4])?;
            let mut none: [gpu_pool::DeviceBuffer<f32>; 0] = [];
            let why = refused(exchange.broadcast_parameters(dev, &mut none, 99));
            assert!(why.contains("99"), "{why}");
            exchange.broadcast_parameters(dev, &mut none, 1)?;
            let error = failure(dev.capture(|dev| exchange.broadcast_parameters(dev, &mut none, 0)).map(drop));
            assert!(error.to_string().contains("broadcast_parameters"), "{error}");
            Ok(())
        });
    }
}
