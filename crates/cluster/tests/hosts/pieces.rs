//! Large buffers, which go in pieces: the same elements and bits as in one piece, and no message is left or missing
//! when something fails between pieces. What a call is said to do. Small buffers together.

use super::internals::*;
use super::{part, sums};
use crate::loopback::Hosts;
use gpu_pool::{DType, Error, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use parking_lot::Mutex;
use std::cell::Cell;

/// Bytes of a slice that just do not fit into two pieces of it.
const MORE_THAN_TWO: usize = 2 * gpu_pool_cluster::extend::PIECE + 4;

fn some(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 1021) as f32 / 3.0 - 100.0).collect()
}

#[test]
fn pieces_have_the_bits_of_the_whole() {
    for shape in [&[2, 2][..], &[2, 3], &[1, 1, 1]] {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        let rails = *shape.iter().min().unwrap();
        let len = rails * MORE_THAN_TWO / 4 + 3;
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let mut large = dev.upload(&some(world.rank(), len))?;
            world.all_reduce(&mut large, ReduceOp::Avg)?;
            let mut small = dev.upload(&some(world.rank(), len))?;
            let each = len.div_ceil(7);
            for k in 0..7 {
                let range = k * each..((k + 1) * each).min(len);
                world.all_reduce(&mut small.slice_mut(range), ReduceOp::Avg)?;
            }
            let same = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits());
            let how = world.explain(DType::F32, ReduceOp::Avg, len * 4)?.rails.unwrap();
            Ok((same(dev.download(&large)?, dev.download(&small)?), how.pieces))
        });
        assert_eq!(found, vec![(true, 3); n], "{shape:?}");
    }
}

#[test]
fn parts_of_large_buffers_reach_their_owners_and_everybody() {
    for shape in [&[2, 2][..], &[2, 1]] {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum::<usize>());
        // Parts that begin and end within pieces, and one that is empty.
        let mut counts: Vec<usize> = (0..n).map(|k| MORE_THAN_TWO / 4 * k / n + 5).collect();
        counts[1] = 0;
        let (counts, total) = (&counts[..], counts.iter().sum::<usize>());
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let me = world.rank();
            let (source, mut own) = (dev.upload(&super::numbers(me, total))?, dev.zeros(counts[me])?);
            world.reduce_scatter_v(&source, &mut own, counts, ReduceOp::Sum)?;
            let right = dev.download(&own)? == sums(n, total)[part(counts, me)];
            let mut all = dev.zeros(total)?;
            world.all_gather_v(&own, &mut all, counts)?;
            let mut told = dev.upload(&super::numbers(me, total))?;
            world.broadcast(&mut told, n - 1)?;
            let mut reduced = dev.upload(&super::numbers(me, total))?;
            world.reduce(&mut reduced, ReduceOp::Sum, 0)?;
            let reduced = dev.download(&reduced)? == if me == 0 { sums(n, total) } else { super::numbers(me, total) };
            let told = dev.download(&told)? == super::numbers(n - 1, total);
            Ok([right, dev.download(&all)? == sums(n, total), told, reduced])
        });
        assert_eq!(found, vec![[true; 4]; n], "{shape:?}");
    }
}

/// The gangs fail after the commit: the members give the steps inside up, and no message is left.
#[test]
fn a_failure_between_pieces_keeps_no_message_back() {
    let hosts = Hosts::new(&[2, 2]);
    let exchanges = Mutex::new(0);
    let hub = std::sync::Arc::downgrade(&hosts.hub);
    let tap = move |_| {
        let count = {
            let mut exchanges = exchanges.lock();
            *exchanges += 1;
            *exchanges
        };
        // Each of the four members has four exchanges.
        if count == 6 {
            hub.upgrade().expect("the test has it").abort();
        }
    };
    assert!(hosts.hub.tap.set(Box::new(tap)).is_ok());
    let found = hosts.run(|dev| {
        let mut x = dev.zeros::<f32>(MORE_THAN_TWO / 2)?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)
    });
    assert!(found.iter().all(|found| matches!(found, Err(Error::AbortedByHost { host: 2, .. }))), "{found:?}");
    assert!(hosts.hub.is_empty());
    let again = hosts.all(|dev| {
        let mut x = dev.upload(&[1.0f32])?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    });
    assert_eq!(again, [[4.0]; 4]);
}

