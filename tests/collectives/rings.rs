//! All-reduce around a ring. On CUDA by one kernel on each device that writes to its successor (`kernels/ring.cu`),
//! where kernels can meet; under the checker, and on software GPUs, by copies that events order. Both have one order of
//! additions, and so the same bits.
//!
//! What has nothing to do with the way round is for both algorithms whose kernels have inboxes (`kernels/exchange.cu`,
//! too).

use crate::{
    numbers::Rng,
    on_both,
    rig::{self, assert_failure_is_told, assert_launch_failure_is_told, assert_nothing_kept, run_as_counters_wrap},
    support::{Gpus, all_are, on_cuda, slow_add},
};
use gpu_pool::{Builder, DType, Device, DeviceBuffer, Element, Error, GpuPool, ReduceOp, collective::Algorithm};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::{
    fmt::Debug,
    ops::{Add, Mul},
};

/// Goes round whenever it can, by kernels where they meet.
fn rings(gpus: Gpus, count: usize) -> Builder {
    rig::builder(gpus, count).algorithm(Algorithm::Ring)
}

/// Those whose kernels have inboxes.
const INBOXES: [Algorithm; 2] = [Algorithm::Ring, Algorithm::Exchange];

/// Whether its large sums are kernels that meet; on CUDA with peer access they must be, unless something keeps kernels
/// from it.
fn meets(pool: &GpuPool) -> bool {
    let how = pool.explain(DType::F32, ReduceOp::Sum, 1 << 20).unwrap();
    assert!(matches!(how.algorithm, Algorithm::Ring | Algorithm::Exchange | Algorithm::Copies), "{how}");
    how.meets == "flags"
}

trait Float: Element + Debug + PartialEq + Add<Output = Self> + Mul<Output = Self> {
    fn of(x: f64) -> Self;
}

impl Float for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }
}

impl Float for f64 {
    fn of(x: f64) -> Self {
        x
    }
}

/// Numbers of both signs and many sizes: another order of additions gives other bits.
fn noise<T: Float>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = Rng(seed);
    let mut one = || {
        let unit = (rng.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        T::of(unit * f64::powi(2.0, (rng.next() % 12) as i32))
    };
    (0..len).map(|_| one()).collect()
}

/// What the documentation says: chunks begin with lines of 128 bytes, chunk `c` is added up from rank `c` onwards, own
/// plus arrived.
fn around<T: Float>(op: ReduceOp, own: &[Vec<T>]) -> Vec<T> {
    let (n, len) = (own.len(), own[0].len());
    let each = len.div_ceil(n).next_multiple_of(128 / size_of::<T>());
    let sum = |i: usize| (1..n).fold(own[i / each][i], |arrived, k| own[(i / each + k) % n][i] + arrived);
    (0..len).map(|i| if op == ReduceOp::Avg { sum(i) * T::of(1.0 / n as f64) } else { sum(i) }).collect()
}

/// In place and out of place, at places that are aligned alike, differently, and not at all.
fn check<T: Float>(
    pool: &GpuPool,
    members: usize,
    len: usize,
    op: ReduceOp,
    starts: impl Fn(usize) -> (usize, usize) + Sync,
) {
    let own: Vec<Vec<T>> = (0..members).map(|rank| noise(rank as u64 + 5, len)).collect();
    let expected = around(op, &own);
    let found = pool.on(&(0..members).collect::<Vec<_>>()).run(|dev, _| {
        let (a, b) = starts(dev.rank());
        let framed = |start: usize| [vec![T::of(7.0); start], own[dev.rank()].clone(), vec![T::of(9.0); 3]].concat();
        let (src, mut x, mut y) = (dev.upload(&framed(a))?, dev.upload(&framed(b))?, dev.zeros::<T>(b + len + 3)?);
        dev.all_reduce(&mut x.slice_mut(b..b + len), op)?;
        dev.all_reduce_into(&src.slice(a..a + len), &mut y.slice_mut(b..b + len), op)?;
        Ok((dev.download(&src)?, dev.download(&x)?, dev.download(&y)?))
    });
    for (rank, (src, x, y)) in found.unwrap().into_iter().enumerate() {
        let (a, b) = starts(rank);
        let what = format!("{members} members, {len} elements, {op}, rank {rank} at {:?}", (a, b));
        assert!(
            x[b..b + len] == expected && x[..b] == vec![T::of(7.0); b] && x[b + len..] == [T::of(9.0); 3],
            "{what}"
        );
        assert!(y[b..b + len] == expected && y[b + len..] == [T::of(0.0); 3], "out of place, {what}");
        assert!(src[a..a + len] == own[rank], "the source, {what}");
    }
}

