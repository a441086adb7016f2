//! Groups of several processes, as pools of this process ([`loopback`](super::loopback)): every method against plain
//! sums, and what happens when something fails.

use super::loopback::Hosts;
use crate::{AsView, DeviceBuffer, Element, Error, ReduceOp, Result, testing};
use std::time::Duration;

const SHAPES: [&[usize]; 5] = [&[2, 2], &[2, 3], &[2, 1, 3], &[1, 1, 1, 1], &[1, 2]];
const LENS: [usize; 6] = [0, 1, 2, 7, 61, 30_011];

/// Numbers whose sums are exact in any order.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 64) as f32 - 20.0).collect()
}

fn sums(n: usize, len: usize) -> Vec<f32> {
    let all: Vec<_> = (0..n).map(|rank| numbers(rank, len)).collect();
    (0..len).map(|i| all.iter().map(|x| x[i]).sum()).collect()
}

/// Uneven parts of `n` members.
fn counts(n: usize, each: usize) -> Vec<usize> {
    (0..n).map(|k| if k == 1 { 0 } else { each + k * 3 }).collect()
}

#[test]
fn all_reduce_adds_up() {
    for shape in SHAPES {
        let (hosts, n) = (Hosts::new(shape), shape.iter().sum());
        for len in LENS {
            let found = hosts.all(|dev| {
                let world = dev.world()?;
                assert_eq!((world.count(), world.place(world.rank()).1), (n, dev.index()));
                let mut x = dev.upload(&numbers(world.rank(), len))?;
                world.all_reduce(&mut x, ReduceOp::Sum)?;
                let source = dev.upload(&numbers(world.rank(), len))?;
                let mut into = dev.zeros(len)?;
                world.all_reduce_into(&source, &mut into, ReduceOp::Max)?;
                Ok((dev.download(&x)?, dev.download(&into)?, dev.download(&source)? == numbers(world.rank(), len)))
            });
            let max = |i: usize| (0..n).map(|rank| numbers(rank, len)[i]).fold(f32::MIN, f32::max);
            let max: Vec<f32> = (0..len).map(max).collect();
            assert!(
                found.iter().all(|(sum, most, kept)| *sum == sums(n, len) && *most == max && *kept),
                "{shape:?} {len}"
            );
        }
    }
}
