//! A process of a cluster with a real pool: collectives, groups and messages between any of its GPUs.

use crate::{Cluster, TransportChoice, prelude::*};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, GpuPool, ReduceOp, Result};
use gpu_pool_lab::{Check, prelude::*};
use std::{net::TcpListener, time::Duration};

/// A port that is free now.
pub(super) fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap().port()
}

/// Numbers whose sums are exact in any order.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 64) as f32 - 20.0).collect()
}

/// `beside`: large collectives are cut, and rails run beside the steps inside, though the devices share a GPU. With a
/// hardware queue for each stream that works there, too.
pub(super) fn of_a_process(
    port: u16,
    host: usize,
    devices: &[usize],
    gpu: usize,
    beside: bool,
    connect_timeout: Duration,
) {
    let cluster = Cluster::tcp(&format!("127.0.0.1:{port}"), host, devices.len(), "a secret of a test").unwrap();
    let cluster = cluster.transport(TransportChoice::Nccl).connect_timeout(connect_timeout);
    let own = vec![gpu; devices[host]];
    let builder = GpuPool::builder().cuda().devices(&own).share_gpus(true).check(Check::Off).timeout(connect_timeout);
    crate::connect::FORCED.set(beside);
    let pool = builder.cluster(cluster).build().unwrap();
    for round in 0..3 {
        pool.run(|dev, _| [0, 1, 1000, 300_001].into_iter().try_for_each(|len| collectives(dev, len + round))).unwrap();
        pool.run(messages).unwrap();
    }
    // The first and the last device: of other ordinals, if the hosts have several.
    let last = devices.iter().sum::<usize>() - 1;
    let crossed = |dev: &Device| -> Result<()> {
        let world = dev.world()?;
        if ![0, last].contains(&world.rank()) {
            return Ok(());
        }
        let group = world.group(&[last, 0])?;
        let mut x = dev.upload(&numbers(group.rank(), 70_001))?;
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        let sum: Vec<f32> = numbers(0, 70_001).iter().zip(numbers(1, 70_001)).map(|(a, b)| a + b).collect();
        assert!(dev.download(&x)? == sum);
        let (from, mut swapped) = (dev.upload(&numbers(group.rank(), 600))?, dev.zeros(600)?);
        group.all_to_all(&from, &mut swapped)?;
        let part = |rank: usize| numbers(rank, 600)[group.rank() * 300..(group.rank() + 1) * 300].to_vec();
        assert!(dev.download(&swapped)? == [part(0), part(1)].concat());
        Ok(())
    };
    pool.run(|dev, _| crossed(dev)).unwrap();
    pool.run(|dev, _| registered(dev, devices)).unwrap();
    pool.run(|dev, _| pieces(dev, beside)).unwrap();
    pool.close().unwrap();
}

fn collectives(dev: &Device, len: usize) -> Result<()> {
    let world = dev.world()?;
    let (me, n) = (world.rank(), world.count());
    let sum: Vec<f32> = (0..len).map(|i| (0..n).map(|rank| ((i * 7 + rank * 13) % 64) as f32 - 20.0).sum()).collect();
    let mut x = dev.upload(&numbers(me, len))?;
    world.all_reduce(&mut x, ReduceOp::Sum)?;
    assert!(dev.download(&x)? == sum, "all_reduce of {len}");
    let mut mean = dev.upload(&vec![half::bf16::from_f32(me as f32); len])?;
    world.all_reduce(&mut mean, ReduceOp::Max)?;
    assert!(dev.download(&mean)? == vec![half::bf16::from_f32((n - 1) as f32); len], "max of {len}");
    let (own, mut all) = (dev.upload(&numbers(me, len))?, dev.zeros(n * len)?);
    world.all_gather(&own, &mut all)?;
    assert!(dev.download(&all)? == (0..n).flat_map(|rank| numbers(rank, len)).collect::<Vec<_>>());
    let (from, mut swapped) = (dev.upload(&numbers(me, n * len))?, dev.zeros(n * len)?);
    world.all_to_all(&from, &mut swapped)?;
    let part = |rank: usize| numbers(rank, n * len)[me * len..(me + 1) * len].to_vec();
    assert!(dev.download(&swapped)? == (0..n).flat_map(part).collect::<Vec<_>>(), "all_to_all of {len}");
    let mut gathered = dev.zeros(n * 3)?;
    world.gather(&dev.upload(&numbers(me, 3))?, (me == 1).then(|| gathered.view_mut()), 1)?;
    let wanted: Vec<f32> = (0..n).flat_map(|rank| if me == 1 { numbers(rank, 3) } else { vec![0.0; 3] }).collect();
    assert_eq!(dev.download(&gathered)?, wanted);
    let (whole, mut mine) = (dev.upload(&numbers(9, 2 * n))?, dev.zeros(2)?);
    world.scatter((me == 0).then(|| whole.view()), &mut mine, 0)?;
    assert_eq!(dev.download(&mine)?, numbers(9, 2 * n)[2 * me..2 * me + 2]);
    Ok(())
}