/// `around` in a device's place, of a pool: bits.
fn bits(pool: &GpuPool, len: usize, op: ReduceOp) -> Vec<u32> {
    let found = pool.run(|dev, _| {
        let mut x = dev.upload(&noise::<f32>(dev.rank() as u64 + 5, len))?;
        dev.all_reduce(&mut x, op)?;
        Ok(dev.download(&x)?.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    });
    let mut found = found.unwrap();
    assert!(found.windows(2).all(|two| two[0] == two[1]), "{len} elements: members differ");
    found.swap_remove(0)
}

on_both! {
    2: fn sums_are_in_the_documented_order(gpus) {
        let n = gpus.up_to(if gpus.is_cuda() { 8 } else { 5 });
        let pool = rings(gpus, n).build().unwrap();
        println!("kernels meet: {}", meets(&pool));
        let lengths: &[usize] =
            if gpus.is_cuda() { &[0, 1, 7, 33, 1000, 20_011, 700_001] } else { &[0, 1, 7, 33, 1000, 5003] };
        for members in 2..=n {
            for (k, &len) in lengths.iter().enumerate() {
                let op = if (members + k).is_multiple_of(2) { ReduceOp::Sum } else { ReduceOp::Avg };
                check::<f32>(&pool, members, len, op, |_| (0, 0));
                check::<f32>(&pool, members, len, op, |rank| (rank % 5, (rank + k) % 3));
                check::<f64>(&pool, members, len, op, |rank| (k % 2, (rank + k) % 2));
            }
        }
        assert_nothing_kept(&pool);
    }

    // What a call gives must not depend on whether a checker looks on, which keeps kernels from meeting.
    2: fn both_forms_give_the_same_bits(gpus) {
        for n in [2, gpus.up_to(3), gpus.up_to(8)] {
            let kernels = rings(gpus, n).build().unwrap();
            let copies = rings(gpus, n).check(Check::Races).build().unwrap();
            assert!(!meets(&copies));
            let large = if gpus.is_cuda() { 3_000_017 } else { 30_011 };
            for (len, op) in [(1, ReduceOp::Sum), (1023, ReduceOp::Avg), (large, ReduceOp::Sum), (large, ReduceOp::Avg)]
            {
                assert!(bits(&kernels, len, op) == bits(&copies, len, op), "{n} members, {len} elements, {op}");
            }
        }
    }

    // Each finds slots, flags and epochs as the one before has left them; also one of other members, in another order.
    2: fn hundreds_in_a_row_of_changing_sizes(gpus) {
        let n = gpus.up_to(4);
        let sizes = [1, 40_000, 1000, 0, 17_000, 5, 300_000, 8192];
        let backwards: Vec<usize> = (0..n).rev().collect();
        for algorithm in INBOXES {
            let pool = rig::builder(gpus, n).algorithm(algorithm).build().unwrap();
            let found = pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; 300_000])?;
                for round in 0..if gpus.is_cuda() { 400 } else { 40 } {
                    let len = sizes[round % sizes.len()];
                    // Of each round and member its own.
                    let own = |rank: usize| ((rank + 1) * (round % 7 + 1)) as f32;
                    let mut noise =
                        dev.upload(&(0..len).map(|i| own(dev.rank()) + (i % 5) as f32).collect::<Vec<_>>())?;
                    dev.all_reduce(&mut noise, ReduceOp::Sum)?;
                    let sum: f32 = (0..n).map(own).sum();
                    let right = |(i, x): (usize, &f32)| *x == sum + (n * (i % 5)) as f32;
                    assert!(dev.download(&noise)?.iter().enumerate().all(right), "{algorithm:?}, round {round}");
                    dev.all_reduce(&mut x.slice_mut(..len), ReduceOp::Avg)?;
                    match round % 5 {
                        0 => dev.group(&backwards)?.all_reduce(&mut x.slice_mut(..len), ReduceOp::Avg)?,
                        1 => dev.all_reduce(&mut x.slice_mut(..len), ReduceOp::Max)?,
                        2 if dev.rank() < 2 => {
                            dev.group(&[1, 0])?.all_reduce(&mut x.slice_mut(..len), ReduceOp::Avg)?
                        }
                        3 => dev.broadcast(&mut x.slice_mut(..len), round % n)?,
                        4 => {
                            let mut part = dev.zeros::<f32>(len)?;
                            dev.reduce_scatter(&x.slice(..len / n * n), &mut part.slice_mut(..len / n), ReduceOp::Avg)?;
                            assert!(all_are(&dev.download(&part.slice(..len / n))?, 1.0));
                        }
                        _ => {}
                    }
                }
                dev.download(&x)
            });
            assert!(found.unwrap().iter().flatten().all(|x| *x == 1.0), "{algorithm:?}");
            assert_nothing_kept(&pool);
        }
    }

    // sglang#34159 for graphs: what is captured adds up as what is called. Several in one graph have one inbox.
    2: fn in_graphs_the_bits_are_the_same(gpus) {
        let n = gpus.up_to(4);
        let (small, large) = (1000, if gpus.is_cuda() { 1_000_003 } else { 30_011 });
        for algorithm in INBOXES {
            let pool = rig::builder(gpus, n).algorithm(algorithm).build().unwrap();
            pool.run(|dev, _| {
                let own = |len: usize| noise::<f32>(dev.rank() as u64 + 5, len);
                let step =
                    |dev: &Device, x: &mut DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>, z: &mut DeviceBuffer<f32>| {
                        dev.all_reduce(x, ReduceOp::Avg)?;
                        dev.all_reduce(y, ReduceOp::Avg)?;
                        dev.all_reduce_into(y, z, ReduceOp::Sum)?;
                        dev.all_reduce(x, ReduceOp::Sum)
                    };
                let new =
                    || Ok::<_, Error>((dev.upload(&own(small))?, dev.upload(&own(large))?, dev.zeros::<f32>(large)?));
                let (mut x, mut y, mut z) = new()?;
                let mut plain = Vec::new();
                for _ in 0..3 {
                    step(dev, &mut x, &mut y, &mut z)?;
                    plain.push((dev.download(&x)?, dev.download(&y)?, dev.download(&z)?));
                }
                let (mut x, mut y, mut z) = new()?;
                let (graph, ()) = dev.capture(|dev| step(dev, &mut x, &mut y, &mut z))?;
                for expected in plain {
                    // Beside it, others' inboxes come and go.
                    let mut other = dev.upload(&own(large))?;
                    dev.launch_graph(&graph)?;
                    dev.all_reduce(&mut other, ReduceOp::Sum)?;
                    assert!((dev.download(&x)?, dev.download(&y)?, dev.download(&z)?) == expected);
                }
                Ok(())
            })
            .unwrap();
            assert_nothing_kept(&pool);
        }
    }

    // jax#38503, pytorch#113281: one is late, and then one fails when the others wait for it, on the host and in their
    // kernels.
    2: fn members_that_are_late_or_fail(gpus) {
        let n = gpus.up_to(4);
        for (round, (len, algorithm)) in
            [100, 50_000, 1_000_000].into_iter().flat_map(|len| INBOXES.map(|by| (len, by))).enumerate()
        {
            let pool = rig::builder(gpus, n).algorithm(algorithm).build().unwrap();
            assert_failure_is_told(&pool, (round % n, len), |dev, x| {
                let mut busy = dev.zeros::<u32>(1)?;
                for late in 0..n {
                    if dev.rank() == late {
                        slow_add(dev, &mut busy, 1, 3_000)?;
                    }
                    dev.all_reduce(x, ReduceOp::Avg)?;
                }
                assert!(all_are(&dev.download(x)?, 1.0));
                Ok(())
            });
        }
    }

    // nccl#829: all have agreed, and one's kernel cannot be launched. The others' wait for it already.
    2: fn a_launch_that_fails_when_the_others_count_on_it(gpus) {
        let n = gpus.up_to(4);
        let rule = FaultRule::new(Injected::Error).device(n - 1).op(FaultOp::Launch);
        for algorithm in INBOXES {
            let plan = FaultPlan::new().on(rule).paused();
            let pool = rig::builder(gpus, n).algorithm(algorithm).faults(plan.clone()).build().unwrap();
            for len in [1000, 300_001, 50_000].into_iter().cycle().take(6) {
                assert_launch_failure_is_told(&pool, (&plan, n - 1), len, |dev, x| dev.all_reduce(x, ReduceOp::Avg));
            }
            assert_nothing_kept(&pool);
        }
    }
}

