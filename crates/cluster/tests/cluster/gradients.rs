//! Buckets of gradients between processes: the bits of all_reduce, and no process waits for another one before the end
//! of its backward pass.

use crate::fleet::{Fleet, pool, say};
use gpu_pool::{
    Builder, Device, Error, GpuPool, ReduceOp,
    gradients::{Gradient, GradientExchange},
};
use half::{bf16, f16};

/// Elements of each gradient: some buckets have several, and the last one goes in pieces.
const SIZES: [usize; 7] = [1, 777, 30, 4001, 5, 2048, 530_001];

pub fn exchange<T: Gradient>(dev: &Device, reduce: ReduceOp) -> Result<GradientExchange<T>, Error> {
    let exchange = GradientExchange::builder().of::<T>().first_bucket_bytes(64).bucket_bytes(20_000);
    exchange.reduce(reduce).build_in(&dev.world()?, &SIZES)
}

fn numbers(rank: usize, gradient: usize) -> impl Iterator<Item = f32> {
    (0..SIZES[gradient]).map(move |i| ((i * 7 + rank * 13 + gradient) % 1021) as f32 / 3.0 - 100.0)
}

/// The backward pass.
pub fn pass<T: Gradient>(dev: &Device, exchange: &mut GradientExchange<T>, of: impl Fn(f32) -> T) -> Result<(), Error> {
    let rank = dev.world()?.rank();
    for gradient in (0..SIZES.len()).rev() {
        let from = dev.upload(&numbers(rank, gradient).map(&of).collect::<Vec<_>>())?;
        dev.copy(&from, &mut exchange.grad_mut(gradient)?)?;
        exchange.ready(dev, gradient)?;
    }
    Ok(())
}

/// Two steps. Whether all gradients have the bits of all_reduce.
fn same<T: Gradient>(dev: &Device, reduce: ReduceOp, of: impl Fn(f32) -> T) -> Result<bool, Error> {
    let (world, mut exchange, mut same) = (dev.world()?, exchange::<T>(dev, reduce)?, true);
    for _ in 0..2 {
        pass(dev, &mut exchange, &of)?;
        exchange.finish(dev)?;
        // On a busy machine all of this takes longer than a test waits for a word.
        say("on its way");
    }
    for gradient in 0..SIZES.len() {
        let mut x = dev.upload(&numbers(world.rank(), gradient).map(&of).collect::<Vec<_>>())?;
        world.all_reduce(&mut x, reduce)?;
        let (x, y) = (dev.download(&x)?, dev.download(&exchange.grad(gradient)?)?);
        same &= bytemuck::cast_slice::<T, u8>(&x) == bytemuck::cast_slice::<T, u8>(&y);
    }
    Ok(same)
}

/// The last device of all begins its pass when all others have ended theirs, but for `finish`, and told it so. If a
/// bucket met the other processes before `ready` returns, nobody would get on.
fn overlaps(dev: &Device) -> Result<bool, Error> {
    let (world, mut exchange) = (dev.world()?, exchange::<f32>(dev, ReduceOp::Sum)?);
    let (host, device) = world.place(world.rank());
    // Members of a process wait for each other inside it.
    let last = world.place(world.count() - 1).0;
    let others = (0..world.count()).filter(|&rank| world.place(rank).0 != last);
    if host == last {
        for other in others {
            if device == 0 {
                world.take::<u32>(other, 7)?;
            }
        }
    }
    pass(dev, &mut exchange, |x| x)?;
    if host != last {
        let first = (0..world.count()).find(|&rank| world.place(rank) == (last, 0));
        world.give(1u32, first.expect("a process has a device"), 7)?;
    }
    // Meanwhile other collectives of the group go on, too.
    let mut x = dev.upload(&[1.0f32])?;
    world.all_reduce(&mut x, ReduceOp::Sum)?;
    exchange.finish(dev)?;
    Ok(dev.download(&x)? == [world.count() as f32])
}

pub fn child(builder: Builder) -> Result<(), Error> {
    let pool: GpuPool = pool(builder)?;
    let found = pool.run(|dev, _| {
        let own = 0.25 + dev.world()?.rank() as f64;
        Ok([
            same(dev, ReduceOp::Avg, |x| x)?,
            same(dev, ReduceOp::Scaled(own), f64::from)?,
            same(dev, ReduceOp::Sum, f16::from_f32)?,
            same(dev, ReduceOp::Avg, bf16::from_f32)?,
            overlaps(dev)?,
        ])
    })?;
    let right = found.iter().flatten().all(|right| *right);
    say(format!("gradients {right}"));
    pool.close()?;
    match right {
        true => Ok(()),
        false => Err(Error::custom(format!("{found:?}"))),
    }
}

#[test]
fn buckets_travel_beside_the_backward_pass() {
    for shape in [&[1, 1][..], &[2, 2], &[1, 2, 3]] {
        for said in Fleet::start("gradients", shape).said() {
            assert_eq!(said.last().map(|line| &line[..]), Some("gradients true"), "{shape:?}");
        }
    }
}