/// A device that is lost between pieces: its process goes on with the messages, and nobody hangs.
#[test]
fn a_device_lost_between_pieces_keeps_no_message_back() {
    // Three pieces are summed up by a kernel each, and then each is gathered by one.
    for nth in [4, 5] {
        let plan =
            FaultPlan::new().on(FaultRule::new(Injected::DeviceLost).device(1).op(FaultOp::Launch).nth(nth)).paused();
        let built = Cell::new(0);
        let hosts = Hosts::with(&[2, 2], |builder| {
            built.set(built.get() + 1);
            if built.get() == 2 { builder.faults(plan.clone()) } else { builder }
        });
        let found = hosts.run(|dev| {
            let world = dev.world()?;
            let mut x = dev.zeros::<f32>(MORE_THAN_TWO / 2)?;
            dev.synchronize()?;
            world.barrier()?;
            // By the device that counts alone: it sets the counts to zero.
            if world.rank() == 3 {
                plan.resume();
            }
            world.all_reduce(&mut x, ReduceOp::Sum)
        });
        assert!(!plan.fired().is_empty());
        assert!(matches!(found[0], Err(Error::AbortedByHost { host: 1, .. })), "{:?}", found[0]);
        assert!(matches!(found[1], Err(Error::DeviceLost { device: 1, .. })), "{:?}", found[1]);
        assert!(hosts.hub.is_empty());
    }
}

#[test]
fn a_call_is_explained() {
    let found = Hosts::new(&[2, 3]).all(|dev| {
        let world = dev.world()?;
        let own = dev.world()?.group(if world.rank() < 2 { &[0, 1] } else { &[2, 3, 4] })?;
        let small = world.explain(DType::F32, ReduceOp::Sum, 4000)?;
        let large = world.explain(DType::F32, ReduceOp::Sum, 16 << 20)?;
        let text = large.to_string();
        assert!(text.contains("2 processes, 2 rails over loopback, 4 pieces of up to 2097152 bytes"), "{text}");
        assert_eq!(own.explain(DType::F32, ReduceOp::Sum, 4000)?.rails, None);
        let (small, large) = (small.rails.unwrap(), large.rails.unwrap());
        assert_eq!((small.pieces, small.transport, large.rails), (1, "loopback", 2));
        assert_eq!(large.gather.algorithm, Algorithm::Direct);
        assert!(small.sums.contains("in the memory of the hosts"));
        Ok(small.piece)
    });
    // Half of 1000 elements, to the next grain.
    assert!(found.iter().all(|&piece| (2000..2256).contains(&piece)), "{found:?}");
    let found = Hosts::on_devices(&[1, 1]).all(|dev| {
        let of = |op| Ok::<_, Error>(dev.world()?.explain(DType::F32, op, 64 << 20)?.rails.unwrap());
        let (sum, max) = (of(ReduceOp::Sum)?, of(ReduceOp::Max)?);
        assert_eq!((sum.pieces, sum.piece), (1, 64 << 20));
        Ok([sum.sums, max.sums])
    });
    assert!(found.iter().all(|sums| sums[0] == "by the transport, in the members' own memory"), "{found:?}");
}

/// Small buffers take one meeting together, large ones one each; the bits are those of a call for each.
#[test]
fn many_small_buffers_take_one_meeting() {
    let lens: Vec<usize> = (0..24).map(|k| 37 * k + k % 3).chain([100_000]).collect();
    for shape in [&[2, 2][..], &[2, 1], &[1, 1]] {
        let hosts = Hosts::new(shape);
        let found = hosts.all(|dev| {
            let world = dev.world()?;
            let me = world.rank();
            let upload = || lens.iter().map(|&len| dev.upload(&some(me, len))).collect::<Result<Vec<_>, _>>();
            let (mut many, mut each) = (upload()?, upload()?);
            let meetings = || world.across().map_or(0, |across| across.calls.get());
            let before = meetings();
            world.all_reduce_many(&mut many, ReduceOp::Avg)?;
            let took = meetings() - before;
            each.iter_mut().try_for_each(|x| world.all_reduce(x, ReduceOp::Avg))?;
            for (x, y) in many.iter().zip(&each) {
                let (x, y) = (dev.download(x)?, dev.download(y)?);
                assert!(x.iter().zip(&y).all(|(x, y)| x.to_bits() == y.to_bits()), "{} elements", x.len());
            }
            Ok(took)
        });
        assert!(found.iter().all(|&took| took == 2), "{found:?}");
    }
}

/// Lists that differ are found by the first meeting.
#[test]
fn lists_that_differ_name_both_places() {
    let found = Hosts::new(&[2, 1]).run(|dev| {
        let world = dev.world()?;
        let last = if world.rank() < 2 { 10 } else { 11 };
        let mut many = [3, 4, last].map(|len| dev.zeros::<f32>(len).unwrap());
        world.all_reduce_many(&mut many, ReduceOp::Sum)
    });
    for found in found {
        let Err(Error::WorldMismatch { a, b, .. }) = found else { panic!("{found:?}") };
        let calls = format!("{} {}", a.call, b.call);
        assert!(calls.contains("[3, 4, 10]") && calls.contains("[3, 4, 11]"), "{calls}");
    }
}