mod cuda_only {
    use super::*;

    // Inboxes shrink, on one member more than on others, and all cut alike; the bits stay.
    #[test]
    fn members_that_are_short_of_memory() {
        on_cuda(2, |gpus| {
            let n = gpus.up_to(8);
            let len = 2_000_003;
            for algorithm in INBOXES {
                let roomy = rig::builder(gpus, n).algorithm(algorithm);
                let expected = bits(&roomy.build().unwrap(), len, ReduceOp::Avg);
                let short = rig::builder(gpus, n).algorithm(algorithm);
                let pool = short.memory_limit(64 << 20).build().unwrap();
                if !meets(&pool) {
                    return println!("skipped: kernels do not meet here");
                }
                pool.run(|dev, _| {
                    let mut x = dev.upload(&noise::<f32>(dev.rank() as u64 + 5, len))?;
                    let mut fills = Vec::new();
                    if dev.rank() % 3 == 1 {
                        for bytes in [8 << 20, 2 << 20, 1 << 19] {
                            while let Ok(fill) = dev.zeros::<u8>(bytes) {
                                fills.push(fill);
                            }
                        }
                        // Room for some of it.
                        fills.pop();
                    }
                    dev.all_reduce(&mut x, ReduceOp::Avg)?;
                    let found: Vec<u32> = dev.download(&x)?.into_iter().map(f32::to_bits).collect();
                    assert!(found == expected, "{algorithm:?}");
                    Ok(())
                })
                .unwrap();
            }
        });
    }

