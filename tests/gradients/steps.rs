//! What a step is made of: unused gradients, accumulation, memory of the caller's, single buckets, and no growth.

use crate::{
    on_both,
    rig::{self, SIZES, all, backwards, bits, give, norm_of, numbers, plain, small, step},
    support::{Gpus, on_host},
};
use gpu_pool::{
    Kernel, LaunchDims, Module, ReduceOp,
    gradients::{GradientExchange, Wire},
};
use gpu_pool_lab::{Check, prelude::*};
use std::{
    sync::atomic::{AtomicBool, Ordering::*},
    task::Poll,
};

on_both! {
    // DDP: "Expected to have finished reduction in the prior iteration before starting a new one", or
    // find_unused_parameters.
    2: fn what_is_unused_counts_as_zero(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for wire in [Wire::Same, Wire::Bf16] {
            let sizes = [5, 3, 8, 300, 1];
            let mut state = pool.per_device(|dev, _| small().wire(wire).build(dev, &sizes)).unwrap();
            for number in 0..4 {
                state
                    .run(|dev, _, exchange| {
                        // 1 is nobody's in odd steps, 3 is rank 0's alone.
                        let used = |gradient: usize| match gradient {
                            1 => number % 2 == 0,
                            3 => dev.rank() == 0,
                            _ => true,
                        };
                        let order: Vec<usize> = backwards(5).into_iter().filter(|&gradient| used(gradient)).collect();
                        let done = step(dev, exchange, &sizes, number, &order)?;
                        assert_eq!(done.unused(), if number % 2 == 0 { &[][..] } else { &[1] });
                        let found = all(dev, exchange)?;
                        if number % 2 == 1 {
                            assert_eq!(found[1], [0.0; 3], "what is left of step {}", number - 1);
                        }
                        if wire == Wire::Same {
                            assert_eq!(bits(&found), bits(&plain(dev, &sizes, number, ReduceOp::Avg, used)?));
                        }
                        Ok(())
                    })
                    .unwrap();
            }
        }
    }

    // The first exchange meets for the order of buckets, and learns which gradients are unused.
    2: fn without_a_search_nothing_is_told_to_be_unused(gpus) {
        let pool = rig::pool(gpus, 2);
        let builder = GradientExchange::builder().find_unused(false);
        let mut state = pool.per_device(|dev, _| builder.build(dev, &[4, 4])).unwrap();
        for used in [&[0][..], &[0, 1], &[0, 1]] {
            state
                .run(|dev, _, exchange| {
                    used.iter().try_for_each(|&gradient| give(dev, exchange, gradient, &[1.0; 4]))?;
                    assert!(exchange.finish(dev)?.unused().is_empty());
                    Ok(())
                })
                .unwrap();
        }
    }

    // DDP needs `join` for inputs that end early on some ranks.
    2: fn a_member_without_rows(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let mut state = pool.per_device(|dev, _| small().reduce(ReduceOp::Sum).build(dev, &SIZES)).unwrap();
        // Rank 0, whose order counts, has nothing in the first step.
        for (number, without) in [0, n - 1, 0, 1].into_iter().enumerate() {
            state
                .run(|dev, _, exchange| {
                    let idle = dev.rank() == without;
                    let done = if idle {
                        exchange.nothing();
                        exchange.finish(dev)?
                    } else {
                        step(dev, exchange, &SIZES, number, &backwards(SIZES.len()))?
                    };
                    assert!(done.unused().is_empty());
                    let expected = plain(dev, &SIZES, number, ReduceOp::Sum, |_| !idle)?;
                    assert_eq!(bits(&all(dev, exchange)?), bits(&expected));
                    Ok(())
                })
                .unwrap();
        }
        // Nobody has anything.
        let found = state.run(|dev, _, exchange| {
            exchange.nothing();
            let unused = exchange.finish(dev)?.unused().len();
            Ok((unused, all(dev, exchange)?.concat().iter().all(|x| *x == 0.0)))
        });
        assert_eq!(found.unwrap(), vec![(SIZES.len(), true); n]);
    }

    // DDP's no_sync: what only its steps have used is exchanged all the same.
    2: fn accumulation_exchanges_once(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let sizes = [40, 3, 9];
        for wire in [Wire::Same, Wire::F16] {
            let mut state =
                pool.per_device(|dev, _| small().reduce(ReduceOp::Sum).wire(wire).build(dev, &sizes)).unwrap();
            for round in 0..3 {
                let found = state.run(|dev, _, exchange| {
                    for micro in 0..3 {
                        exchange.set_sync(micro == 2)?;
                        for gradient in [2, 1, 0] {
                            // 1 is used in the first of three only.
                            if gradient == 1 && micro > 0 {
                                continue;
                            }
                            assert_eq!(exchange.holds(gradient), micro > 0);
                            let one = dev.upload(&vec![1.0 + dev.rank() as f32; sizes[gradient]])?;
                            let adds = exchange.holds(gradient);
                            let mut x = exchange.grad_mut(gradient)?;
                            if adds { dev.axpy(1.0, &one, &mut x)? } else { dev.copy(&one, &mut x)? }
                            exchange.ready(dev, gradient)?;
                        }
                        let done = exchange.finish(dev)?;
                        assert_eq!((done.was_exchanged(), done.norm().is_some()), (micro == 2, micro == 2));
                        assert!(done.unused().is_empty());
                    }
                    assert!((0..3).all(|gradient| !exchange.holds(gradient)));
                    all(dev, exchange)
                });
                let sum = (n * (n + 1) / 2) as f32;
                let expected = vec![vec![3.0 * sum; 40], vec![sum; 3], vec![3.0 * sum; 9]];
                assert_eq!(found.unwrap(), vec![expected; n], "round {round}");
            }
        }
    }

    2: fn buckets_follow_the_order_of_rank_0(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let order = [1, 3, 0, 2];
        for follow in [true, false] {
            let exchange = small().first_bucket_bytes(1).bucket_bytes(1).ready_order(follow);
            let mut state = pool.per_device(|dev, _| exchange.build(dev, &[4; 4])).unwrap();
            for number in 0..3 {
                let found = state.run(|dev, _, exchange| {
                    let before: Vec<usize> = (0..4).flat_map(|bucket| exchange.bucket(bucket).to_vec()).collect();
                    let own = if dev.rank() == 0 { order.to_vec() } else { vec![0, 1, 2, 3] };
                    let moved = step(dev, exchange, &[4; 4], number, &own)?.moved();
                    assert_eq!(moved, follow && number == 0);
                    let expected = plain(dev, &[4; 4], number, ReduceOp::Avg, |_| true)?;
                    assert_eq!(bits(&all(dev, exchange)?), bits(&expected));
                    Ok(before)
                });
                let expected = if follow && number > 0 { order } else { [3, 2, 1, 0] };
                assert_eq!(found.unwrap(), vec![expected; n]);
            }
        }
    }

    // Who orders streams by events has to be waited for all the same: nothing else is noted of what is written.
    2: fn without_the_ordering_of_the_library(gpus) {
        for (wire, bytes) in [(Wire::Same, 4), (Wire::Same, 1 << 20), (Wire::Bf16, 4)] {
            let pool = rig::builder(gpus, 2).check(Check::Races).build().unwrap();
            let made = small().reduce(ReduceOp::Sum).wire(wire).first_bucket_bytes(bytes).bucket_bytes(bytes);
            let found = pool.run(|dev, _| {
                let side = dev.stream()?;
                // SAFETY: every step begins behind the one before, on both streams.
                let raw = unsafe { dev.unordered() };
                let aside = raw.on(&side);
                let mut exchange = made.build(&raw, &[4, 9, 3])?;
                let mut found = Vec::new();
                for step in 0..4 {
                    aside.wait(&raw.record()?)?;
                    // The second step exchanges nothing, and the third adds to what it has left.
                    exchange.set_sync(step != 1)?;
                    for (gradient, on) in [(0, &aside), (2, &raw), (1, &aside)] {
                        let x = on.upload(&vec![1.0 + step as f32; [4, 9, 3][gradient]])?;
                        let holds = exchange.holds(gradient);
                        let mut to = exchange.grad_mut(gradient)?;
                        if holds { on.axpy(1.0, &x, &mut to)? } else { on.copy(&x, &mut to)? }
                        exchange.ready(on, gradient)?;
                    }
                    let done = exchange.finish(&raw)?;
                    assert_eq!(done.moved(), step == 0);
                    if done.was_exchanged() {
                        found.push(all(&raw, &exchange)?);
                    } else {
                        raw.wait(&aside.record()?)?;
                    }
                }
                Ok(found)
            });
            let expected = [2.0, 10.0, 8.0].map(|x| vec![vec![x; 4], vec![x; 9], vec![x; 3]]);
            assert_eq!(found.unwrap(), vec![expected; 2]);
        }
    }

    // Without views into buckets DDP flattens and copies; here buffers are given away and come back, by one kernel a
    // bucket.
    2: fn memory_of_the_callers(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        // More in one bucket than a table has lines, and in several.
        for (sizes, bytes) in [(vec![5; 150], 1 << 20), (SIZES.to_vec(), 160)] {
            for wire in [Wire::Same, Wire::Bf16] {
                let made = small().wire(wire).first_bucket_bytes(bytes).bucket_bytes(bytes);
                let [mut lent, mut kept] = [0, 1].map(|_| pool.per_device(|dev, _| made.build(dev, &sizes)).unwrap());
                for number in 0..3 {
                    let kept = kept.run(|dev, _, exchange| {
                        let done = step(dev, exchange, &sizes, number, &backwards(sizes.len()))?;
                        let norm = dev.download(&done.norm().unwrap())?[0];
                        Ok((norm.to_bits(), bits(&all(dev, exchange)?)))
                    });
                    let lent = lent.run(|dev, _, exchange| {
                        for gradient in backwards(sizes.len()) {
                            let x = numbers(number, dev.rank(), gradient, sizes[gradient]);
                            // Members need not do the same; some lie in buckets.
                            match (gradient + dev.rank() + number) % 3 {
                                0 => give(dev, exchange, gradient, &x)?,
                                _ => exchange.ready_from(dev, gradient, dev.upload(&x)?)?,
                            }
                        }
                        let done = exchange.finish(dev)?;
                        let norm = dev.download(&done.norm().unwrap())?[0];
                        let found = all(dev, exchange)?;
                        for (gradient, found) in found.iter().enumerate() {
                            if let Ok(own) = exchange.take(gradient) {
                                assert_eq!(dev.download(&own)?, *found);
                            }
                        }
                        Ok((norm.to_bits(), bits(&found)))
                    });
                    assert_eq!(lent.unwrap(), kept.unwrap());
                }
            }
        }
    }

    2: fn the_optimizer_begins_with_the_first_bucket(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().build(dev, &SIZES)).unwrap();
        for number in 0..3 {
            state
                .run(|dev, _, exchange| {
                    for gradient in backwards(SIZES.len()) {
                        give(dev, exchange, gradient, &numbers(number, dev.rank(), gradient, SIZES[gradient]))?;
                    }
                    let expected = plain(dev, &SIZES, number, ReduceOp::Avg, |_| true)?;
                    let mut seen = 0;
                    for bucket in 0..exchange.buckets() {
                        for gradient in exchange.finish_bucket(dev, bucket)?.to_vec() {
                            assert_eq!(dev.download(&exchange.grad(gradient)?)?, expected[gradient]);
                            seen += 1;
                        }
                        assert!(
                            bucket + 1 == exchange.buckets() || exchange.grad(exchange.bucket(bucket + 1)[0]).is_err()
                        );
                    }
                    assert_eq!(seen, SIZES.len());
                    let done = exchange.finish(dev)?;
                    let norm = f64::from(dev.download(&done.norm().unwrap())?[0]);
                    assert!((norm / norm_of(&expected) - 1.0).abs() < 1e-7);
                    Ok(())
                })
                .unwrap();
        }
    }

    1: fn several_gradients_at_once(gpus) {
        let pool = rig::pool(gpus, 1);
        let found = pool.run(|dev, _| {
            let mut exchange = small().build(dev, &[2, 3])?;
            let [mut a, mut b] = exchange.grads_mut([0, 1])?;
            dev.fill(&mut a, 1.0)?;
            dev.fill(&mut b, 2.0)?;
            assert!(exchange.grads_mut([1, 1]).is_err() && exchange.grads_mut([0, 2]).is_err());
            all(dev, &exchange)
        });
        assert_eq!(found.unwrap(), [[vec![1.0; 2], vec![2.0; 3]]]);
    }

    // In the steady state no memory is asked for.
    2: fn steps_do_not_grow(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().wire(Wire::Bf16).build(dev, &SIZES)).unwrap();
        let mut held = Vec::new();
        for number in 0..8 {
            let found = state.run(|dev, _, exchange| {
                let before = dev.stats().in_use;
                for gradient in backwards(SIZES.len()) {
                    dev.fill(&mut exchange.grad_mut(gradient)?, 1.0)?;
                    exchange.ready(dev, gradient)?;
                }
                exchange.finish(dev)?;
                Ok((before, dev.stats().in_use))
            });
            held.push(found.unwrap());
            assert!(number < 2 || held[number] == held[1], "{held:?}");
        }
    }
}

