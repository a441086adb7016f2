//! Exchanges between processes, which are pools of this one: the bits of all_reduce, and buckets that travel beside the
//! backward pass.

mod failures;

use crate::loopback::Hosts;
use gpu_pool::{
    Device, Error, ReduceOp, Result,
    gradients::{Gradient, GradientExchange, GradientExchangeBuilder, Wire},
};
use gpu_pool_lab::{Check, prelude::*};
use half::{bf16, f16};
use parking_lot::{Condvar, Mutex};
use std::{sync::Arc, time::Duration};

const SHAPES: [&[usize]; 5] = [&[1, 1], &[2, 2], &[1, 3], &[2, 1, 3], &[1, 1, 1]];
const SIZES: [usize; 6] = [1, 777, 30, 4001, 5, 2048];

/// Small buckets: a gradient or two each.
fn small<T: Gradient>() -> GradientExchangeBuilder<T> {
    GradientExchange::builder().of::<T>().first_bucket_bytes(64).bucket_bytes(4000)
}

fn build(dev: &Device) -> Result<GradientExchange> {
    small().ready_order(false).build_in(&dev.world()?, &SIZES)
}

fn numbers(rank: usize, gradient: usize) -> Vec<f32> {
    let len = SIZES[gradient];
    (0..len).map(|i| ((i * 7 + rank * 13 + gradient) % 1021) as f32 / 3.0 - 100.0).collect()
}

/// Writes a gradient, on the stream of the backward pass.
fn write(dev: &Device, exchange: &mut GradientExchange, gradient: usize) -> Result<()> {
    let from = dev.upload(&numbers(dev.world()?.rank(), gradient))?;
    dev.copy(&from, &mut exchange.grad_mut(gradient)?)
}

/// A whole step. Whether all gradients have the bits of all_reduce.
fn step(dev: &Device, exchange: &mut GradientExchange) -> Result<bool> {
    for gradient in (0..SIZES.len()).rev() {
        write(dev, exchange, gradient)?;
        exchange.ready(dev, gradient)?;
    }
    exchange.finish(dev)?;
    has_bits(dev, exchange)
}

fn has_bits(dev: &Device, exchange: &GradientExchange) -> Result<bool> {
    let world = dev.world()?;
    let mut same = true;
    for gradient in 0..SIZES.len() {
        let mut x = dev.upload(&numbers(world.rank(), gradient))?;
        world.all_reduce(&mut x, ReduceOp::Avg)?;
        let (x, y) = (dev.download(&x)?, dev.download(&exchange.grad(gradient)?)?);
        same &= bytemuck::cast_slice::<f32, u32>(&x) == bytemuck::cast_slice::<f32, u32>(&y);
    }
    Ok(same)
}

/// Everything works, on the same hosts.
#[track_caller]
fn works(hosts: &Hosts) {
    assert!(hosts.hub.is_empty(), "a message is left");
    let found = hosts.all(|dev| {
        let mut exchange = build(dev)?;
        Ok(step(dev, &mut exchange)? && step(dev, &mut exchange)?)
    });
    assert!(found.iter().all(|same| *same));
    assert!(hosts.hub.is_empty(), "a message is left");
}

/// A gate for threads: shut, until it is opened.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        let mut open = self.0.lock();
        while !*open {
            assert!(!self.1.wait_for(&mut open, Duration::from_secs(120)).timed_out(), "nobody has opened the gate");
        }
    }
}

/// Keeps all messages of a cluster back until the gate is open.
fn held_back(hosts: &Hosts) -> Arc<Gate> {
    let gate = Arc::new(Gate::default());
    let kept = gate.clone();
    assert!(hosts.hub.tap.set(Box::new(move |_| kept.pass())).is_ok());
    gate
}

