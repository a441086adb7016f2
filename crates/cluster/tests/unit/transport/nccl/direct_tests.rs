//! Collectives of two processes with one device each, over the fake library of [`fake_tests`](super): one
//! call in the members' own memory, at every size. The fake moves nothing, so what changes was copied by this crate.

use super::*;
use crate::traits::Transport;
use gpu_pool::{AsView, Device};
use loopback::Hosts;

#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../../../support/loopback/mod.rs"]
mod loopback;

/// The first byte of the communicators' id.
pub(super) const ID: u8 = 41;

/// From one element of each member to some pieces.
const LENS: [usize; 5] = [1, 1000, 256 << 10, (1 << 20) + 1, 5 << 20];

fn connected(host: usize) -> Arc<Nccl> {
    let mut nccl = Nccl::with(&LIBRARY, host, &[1, 1], Arc::new(|| None), LONG).unwrap();
    nccl.overlap(MOST_BLOCKS);
    let mut id = vec![0; UniqueId::BYTES];
    id[0] = ID;
    let keys = Keys { set: &|_, _| Ok(()), get: &|_| Ok(id.clone()) };
    nccl.connect_rail(0, &host::machine(&[host::HostConfig::default()])[0], &keys).unwrap();
    Arc::new(nccl)
}

/// Runs `call`, which must be one call of the library with this name, memory and count, and takes no memory.
#[track_caller]
fn is_one(
    dev: &Device,
    name: &'static str,
    memory: (u64, u64, usize),
    call: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let before = dev.stats().allocations;
    call()?;
    let mut plan = made(ID)[dev.world()?.rank()].plan.lock();
    assert_eq!(std::mem::take(&mut plan.calls), [name]);
    assert_eq!(std::mem::take(&mut plan.memory), [(memory.0 as usize, memory.1 as usize, memory.2)]);
    assert_eq!(dev.stats().allocations, before, "{name} takes scratch");
    Ok(())
}

#[test]
fn one_call_works_in_the_members_memory_at_every_size() {
    let hosts = Hosts::over(&[1, 1], |builder| builder, |_, host| (Transport::Device(connected(host)), None));
    made(ID).iter().for_each(|fake| *fake.plan.lock() = Default::default());
    hosts.all(|dev| {
        let world = dev.world()?;
        let me = world.rank();
        for len in LENS {
            let all: Vec<f32> = (0..2 * len).map(|i| (i + me) as f32).collect();
            let (mut x, mut own) = (dev.upload(&all)?, dev.upload(&all[..len])?);
            let mut into = dev.zeros::<f32>(2 * len)?;
            let (at, part, to) = (x.view().address(), own.view().address(), into.view().address());
            let mine = at + (me * len * 4) as u64;
            let (whole, bytes) = (2 * len, len * 4);
            let sum = ReduceOp::Sum;
            is_one(dev, "all_reduce", (at, at, whole), || world.all_reduce(&mut x, sum))?;
            is_one(dev, "all_reduce", (at, to, whole), || world.all_reduce_into(&x, &mut into, sum))?;
            is_one(dev, "broadcast", (at, at, 2 * bytes), || world.broadcast(&mut x, 1))?;
            is_one(dev, "all_gather", (mine, at, bytes), || world.all_gather_in_place(&mut x))?;
            is_one(dev, "all_gather", (part, at, bytes), || world.all_gather(&own, &mut x))?;
            is_one(dev, "reduce_scatter", (at, mine, len), || world.reduce_scatter_in_place(&mut x, sum))?;
            is_one(dev, "reduce_scatter", (at, part, len), || world.reduce_scatter(&x, &mut own, sum))?;
            // A part of a buffer is one, too.
            let half = at + bytes as u64;
            is_one(dev, "all_reduce", (half, half, len), || world.all_reduce(&mut x.slice_mut(len..), sum))?;
            let same = dev.download(&x)? == all && dev.download(&own)? == all[..len];
            assert!(same && dev.download(&into)? == vec![0.0; whole], "{len}: something was copied");
        }
        Ok(())
    });
}