static GATE: Module = Module::ptx("");
static OPEN: AtomicBool = AtomicBool::new(false);

/// Work of the backward pass that does not end before the test says so.
static UNTIL_OPEN: Kernel<(&'static mut [f32],)> =
    Kernel::resumable(&GATE, "until_open", |_: LaunchDims, _: &mut [f32]| match OPEN.load(Acquire) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    });

/// The point of it all: a bucket is reduced, and can be used, while the backward pass goes on.
#[test]
fn a_bucket_does_not_wait_for_the_rest_of_the_backward_pass() {
    on_host(2, |gpus: Gpus| {
        let pool = rig::builder(gpus, 2).module(&GATE).build().unwrap();
        let found = pool.run(|dev, _| {
            let exchange = GradientExchange::builder().first_bucket_bytes(1).bucket_bytes(1).ready_order(false);
            let mut exchange = exchange.build(dev, &[8, 4])?;
            let mut other = dev.zeros::<f32>(1)?;
            give(dev, &mut exchange, 1, &[dev.rank() as f32; 4])?;
            // SAFETY: the kernel touches nothing.
            unsafe { dev.launch(&UNTIL_OPEN, LaunchDims::cover(1), (&mut other,))? };
            let side = dev.stream()?;
            let aside = dev.on(&side);
            exchange.finish_bucket(&aside, 0)?;
            // Would never end if the bucket waited for the kernel.
            let found = aside.download(&exchange.grad(1)?)?;
            dev.barrier()?;
            OPEN.store(true, Release);
            exchange.finish(dev)?;
            Ok((found, dev.download(&exchange.grad(0)?)?))
        });
        assert_eq!(found.unwrap(), vec![(vec![0.5; 4], vec![0.0; 8]); 2]);
    });
}