/// Three steps with each reduction, with gradients of the caller's, and with a norm.
fn has_the_bits_of_all_reduce<T: Gradient>(hosts: &Hosts, of: impl Fn(f32) -> T + Sync) {
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let numbers = |gradient| numbers(world.rank(), gradient).into_iter().map(&of).collect::<Vec<T>>();
        let mut same = true;
        let mut norms = Vec::new();
        for reduce in [ReduceOp::Avg, ReduceOp::Sum, ReduceOp::Scaled(0.25 + world.rank() as f64)] {
            let mut exchange = small::<T>().reduce(reduce).norm(true).build_in(&world, &SIZES)?;
            for turn in 0..3 {
                for gradient in (0..SIZES.len()).rev() {
                    let from = dev.upload(&numbers(gradient))?;
                    if gradient == turn + 2 {
                        exchange.ready_from(dev, gradient, from)?;
                        continue;
                    }
                    dev.copy(&from, &mut exchange.grad_mut(gradient)?)?;
                    exchange.ready(dev, gradient)?;
                }
                let norm = dev.download(&exchange.finish(dev)?.norm().expect("asked for"))?;
                norms.extend_from_slice(bytemuck::cast_slice::<_, u8>(&norm));
                for gradient in 0..SIZES.len() {
                    let mut x = dev.upload(&numbers(gradient))?;
                    world.all_reduce(&mut x, reduce)?;
                    let (x, y) = (dev.download(&x)?, dev.download(&exchange.grad(gradient)?)?);
                    same &= bytemuck::cast_slice::<T, u8>(&x) == bytemuck::cast_slice::<T, u8>(&y);
                    if gradient == turn + 2 {
                        exchange.take(gradient)?;
                    }
                }
            }
        }
        Ok((same, norms))
    });
    assert!(found.iter().all(|(same, norms)| *same && *norms == found[0].1));
}

#[test]
fn gradients_have_the_bits_of_all_reduce() {
    for shape in SHAPES {
        let hosts = Hosts::new(shape);
        has_the_bits_of_all_reduce(&hosts, |x| x);
        assert!(hosts.hub.is_empty());
    }
    let hosts = Hosts::new(&[2, 1]);
    has_the_bits_of_all_reduce(&hosts, f64::from);
    has_the_bits_of_all_reduce(&hosts, f16::from_f32);
    has_the_bits_of_all_reduce(&hosts, bf16::from_f32);
}

/// Buckets on another wire use one memory, one after the other; sums of these numbers are exact.
#[test]
fn buckets_share_the_memory_of_their_wire() {
    for (wire, shape) in [(Wire::Bf16, &[2, 2][..]), (Wire::F16, &[1, 2])] {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let mut exchange = small::<f32>().wire(wire).reduce(ReduceOp::Sum).build_in(&world, &SIZES)?;
            let mut right = true;
            for _ in 0..3 {
                for gradient in (0..SIZES.len()).rev() {
                    dev.fill(&mut exchange.grad_mut(gradient)?, (gradient + world.rank()) as f32)?;
                    exchange.ready(dev, gradient)?;
                }
                exchange.finish(dev)?;
                for gradient in 0..SIZES.len() {
                    let sum = (0..n).map(|rank| (gradient + rank) as f32).sum::<f32>();
                    right &= dev.download(&exchange.grad(gradient)?)?.iter().all(|x| *x == sum);
                }
            }
            Ok(right)
        });
        assert!(found.iter().all(|right| *right), "{shape:?}");
    }
}

/// Parts of buckets, and each bucket by itself as soon as it has come.
#[test]
fn scattered_buckets_reach_their_owners() {
    for shape in [&[2, 2][..], &[1, 3], &[1, 1, 1]] {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let exchange = small::<f32>().ready_order(false).scatter(true).reduce(ReduceOp::Sum);
            let mut exchange = exchange.build_in(&world, &[5000, 3000, 9000])?;
            let mut right = exchange.buckets() > 2;
            for _ in 0..2 {
                for gradient in (0..3).rev() {
                    dev.fill(&mut exchange.grad_mut(gradient)?, (gradient + world.rank()) as f32)?;
                    exchange.ready(dev, gradient)?;
                }
                for bucket in 0..exchange.buckets() {
                    let gradient = exchange.finish_bucket(dev, bucket)?[0];
                    let sum = (0..n).map(|rank| (gradient + rank) as f32).sum::<f32>();
                    let part = exchange.part(bucket);
                    let all = dev.download(&exchange.grads_in_bucket(bucket)?)?;
                    right &= all[part].iter().all(|x| *x == sum);
                }
                exchange.finish(dev)?;
            }
            Ok(right)
        });
        assert!(found.iter().all(|right| *right), "{shape:?}");
    }
}

