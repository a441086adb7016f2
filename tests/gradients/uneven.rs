//! Members with different numbers of batches, and with parameters that are to be the same.

use crate::{
    on_both,
    rig::{self, all, give, refused, small},
    support::failure,
};
use gpu_pool::{DeviceBuffer, Error, ReduceOp, gradients::GradientExchange};
use parking_lot::Mutex;

on_both! {
    // DDP's `Join`: pytorch#38174. Rank 0, whose order and settings count, is the first to end.
    2: fn until_all_have_ended(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for reduce in [ReduceOp::Sum, ReduceOp::Scaled(1.0)] {
            let found = pool.run(|dev, _| {
                let mut exchange = small().reduce(reduce).build(dev, &[4, 3])?;
                let mut weights = dev.zeros::<f32>(4)?;
                let (mut left, mut actives) = (2 * dev.rank() + 1, Vec::new());
                loop {
                    let active = exchange.join(dev, left > 0)?;
                    if active == 0 {
                        break;
                    }
                    if let ReduceOp::Scaled(_) = reduce {
                        exchange.set_weight(1.0 / active as f64)?;
                    }
                    if left > 0 {
                        left -= 1;
                        give(dev, &mut exchange, 1, &[1.0; 3])?;
                        give(dev, &mut exchange, 0, &[1.0; 4])?;
                    } else {
                        exchange.nothing();
                    }
                    let done = exchange.finish(dev)?;
                    assert!(done.was_exchanged() && done.unused().is_empty());
                    let gradient = done.grad(0)?;
                    dev.axpy(1.0, &gradient, &mut weights)?;
                    actives.push(active);
                }
                Ok((actives, dev.download(&weights)?))
            });
            let actives: Vec<usize> =
                (0..2 * n - 1).map(|step| (0..n).filter(|rank| step < 2 * rank + 1).count()).collect();
            let sum = match reduce {
                ReduceOp::Sum => actives.iter().sum::<usize>() as f32,
                _ => actives.len() as f32,
            };
            for (seen, weights) in found.unwrap() {
                assert_eq!(seen, actives);
                assert!(weights.iter().all(|x| (x - sum).abs() < 1e-5), "{weights:?} for {sum}");
            }
        }
    }

    // With steps that exchange nothing between: what only others hold is exchanged all the same.
    2: fn an_end_between_two_exchanges(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().reduce(ReduceOp::Sum).build(dev, &[4])?;
            let mut found = Vec::new();
            for number in 0.. {
                exchange.set_sync(number % 2 == 1)?;
                let has = number < [1, 3][dev.rank()];
                if exchange.join(dev, has)? == 0 {
                    break;
                }
                if has {
                    let adds = exchange.holds(0);
                    let one = dev.upload(&[1.0f32; 4])?;
                    let mut x = exchange.grad_mut(0)?;
                    if adds { dev.axpy(1.0, &one, &mut x)? } else { dev.copy(&one, &mut x)? }
                    exchange.ready(dev, 0)?;
                } else {
                    exchange.nothing();
                }
                if exchange.finish(dev)?.was_exchanged() {
                    found.push(dev.download(&exchange.grad(0)?)?[0]);
                }
            }
            Ok(found)
        });
        assert_eq!(found.unwrap(), vec![vec![3.0]; 2]);
    }

    2: fn joins_at_the_wrong_time(gpus) {
        let pool = rig::run(gpus, 2, |dev| {
            let mut exchange = small().build(dev, &[4])?;
            give(dev, &mut exchange, 0, &[1.0; 4])?;
            assert!(refused(exchange.join(dev, true)).contains("within a step"));
            exchange.finish(dev).map(drop)
        });
        // One asks, the other does not: nobody waits for ever, and both lines are told.
        let error = failure(pool.run(|dev, _| {
            let mut exchange = small().build(dev, &[4])?;
            match dev.rank() {
                0 => exchange.join(dev, true).map(drop),
                _ => give(dev, &mut exchange, 0, &[1.0; 4]),
            }
        }));
        let Error::Mismatch { a_site, b_site, .. } = &error else { panic!("no mismatch: {error}") };
        assert!(
            a_site.line() != b_site.line() && [a_site, b_site].iter().all(|site| !site.file().contains("src")),
            "{error}"
        );
    }

    // What DDP does when it is made, and with `broadcast_buffers`: parameters of any type, also those without
    // gradients.
    2: fn parameters_of_one_member(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        for root in [0, n - 1] {
            let found = pool.run(|dev, _| {
                let exchange = small().build(dev, &[5, 0, 700])?;
                let own = dev.rank() as f32 + 0.5;
                let mut weights = [dev.upload(&[own; 5])?, dev.zeros(0)?, dev.upload(&[own; 700])?];
                let mut counts = vec![dev.upload(&[dev.rank() as i64])?];
                exchange.verify_parameters(dev, &weights[1..2])?;
                exchange.broadcast_parameters(dev, &mut weights, root)?;
                exchange.broadcast_parameters(dev, &mut counts, root)?;
                exchange.broadcast_parameters::<DeviceBuffer<f32>>(dev, &mut [], root)?;
                exchange.verify_parameters(dev, &weights)?;
                exchange.verify_parameters(dev, &counts)?;
                Ok((dev.download(&weights[0])?, dev.download(&weights[2])?, dev.download(&counts[0])?))
            });
            let own = root as f32 + 0.5;
            assert_eq!(found.unwrap(), vec![(vec![own; 5], vec![own; 700], vec![root as i64]); n]);
        }
        // Of a group, by its ranks; views will do.
        let found = pool.run(|dev, _| {
            let ranks: Vec<usize> = (0..n).rev().collect();
            let exchange = small().build_in(&dev.group(&ranks)?, &[1])?;
            let mut x = dev.upload(&[dev.rank() as f32; 4])?;
            exchange.broadcast_parameters(dev, &mut [x.slice_mut(1..3)], 0)?;
            dev.download(&x)
        });
        let last = (n - 1) as f32;
        let expected: Vec<_> = (0..n).map(|rank| vec![rank as f32, last, last, rank as f32]).collect();
        assert_eq!(found.unwrap(), expected);
    }

    // DDP's _verify_param_shape_across_processes.
    2: fn parameters_that_do_not_fit(gpus) {
        let pool = rig::pool(gpus, 2);
        let kept = Mutex::new(Vec::new());
        let differ = |sizes: [&[usize]; 2]| {
            kept.lock().clear();
            let error = failure(pool.run(|dev, _| {
                let exchange = small().build(dev, &[1])?;
                let mut x: Vec<DeviceBuffer<f32>> = sizes[dev.rank()]
                    .iter()
                    .map(|&len| dev.upload(&vec![dev.rank() as f32; len]))
                    .collect::<Result<_, _>>()?;
                let done = exchange.broadcast_parameters(dev, &mut x, 0);
                kept.lock().push((dev.rank(), dev.download(&x[0])?));
                done
            }));
            // Before anything was written.
            assert!(kept.lock().iter().all(|(rank, x)| x.iter().all(|x| *x == *rank as f32)));
            let Error::Mismatch { what, a_call, b_call, a_site, .. } = error else { panic!("no mismatch: {error}") };
            assert!(a_site.file().ends_with("uneven.rs"));
            (what, a_call, b_call)
        };
        let (what, a, b) = differ([&[4, 4], &[4, 5]]);
        assert_eq!((what, &a[..], &b[..]), ("size", "parameter 1 of 4 elements", "parameter 1 of 5 elements"));
        assert_eq!(differ([&[4, 4], &[4]]).0, "count");
        let error = failure(pool.run(|dev, _| {
            let exchange: GradientExchange = small().build(dev, &[1])?;
            match dev.rank() {
                0 => exchange.broadcast_parameters(dev, &mut [dev.zeros::<f32>(1)?], 0),
                _ => exchange.broadcast_parameters(dev, &mut [dev.zeros::<f64>(1)?], 0),
            }
        }));
        assert!(matches!(error, Error::Mismatch { what: "dtype", .. }), "{error}");
    }

    // One bit of one element is enough; equal bits are equal, also of NaN.
    2: fn replicas_that_have_drifted_apart(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let verify = |drifts: bool| {
            pool.run(|dev, _| {
                let exchange = small().build(dev, &[1])?;
                let mut last = vec![0.25f32; 1000];
                if drifts && dev.rank() == n - 1 {
                    last[999] = f32::from_bits(0.25f32.to_bits() ^ 1);
                }
                let weights = [dev.upload(&[f32::NAN, -0.0])?, dev.upload(&last)?];
                exchange.verify_parameters(dev, &weights)?;
                // Averages of what is the same stay so.
                let mut exchange = exchange;
                give(dev, &mut exchange, 0, &[1.0])?;
                exchange.finish(dev)?;
                all(dev, &exchange)
            })
        };
        assert_eq!(verify(false).unwrap(), vec![vec![vec![1.0]]; n]);
        let error = failure(verify(true));
        let Error::Mismatch { what: "parameters", a: 0, b, a_call, b_call, .. } = &error else {
            panic!("no mismatch: {error}")
        };
        assert!(*b == n - 1 && a_call.starts_with("parameter 1,") && b_call.starts_with("parameter 1,"), "{error}");
    }
}
