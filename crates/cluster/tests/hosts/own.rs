//! Which sums go by own kernels between processes, as all members choose alike and `explain` tells. Software GPUs have
//! pads, but no kernels that wait: their launch fails, and ends the transport for all.

use crate::loopback::Hosts;
use gpu_pool::{DType, Device, Error, Group, ReduceOp, Result, extend::cluster::collective::LonePad};
use std::os::fd::AsFd;

/// Processes with one device each, and with pads.
fn with_pads(count: usize) -> Hosts {
    let hosts = Hosts::on_devices(&vec![1; count]);
    let driver = |host: usize| hosts.mails[host].drivers.lock()[0].clone();
    let made = (0..count).map(|host| LonePad::new(&driver(host), host, count).unwrap());
    let (mut pads, memory): (Vec<_>, Vec<_>) = made.unzip();
    for (host, pad) in pads.iter_mut().enumerate() {
        let others = (0..count).filter(|other| *other != host);
        others.for_each(|other| pad.import(other, memory[other].as_fd()).unwrap());
        pad.lay_out(8).unwrap();
    }
    for (mail, pad) in hosts.mails.iter().zip(pads) {
        assert!(mail.pad.set(Ok(pad)).is_ok());
    }
    hosts
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