/// Large buffers, with and without a rest.
fn pieces(dev: &Device, beside: bool) -> Result<()> {
    for len in [5 << 20, 13_000_001] {
        let world = dev.world()?;
        let how = world.explain(gpu_pool::DType::F32, ReduceOp::Sum, len * 4)?.rails.unwrap();
        let here = (0..world.count()).filter(|&rank| world.place(rank).0 == world.place(world.rank()).0).count() > 1;
        println!("{} pieces of {len}, overlapped: {}", how.pieces, how.overlap);
        assert_eq!((how.pieces > 1, how.overlap), (beside && world.count() > 2, beside && here), "{len}");
        // Once: the sums of the host take seconds without optimisation.
        collectives(dev, len)?;
    }
    Ok(())
}

/// NCCL works in memory that it knows.
fn registered(dev: &Device, devices: &[usize]) -> Result<()> {
    let world = dev.world()?;
    let (me, n) = (world.rank(), world.count());
    for len in [1, 70_001, 9_000_000] {
        let mut x = dev.exportable::<f32>(len)?;
        let registered = world.register(&x)?;
        assert_eq!(registered.library(), devices.iter().all(|&count| count == 1).then_some("nccl"));
        for round in 0..3 {
            dev.upload_into(&numbers(me + round, len), &mut x)?;
            world.all_reduce(&mut x, ReduceOp::Sum)?;
            let sum = (0..len).map(|i| (0..n).map(|rank| ((i * 7 + (rank + round) * 13) % 64) as f32 - 20.0).sum());
            assert!(dev.download(&x)? == sum.collect::<Vec<f32>>(), "registered, {len}");
        }
        // Some memory that is not.
        drop(registered);
        dev.upload_into(&numbers(me, len), &mut x)?;
        world.all_reduce(&mut x, ReduceOp::Max)?;
        assert!(dev.download(&x)?.iter().zip(numbers(me, len)).all(|(max, own)| *max >= own));
    }
    Ok(())
}

/// Each member sends to each other one before it receives.
fn messages(dev: &Device, _: gpu_pool::Shard) -> Result<()> {
    let world = dev.world()?;
    let (me, n) = (world.rank(), world.count());
    let others = || (1..n).map(|k| (me + k) % n);
    for len in [0, 1, 1000, 2_000_003] {
        for to in others() {
            world.send(&dev.upload(&numbers(me * n + to, len))?, to)?;
        }
        for from in others().collect::<Vec<_>>().into_iter().rev() {
            let mut x = dev.zeros::<f32>(len)?;
            world.recv(&mut x, from)?;
            assert!(dev.download(&x)? == numbers(from * n + me, len), "{len} from {from} to {me}");
        }
    }
    others().try_for_each(|to| world.send_owned(dev.upload(&vec![me as u8; 1 + to])?, to))?;
    for from in others() {
        let any: DeviceBuffer<u8> = world.recv_any(from)?;
        assert_eq!(dev.download(&any)?, vec![from as u8; 1 + me]);
    }
    Ok(())
}
