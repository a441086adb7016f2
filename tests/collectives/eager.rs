//! Collectives of some hundred kilobytes, which are written to rooms at the receivers (`kernels/eager.cu`): from where
//! packets end to where barriers begin. On software GPUs events order kernels: there these tests show that they are
//! right themselves.

use crate::{
    cases::{Case, Kind, Prepared, check_all, kinds},
    numbers::{Num, OPS, Rng, each_type},
    on_both,
    rig::{assert_nothing_kept, builder},
    support::{Gpus, all_are},
};
use gpu_pool::{DType, Device, Error, GpuPool, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{Check, count_meetings_from, prelude::*};
use half::bf16;

/// Kernels that meet, whatever the environment says; floats as all other types.
fn pool(gpus: Gpus, n: usize) -> GpuPool {
    let pool = builder(gpus, n).check(Check::Off).algorithm(Algorithm::Direct).build().unwrap();
    println!("{n} devices, 800 KB: {}", pool.explain(DType::F32, ReduceOp::Sum, 800 << 10).unwrap());
    pool
}

/// Bytes that one of `n` members sends another, on GPUs: the most by packets, between, and the most that rooms take.
/// Less on software GPUs, which have neither.
fn limits(gpus: Gpus, n: usize) -> [usize; 3] {
    if !gpus.is_cuda() {
        return [2 << 10, 3 << 10, 4 << 10];
    }
    let packets = ((768 << 10) / (n - 1)).min(if n > 2 { 128 << 10 } else { 256 << 10 }) / 4096 * 4096;
    let room = if n > 4 { (2 << 20) / (n - 1) } else { 1 << 20 } / (16 << 10) * (16 << 10);
    [packets, (packets + room) / 2, room]
}

/// Every kind of collective, of so many bytes for each pair and some elements more or less, where both buffers are
/// aligned, one is, and neither.
fn cases<T: Num>(rng: &mut Rng, n: usize, bytes: &[usize], around: &[isize]) -> Vec<Case> {
    let mut all = Vec::new();
    for kind in kinds() {
        for &bytes in bytes {
            for &more in around {
                let count = (bytes / size_of::<T>()).checked_add_signed(more).unwrap();
                let starts = rng.pick(&[(0, 0), (0, 0), (1, 3), (0, 1), (1, 0)]);
                all.push(Case { kind, op: rng.pick(&OPS), root: rng.below(n), count, starts, salt: rng.next() });
            }
        }
    }
    all
}

fn check<T: Num>(gpus: Gpus, seed: u64, around: &[isize]) {
    let n = gpus.up_to(4);
    let mut rng = Rng(seed);
    let pool = pool(gpus, n);
    for members in 2..=n {
        // What all devices together have room for; some of them may send no more.
        let gang: Vec<usize> = (0..members).rev().collect();
        check_all::<T>(&pool, &gang, cases::<T>(&mut rng, members, &limits(gpus, n), around));
    }
    assert_nothing_kept(&pool);
}

/// Of 4 bytes each: some that are packets, some for rooms, some for barriers.
const LENGTHS: [usize; 7] = [200_000, 33, 150_000, 262_144, 400_000, 70_001, 1];

/// So many calls in a row, with no wait in between, of sums and moves by turns. What is moved goes on from call to
/// call, so each finds what the one before has left.
fn by_turns(dev: &Device, rounds: usize) -> Result<(), Error> {
    let (n, me) = (dev.count(), dev.rank());
    let mut found = Vec::new();
    for k in 0..rounds {
        let len = LENGTHS[k % LENGTHS.len()];
        let own: Vec<u32> = (0..len).map(|i| (i * 7 + k * 1001 + me * 13) as u32).collect();
        let (mut sum, mut part) = (dev.upload(&own)?, dev.upload(&own)?);
        let mut all = dev.zeros::<u32>(len * n)?;
        dev.all_reduce(&mut sum, ReduceOp::Sum)?;
        dev.all_gather(&part, &mut all)?;
        dev.reduce_scatter(&all, &mut part, ReduceOp::Sum)?;
        dev.broadcast(&mut sum, k % n)?;
        dev.all_gather(&part, &mut all)?;
        found.push((k, len, sum, all));
    }
    for (k, len, sum, all) in found {
        let value = |rank: usize, i: usize| (i * 7 + k * 1001 + rank * 13) as u32;
        let sum_of = |i| (0..n).map(|rank| value(rank, i)).fold(0, u32::wrapping_add);
        assert!(dev.download(&sum)?.into_iter().enumerate().all(|(i, x)| x == sum_of(i)), "round {k}: a sum");
        // Everybody has gathered the same, so the sum of part r is n times what r had.
        let gathered = dev.download(&all)?;
        let right = |(j, x): (usize, u32)| x == value(j / len, j % len).wrapping_mul(n as u32);
        assert!(gathered.into_iter().enumerate().all(right), "round {k}: a gathered number");
    }
    Ok(())
}

on_both! {
    2: fn around_the_limits_in_elements_of_4_bytes(gpus) {
        check::<f32>(gpus, 171, &[-1, 0, 1]);
    }

    2: fn around_the_limits_in_halves_and_bytes(gpus) {
        check::<bf16>(gpus, 172, &[1]);
        check::<u8>(gpus, 173, &[-1]);
    }

    2: fn every_type_and_operation(gpus) {
        let n = gpus.up_to(4);
        let pool = pool(gpus, n);
        let gang: Vec<usize> = (0..n).collect();
        let [_, between, _] = limits(gpus, n);
        let mut rng = Rng(174);
        each_type!(T => {
            let mut all = Vec::new();
            for op in OPS {
                for kind in [Kind::AllReduceInto, Kind::ReduceScatterInPlace] {
                    let count = between / size_of::<T>() + rng.below(9);
                    all.push(Case { kind, op, root: 0, count, starts: rng.pick(&[(0, 0), (1, 1)]), salt: rng.next() });
                }
            }
            check_all::<T>(&pool, &gang, all);
        });
    }

    // Epochs, parities, flags and rooms as packets and barriers have left them, also past the last number.
    2: fn packets_rooms_and_barriers_by_turns(gpus) {
        for n in [2, gpus.up_to(8)] {
            let pool = pool(gpus, n);
            let rounds = if gpus.is_cuda() { 21 } else { 7 };
            pool.run(|dev, _| by_turns(dev, rounds)).unwrap();
            for before in [u32::MAX, u32::MAX - 1, u32::MAX - 8, u32::MAX - 31] {
                if count_meetings_from(&pool, before).unwrap() {
                    pool.run(|dev, _| by_turns(dev, rounds)).unwrap();
                }
            }
        }
    }

    // A member that ends first tells its next meeting by the flag that others wait for yet: they must take that for
    // what they wait for. One kernel behind the other, as fast as they go.
    2: fn a_thousand_in_a_row(gpus) {
        let n = gpus.up_to(4);
        let (pool, rounds) = (pool(gpus, n), if gpus.is_cuda() { 1000 } else { 5 });
        let [_, between, _] = limits(gpus, n);
        pool.run(|dev, _| {
            let len = between / 4;
            let (mut x, mut y) = (dev.upload(&vec![dev.rank() as u32; len])?, dev.zeros::<u32>(len * n)?);
            for _ in 0..rounds {
                dev.all_gather(&x, &mut y)?;
                dev.reduce_scatter(&y, &mut x, ReduceOp::Max)?;
                dev.all_gather_in_place(&mut y)?;
            }
            assert!(all_are(&dev.download(&x)?, dev.rank() as u32));
            assert!(dev.download(&y)?.into_iter().enumerate().all(|(i, y)| y == (i / len) as u32));
            Ok(())
        })
        .unwrap();
    }

    2: fn in_graphs(gpus) {
        let n = gpus.up_to(4);
        let pool = pool(gpus, n);
        let mut rng = Rng(175);
        let cases = cases::<f32>(&mut rng, n, &limits(gpus, n)[1..2], &[0]);
        let cases = cases.into_iter().filter(|case| case.kind != Kind::SendRecv);
        let cases: Vec<_> = cases.map(|case| Prepared::<f32>::new(case, n)).collect();
        pool.run(|dev, _| cases.iter().try_for_each(|case| case.check_captured(dev))).unwrap();
        // Packets, rooms and barriers in one, launched again and again.
        pool.run(|dev, _| {
            let mut all: Vec<_> = LENGTHS.iter().map(|&len| dev.zeros::<u32>(len)).collect::<Result<_, _>>()?;
            let (graph, ()) = dev.capture(|dev| all.iter_mut().try_for_each(|x| dev.all_reduce(x, ReduceOp::Sum)))?;
            let times = 7;
            for round in 1..if gpus.is_cuda() { 20 } else { 2 } {
                all.iter_mut().zip(round..).try_for_each(|(x, start)| dev.fill(x, start))?;
                (0..times).try_for_each(|_| dev.launch_graph(&graph))?;
                for (x, start) in all.iter().zip(round..) {
                    let expected = start * (n as u32).pow(times);
                    assert!(all_are(&dev.download(x)?, expected), "round {round}");
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
