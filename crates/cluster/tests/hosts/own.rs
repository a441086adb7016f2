//! Which sums go by own kernels between processes, as all members choose alike and `explain` tells. Software GPUs have
//! pads, but no kernels that wait: their launch fails, and ends the transport for all.

use crate::loopback::Hosts;
use gpu_pool::{
    DType, Device, DeviceBuffer, Error, Group, ReduceOp, Result,
    extend::train::{Call, GroupInternals},
};
use gpu_pool_lab::{Topology, prelude::*};
use std::sync::atomic::{AtomicUsize, Ordering};

fn with_pads(count: usize) -> Hosts {
    Hosts::with_pads(count, |builder| builder)
}

/// Transport and words of `explain`.
fn way(group: &Group<'_>, dtype: DType, op: ReduceOp, bytes: usize) -> Result<(String, String)> {
    let rails = group.explain(dtype, op, bytes)?.rails.expect("several processes");
    Ok((rails.transport.to_owned(), rails.sums))
}

/// Every process has this way.
fn all_have(hosts: &Hosts, of: (DType, ReduceOp, usize), group: fn(&Device) -> Result<Group<'_>>, words: [&str; 2]) {
    for (transport, sums) in hosts.all(|dev| way(&group(dev)?, of.0, of.1, of.2)) {
        assert_eq!([&*transport, &*sums], words, "{of:?}");
    }
}

const OWN: [&str; 2] = ["inbox", "by own kernels between the GPUs, in the order of ranks"];

#[test]
fn small_sums_of_floats_go_by_own_kernels() {
    use {DType::*, ReduceOp::*};
    let hosts = with_pads(2);
    for dtype in [F32, F64, F16, BF16] {
        for op in [Sum, Avg, Max, Min, Prod, Scaled(0.5)] {
            for bytes in [0, 8, 4096, 2 << 20] {
                all_have(&hosts, (dtype, op, bytes), |dev| dev.world(), OWN);
            }
        }
    }
    let over = "loopback between devices";
    let large = "by the transport, in the members' own memory; not by own kernels: they take up to 2097152 bytes";
    all_have(&hosts, (F32, Sum, (2 << 20) + 4), |dev| dev.world(), [over, large]);
    let others = "by kernels, in the order of processes; not by own kernels: they add up floats";
    all_have(&hosts, (I32, Sum, 8), |dev| dev.world(), [over, others]);
}

/// The room is that of the cluster's size, the limit that of the group's.
#[test]
fn groups_have_a_limit_of_their_own() {
    let hosts = with_pads(3);
    let pair = |dev: &Device| {
        let world = dev.world()?;
        let ranks: &[usize] = if world.rank() == 1 { &[1, 0, 2] } else { &[2, 0] };
        let group = world.group(ranks)?;
        Ok::<_, Error>([864_000, 864_004, 1 << 20, (1 << 20) + 4].map(|bytes| {
            way(&group, DType::F32, ReduceOp::Sum, bytes).map(|(transport, _)| transport == "inbox").unwrap()
        }))
    };
    let (two, three) = ([true, true, true, false], [true, false, false, false]);
    assert_eq!(hosts.all(pair), [two, three, two]);
}

#[test]
fn the_reason_against_own_kernels_is_told() {
    let hosts = Hosts::on_devices(&[1, 1]);
    for mail in &hosts.mails {
        assert!(mail.pad.set(Err("process 1: the GPU has no virtual memory management".to_owned())).is_ok());
    }
    let sums = "by the transport, in the members' own memory; not by own kernels: process 1: the GPU has no virtual \
                memory management";
    all_have(&hosts, (DType::F32, ReduceOp::Sum, 8), |dev| dev.world(), ["loopback between devices", sums]);
    // Which is what happens.
    hosts.all(|dev| {
        let mut x = dev.upload(&[1.0f32; 2])?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
        assert_eq!(dev.download(&x)?, [2.0; 2]);
        Ok(())
    });
    assert!(hosts.mails.iter().all(|mail| mail.calls.lock().len() == 1));
}

/// Nothing is to be launched for no elements; a launch that fails has broken the transport.
#[test]
fn a_launch_that_fails_ends_the_transport() {
    let hosts = with_pads(2);
    hosts.all(|dev| dev.world()?.all_reduce(&mut dev.zeros::<f32>(0)?, ReduceOp::Sum));
    assert!(hosts.mails.iter().all(|mail| mail.failure.cause().is_none()));
    let found = hosts.run(|dev| dev.world()?.all_reduce(&mut dev.zeros::<f32>(8)?, ReduceOp::Sum));
    assert!(found.iter().all(Result::is_err), "{found:?}");
    assert!(hosts.mails.iter().any(|mail| mail.failure.cause().is_some()));
    assert!(hosts.mails.iter().all(|mail| mail.calls.lock().is_empty()));
}

fn lend(group: &Group<'_>, len: usize) -> Result<Option<Vec<DeviceBuffer<f32>>>> {
    GroupInternals::lend(group, &Call::new("test"), len)
}

/// Each member writes its memory, and all read it; also after its owner has dropped it.
#[test]
fn lent_memory_is_common_to_all_members() {
    let hosts = with_pads(3);
    hosts.all(|dev| {
        let world = dev.world()?;
        let groups = [Some(dev.world()?), if world.rank() == 1 { None } else { Some(world.group(&[2, 0])?) }];
        for group in groups.iter().flatten() {
            let mut lent = lend(group, 5000)?.expect("all have pads");
            dev.fill(&mut lent[group.rank()], 1.0 + group.rank() as f32)?;
            dev.synchronize()?;
            group.barrier()?;
            if group.rank() == 1 {
                drop(lent.remove(1));
            }
            for (k, memory) in lent.iter().enumerate() {
                let of = if group.rank() == 1 && k > 0 { k + 1 } else { k };
                assert_eq!(dev.download(memory)?, vec![1.0 + of as f32; 5000]);
            }
        }
        Ok(())
    });
    assert!(hosts.mails.iter().all(|mail| mail.calls.lock().is_empty()));
}

/// Without pads there is none. Where one process lacks the memory, no process gets any, and all go on.
#[test]
fn memory_is_lent_by_all_members_or_by_none() {
    let hosts = Hosts::on_devices(&[1, 1]);
    assert!(hosts.all(|dev| Ok(lend(&dev.world()?, 8)?.is_none())).into_iter().all(|none| none));
    let host = AtomicUsize::new(0);
    let hosts = Hosts::with_pads(2, |builder| match host.fetch_add(1, Ordering::Relaxed) {
        0 => builder,
        _ => builder.topology(Topology::nvswitch(1).with_devices(|_, device| device.memory = 64 << 20)),
    });
    for (len, some) in [(1000, true), (32 << 20, false), (1000, true)] {
        assert_eq!(hosts.all(|dev| Ok(lend(&dev.world()?, len)?.is_some())), [some; 2], "{len}");
    }
}

/// Memory that was dropped is there again, also within the scope.
#[test]
fn lent_memory_comes_back() {
    let hosts = Hosts::with_pads(2, |builder| {
        builder.topology(Topology::nvswitch(1).with_devices(|_, device| device.memory = 64 << 20))
    });
    hosts.all(|dev| {
        let world = dev.world()?;
        for _ in 0..3 {
            let mut lent = lend(&world, 10 << 20)?.expect("there is room for one");
            dev.fill(&mut lent[world.rank()], 1.0)?;
            drop(lent);
            dev.synchronize()?;
            world.barrier()?;
        }
        Ok(())
    });
}
