//! Memory that is registered with a transport between devices (`loopback`).

use super::internals::*;
use super::{numbers, sums};
use crate::loopback::Hosts;
use gpu_pool::{AsView, DeviceBuffer, Error, ReduceOp, gradients::GradientExchange};

fn of(dev: &gpu_pool::Device, elements: &[f32]) -> gpu_pool::Result<DeviceBuffer<f32>> {
    let mut buffer = dev.zeros_dedicated(elements.len())?;
    dev.upload_into(elements, &mut buffer)?;
    Ok(buffer)
}

#[test]
fn rails_work_in_registered_memory_while_it_is() {
    let hosts = Hosts::on_devices(&[1, 1, 1]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let mut x = of(dev, &numbers(me, 1000))?;
        let registered = world.register(&x)?;
        assert_eq!(
            (registered.library(), world.register(&x)?.library()),
            (Some("loopback between devices"), registered.library())
        );
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        // In parts, by another path, and as the place for what others send.
        world.all_reduce(&mut x.slice_mut(100..200), ReduceOp::Max)?;
        let mut y = of(dev, &[0.0; 1000])?;
        let other = world.register(&y)?;
        world.all_reduce_into(&x, &mut y, ReduceOp::Sum)?;
        let mut swapped = of(dev, &[0.0; 3])?;
        let third = world.register(&swapped)?;
        world.all_to_all(&dev.upload(&numbers(me, 3))?, &mut swapped)?;
        let found = [dev.download(&x)?, dev.download(&y)?, dev.download(&swapped)?];
        drop((registered, other, third));
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        Ok((found, dev.download(&x)?))
    });
    let sum = sums(3, 1000);
    let tripled: Vec<f32> = sum.iter().map(|x| x * 3.0).collect();
    for (me, (first, last)) in found.into_iter().enumerate() {
        let swapped = (0..3).map(|from| numbers(from, 3)[me]).collect();
        assert!(first == [sum.clone(), tripled.clone(), swapped] && last == tripled, "{me}");
    }
    assert!(hosts.mails.iter().all(|mail| mail.registered.lock().is_empty()));
}

/// Other members may have registered theirs elsewhere, or not.
#[test]
fn only_sums_to_all_work_in_registered_memory() {
    let hosts = Hosts::on_devices(&[1, 1, 1]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        let (mut x, mut y) = (of(dev, &numbers(me, 3000))?, of(dev, &[0.0; 1000])?);
        let _registered = (me != 1).then(|| [world.register(&x), world.register(&y)]);
        world.reduce_scatter(&x, &mut y, ReduceOp::Sum)?;
        world.all_gather(&y, &mut x)?;
        world.broadcast(&mut y, 1)?;
        Ok((dev.download(&x)?, dev.download(&y)?))
    });
    let sum = sums(3, 3000);
    assert!(found.iter().all(|(x, y)| *x == sum && *y == sum[1000..2000]));
}

/// In NCCL it is undefined.
#[test]
fn memory_that_some_have_registered_is_a_mismatch() {
    let hosts = Hosts::on_devices(&[1, 1]);
    for (mine, theirs) in [(Some(0), None), (Some(0), Some(8))] {
        let found = hosts.run(|dev| {
            let world = dev.world()?;
            let mut x = of(dev, &numbers(world.rank(), 100))?;
            let from = [mine, theirs][world.rank()];
            let _registered = from.map(|_| world.register(&x)).transpose()?;
            let at = from.unwrap_or(0);
            world.all_reduce(&mut x.slice_mut(at..at + 50), ReduceOp::Sum)
        });
        for found in found {
            let Err(error @ Error::WorldMismatch { .. }) = found else { panic!("{found:?}") };
            assert!(error.to_string().contains("in registered memory, from byte 0"), "{error}");
        }
    }
    assert!(hosts.mails.iter().all(|mail| mail.registered.lock().is_empty()));
}

#[test]
fn what_cannot_gain_is_not_registered() {
    for hosts in [Hosts::on_devices(&[2, 1]), Hosts::new(&[1, 1])] {
        hosts.all(|dev| {
            let world = dev.world()?;
            let x = of(dev, &[1.0])?;
            assert_eq!(world.register(&x)?.library(), None);
            Ok(())
        });
    }
    Hosts::on_devices(&[1, 1]).all(|dev| {
        let world = dev.world()?;
        // Of the pool: other buffers are in the same pages.
        assert!(matches!(world.register(&dev.zeros::<f32>(1 << 20)?), Err(Error::InvalidArgument { .. })));
        // The buffer may go first, and then its memory stays.
        let x = of(dev, &[1.0])?;
        let (at, registered) = (x.view().address(), world.register(&x)?);
        drop(x);
        let y = of(dev, &[1.0])?;
        assert_ne!(y.view().address(), at);
        drop(registered);
        Ok(())
    });
}

#[test]
fn buckets_are_registered_on_request() {
    let train = |register| {
        let hosts = Hosts::on_devices_with(&[1, 1], |builder| builder.register_buckets(register));
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let mut gradients =
                GradientExchange::builder().reduce(ReduceOp::Sum).first_bucket_bytes(64).bucket_bytes(64);
            gradients = gradients.norm(true);
            let mut gradients = gradients.build_in(&world, &[20, 30, 10])?;
            for _ in 0..3 {
                for gradient in [1, 2, 0] {
                    let len = gradients.grad(gradient)?.len();
                    dev.upload_into(&numbers(world.rank() + gradient, len), &mut gradients.grad_mut(gradient)?)?;
                    gradients.ready(dev, gradient)?;
                }
                gradients.finish(dev)?;
            }
            let counts = hosts.mails[world.rank()].registered.lock().len();
            assert_eq!(counts, if register { gradients.buckets() } else { 0 });
            (0..3).map(|gradient| dev.download(&gradients.grad(gradient)?)).collect::<gpu_pool::Result<Vec<_>>>()
        });
        assert!(hosts.mails.iter().all(|mail| mail.registered.lock().is_empty()));
        found
    };
    assert_eq!(train(true), train(false));
}