/// Without a look at a clock: no message has gone when all buckets are started and the devices have worked on.
#[test]
fn the_backward_pass_goes_on_while_buckets_travel() {
    for shape in [&[1, 1][..], &[2, 2], &[1, 2, 1]] {
        let hosts = Hosts::new(shape);
        let gate = held_back(&hosts);
        let done = Mutex::new(0);
        let found = hosts.all(|dev| {
            let mut exchange = build(dev)?;
            for gradient in (0..SIZES.len()).rev() {
                write(dev, &mut exchange, gradient)?;
                exchange.ready(dev, gradient)?;
                // The host may wait for its device, and not for the others.
                dev.synchronize()?;
            }
            let mut local = dev.upload(&[1.0f32])?;
            dev.all_reduce(&mut local, ReduceOp::Sum)?;
            let local = dev.download(&local)?[0] as usize == dev.count();
            let mut done = done.lock();
            *done += 1;
            if *done == shape.iter().sum::<usize>() {
                gate.open();
            }
            drop(done);
            exchange.finish(dev)?;
            Ok(local && has_bits(dev, &exchange)?)
        });
        assert!(found.iter().all(|right| *right), "{shape:?}");
        works(&hosts);
    }
}

/// The last process begins only when all others have started all buckets, and told it so. If a bucket met the other
/// processes before `ready` returns, nobody would get on.
#[test]
fn no_bucket_waits_for_another_process() {
    for shape in [&[1, 1][..], &[2, 1], &[1, 1, 1]] {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let (mut exchange, last) = (build(dev)?, world.rank() == n - 1);
            for other in (0..n - 1).filter(|_| last) {
                world.take::<u32>(other, 7)?;
            }
            for gradient in (0..SIZES.len()).rev() {
                write(dev, &mut exchange, gradient)?;
                exchange.ready(dev, gradient)?;
            }
            if !last {
                world.give(1u32, n - 1, 7)?;
            }
            // Other collectives of the group go on as well.
            let mut x = dev.upload(&[world.rank() as f32])?;
            world.all_reduce(&mut x, ReduceOp::Max)?;
            exchange.finish(dev)?;
            Ok(dev.download(&x)? == [n as f32 - 1.0] && has_bits(dev, &exchange)?)
        });
        assert!(found.iter().all(|right| *right), "{shape:?}");
    }
}

/// The scope ends when its buckets have been carried; they land in the next one.
#[test]
fn a_step_may_end_in_a_later_scope() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.each(|_, pool| {
        let mut state = pool.per_device(|dev, _| build(dev))?;
        let mut right = true;
        for _ in 0..2 {
            state.run(|dev, _, exchange| {
                for gradient in (0..SIZES.len()).rev() {
                    write(dev, exchange, gradient)?;
                    exchange.ready(dev, gradient)?;
                }
                Ok(())
            })?;
            let same = state.run(|dev, _, exchange| {
                exchange.finish(dev)?;
                has_bits(dev, exchange)
            })?;
            right &= same.iter().all(|same| *same);
        }
        Ok::<_, Error>(right)
    });
    assert!(found.into_iter().all(Result::unwrap));
}

/// An exchange that is dropped in mid-step, or reset: its proxies do their part, and nothing is left.
#[test]
fn a_dropped_exchange_leaves_no_message() {
    for reset in [false, true] {
        let hosts = Hosts::new(&[2, 2]);
        let gate = held_back(&hosts);
        let found = hosts.all(|dev| {
            let mut exchange = build(dev)?;
            for gradient in (2..SIZES.len()).rev() {
                write(dev, &mut exchange, gradient)?;
                exchange.ready(dev, gradient)?;
            }
            if reset {
                exchange.reset(dev)?;
                gate.open();
                return step(dev, &mut exchange);
            }
            drop(exchange);
            gate.open();
            Ok(true)
        });
        assert!(found.iter().all(|right| *right));
        works(&hosts);
    }
}

#[test]
fn the_race_checker_is_content() {
    let hosts = Hosts::with(&[2, 2], |builder| builder.check(Check::Races));
    works(&hosts);
}