    // With few elements and with many, before the last number and behind it.
    #[test]
    fn counters_wrap_around() {
        on_cuda(2, |gpus| {
            let n = gpus.up_to(8);
            for algorithm in INBOXES {
                let pool = rig::builder(gpus, n).algorithm(algorithm).build().unwrap();
                run_as_counters_wrap(&pool, &[0, 1, 7], |dev| {
                    for (len, op) in
                        [(33, ReduceOp::Sum), (1, ReduceOp::Max), (70_001, ReduceOp::Avg), (300_001, ReduceOp::Sum)]
                    {
                        let mut x = dev.upload(&vec![1.0f32; len])?;
                        (0..3).try_for_each(|_| dev.all_reduce(&mut x, op))?;
                        let expected = if op == ReduceOp::Sum { n.pow(3) as f32 } else { 1.0 };
                        assert!(all_are(&dev.download(&x)?, expected));
                    }
                    Ok(())
                });
            }
        });
    }

    // By default: for more than two, where it was measured to be fastest; never for another order.
    #[test]
    fn large_sums_are_exchanged_or_go_round_by_kernels() {
        on_cuda(3, |gpus| {
            let pool = rig::builder(gpus, gpus.up_to(8)).algorithm(Algorithm::Auto).build().unwrap();
            let how = |bytes| pool.explain(DType::F32, ReduceOp::Avg, bytes).unwrap();
            if how(4).meets != "data" {
                return println!("skipped: kernels do not meet here");
            }
            let found = [4 << 20, 24 << 20, 1 << 30].map(|bytes| (how(bytes).algorithm, how(bytes).meets));
            let by_flags = [Algorithm::Exchange, Algorithm::Ring].map(|by| (by, "flags"));
            assert_eq!(found, [(Algorithm::Inbox, "data"), by_flags[0], by_flags[1]]);
            assert_eq!(pool.explain(DType::F16, ReduceOp::Avg, 1 << 30).unwrap().algorithm, Algorithm::Exchange);
            // Half a gigabyte, in many rounds.
            let len = 140_000_001;
            pool.run(|dev, _| {
                let mut x = dev.zeros::<f32>(len)?;
                dev.fill(&mut x, 1.0 + dev.rank() as f32)?;
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                let n = dev.count();
                let all = dev.download(&x)?;
                assert!(all.iter().all(|x| *x == (n * (n + 1) / 2) as f32));
                Ok(())
            })
            .unwrap();
        });
    }
}
