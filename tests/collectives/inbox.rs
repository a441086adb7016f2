//! Sums of floats whose data are their own flags (`kernels/inbox.cuh`): in one trip, and piece by piece through slots.
//! Software GPUs do the same calls by events.

use crate::{
    cases::{Case, Kind, Prepared, REDUCING, check_all},
    numbers::{Num, OPS, Rng},
    on_both,
    rig::{assert_launch_failure_is_told, assert_nothing_kept, builder, run_as_counters_wrap},
    support::{Gpus, all_are, on_cuda, slow_add},
};
use gpu_pool::{DType, Device, Element, GpuPool, ReduceOp, Result, collective::Algorithm};
use gpu_pool_lab::{Check, FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use half::{bf16, f16};

/// All sums of floats by inboxes, whatever the environment says.
fn pool(gpus: Gpus, n: usize) -> GpuPool {
    let pool = builder(gpus, n).check(Check::Off).algorithm(Algorithm::Inbox).build().unwrap();
    let how = |bytes| pool.explain(DType::F32, ReduceOp::Sum, bytes).unwrap();
    if how(4).meets == "data" {
        for bytes in [4, 1 << 20, 3 << 20, 1 << 30] {
            assert_eq!((how(bytes).algorithm, how(bytes).meets), (Algorithm::Inbox, "data"), "{}", how(bytes));
        }
        assert_eq!(pool.explain(DType::I32, ReduceOp::Sum, 4).unwrap().meets, "packets");
    }
    pool
}

/// Bytes that one of `n` members sends another: a unit and some, the most in one trip, one piece of a few blocks, and
/// pieces for all blocks, so that slots come in turn several times. Less on software GPUs, which are slow.
fn sizes(gpus: Gpus, n: usize) -> [usize; 5] {
    if !gpus.is_cuda() {
        let room = (4 << 10) / (n - 1) / 256 * 256;
        return [40, room / 2, room, room + 256, 10 << 10];
    }
    let room = (2 << 20) / (n - 1) / (16 << 10) * (16 << 10);
    [40, 4 << 10, room, room + (1 << 10), 21 << 20]
}

/// Every kind of sum, of so many bytes for each pair and some elements more or less, where both buffers are aligned,
/// one is, and neither.
fn check<T: Num>(gpus: Gpus, seed: u64, around: &[isize]) {
    let n = gpus.up_to(4);
    let mut rng = Rng(seed);
    let pool = pool(gpus, n);
    for members in 2..=n {
        let gang: Vec<usize> = (0..members).rev().collect();
        let mut all = Vec::new();
        for kind in REDUCING {
            for bytes in sizes(gpus, n) {
                // The largest take long to check.
                let large = bytes > 8 << 20;
                if large && (kind != Kind::AllReduce || size_of::<T>() > 4) {
                    continue;
                }
                for &more in if large { &around[..1] } else { around } {
                    let count = (bytes / size_of::<T>()).checked_add_signed(more).unwrap();
                    let starts = rng.pick(&[(0, 0), (0, 0), (1, 3), (0, 1), (1, 0)]);
                    all.push(Case {
                        kind,
                        op: rng.pick(&OPS),
                        root: rng.below(members),
                        count,
                        starts,
                        salt: rng.next(),
                    });
                }
            }
        }
        check_all::<T>(&pool, &gang, all);
    }
    assert_nothing_kept(&pool);
}

/// Sums in turn of all sizes, moves, and sums of integers, with nothing waited for: what each leaves in inboxes, flags
/// and epochs is what the next one finds.
fn by_turns(dev: &Device, lengths: &[usize], rounds: usize) -> Result<()> {
    let n = dev.count();
    let mut found = Vec::new();
    for k in 0..rounds {
        let len = lengths[k % lengths.len()];
        let own: Vec<f32> = (0..len).map(|i| ((i + k) % 97 * (dev.rank() + 1)) as f32).collect();
        let (mut x, mut part) = (dev.upload(&own)?, dev.zeros::<f32>(len)?);
        let (mut all, mut word) = (dev.zeros::<f32>(len * n)?, dev.upload(&[dev.rank() as u32])?);
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.all_reduce(&mut word, ReduceOp::Sum)?;
        dev.all_gather(&x, &mut all)?;
        dev.reduce_scatter(&all, &mut part, ReduceOp::Avg)?;
        dev.reduce(&mut x, ReduceOp::Max, k % n)?;
        dev.all_reduce(&mut part, ReduceOp::Min)?;
        found.push((k, x, part, word));
    }
    for (k, x, part, word) in found {
        let sum = |i: usize| ((i + k) % 97 * n * (n + 1) / 2) as f32;
        for found in [dev.download(&x)?, dev.download(&part)?] {
            let wrong = found.iter().enumerate().find(|&(i, x)| *x != sum(i));
            assert!(wrong.is_none(), "round {k}, rank {}, {} elements: {wrong:?}", dev.rank(), found.len());
        }
        assert_eq!(dev.download(&word)?, [(n * (n - 1) / 2) as u32]);
    }
    Ok(())
}

fn lengths(gpus: Gpus, n: usize) -> [usize; 6] {
    let [small, few, room, more, large] = sizes(gpus, n).map(|bytes| bytes / 4);
    [few, small + 1, more, room, large / 4 + 3, 1]
}

/// Floats as bits.
trait Bits: Element + bytemuck::Pod {
    /// Bits that some word of an inbox could be mistaken for, and others that must stay as they are.
    const STRANGE: &[u64];
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn is_nan(self) -> bool;
}

macro_rules! bits {
    ($($T:ty, $U:ty: $($bits:expr),+;)+) => {$(
        impl Bits for $T {
            const STRANGE: &[u64] = &[$($bits),+];
            fn of(bits: u64) -> Self { <$T>::from_bits(bits as $U) }
            fn bits(self) -> u64 { u64::from(self.to_bits()) }
            fn is_nan(self) -> bool { <$T>::is_nan(self) }
        }
    )+};
}
bits! {
    f32, u32: 0xffff_ffff, 0x7fff_ffff, 0xffff_fffe, 0xff80_0000, 0x7f80_0000, 0x8000_0000, 0, 0x0000_ffff, 0x3f80_0000;
    // The low word of 1 - 2^-53, of -2^1023 and of the largest NaN; a high word that is one bit less.
    f64, u64: u64::MAX, u64::MAX << 32, 0x3fef_ffff_ffff_ffff, 0xffdf_ffff_ffff_ffff, 0xffff_fffe_ffff_ffff,
        0x7ff0_0000_0000_0000, 0xfff0_0000_0000_0000, 1 << 63, 0xffff_ffff, 0x7fff_ffff_0000_0000, 0;
    // Alone, and twice in a word.
    f16, u16: 0xffff, 0xffff, 0xffff, 0x7fff, 0xfffe, 0x7c00, 0xfc00, 0x8000, 0, 0x3c00;
    bf16, u16: 0xffff, 0xffff, 0xffff, 0x7fff, 0xfffe, 0x7f80, 0xff80, 0x8000, 0, 0x3f80;
}

/// Strange bits on all members, in one place and another: all members get one result, which a kernel with barriers
/// gives, but for which NaN a NaN is.
fn strange<T: Bits>(gpus: Gpus, n: usize, lengths: &[usize]) {
    let pools = [pool(gpus, n), builder(gpus, n).check(Check::Off).algorithm(Algorithm::Direct).build().unwrap()];
    for (salt, &len) in lengths.iter().enumerate() {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Scaled(1.0)] {
            // The first time as they come; then everything is full of 0xff on one member, and on all.
            for full in 0..3 {
                let own = |rank: usize| -> Vec<T> {
                    let mut rng = Rng((salt * 16 + rank) as u64 + 5);
                    let all_ones = full == 2 || full == 1 && rank == n - 1;
                    (0..len).map(|_| T::of(if all_ones { u64::MAX } else { rng.pick(T::STRANGE) })).collect()
                };
                let [by_data, by_flags] = pools.each_ref().map(|pool| {
                    let found = pool.run(|dev, _| {
                        let mut x = dev.upload(&own(dev.rank()))?;
                        dev.all_reduce(&mut x, op)?;
                        dev.download(&x)
                    });
                    found.unwrap()
                });
                let bits = |x: &[T]| x.iter().map(|x| x.bits()).collect::<Vec<_>>();
                let name = std::any::type_name::<T>();
                for (rank, x) in by_data.iter().enumerate() {
                    assert!(bits(x) == bits(&by_data[0]), "{name}, {len} elements, {op}: member {rank} differs");
                }
                for (i, (x, y)) in by_data[0].iter().zip(&by_flags[0]).enumerate() {
                    let same = x.bits() == y.bits() || x.is_nan() && y.is_nan();
                    assert!(same, "{name}, {op}, element {i} of {len}: {:x}, not {:x}", x.bits(), y.bits());
                }
            }
        }
    }
}

on_both! {
    2: fn around_the_limits_of_each_type(gpus) {
        check::<f32>(gpus, 271, &[-1, 0, 1]);
        check::<f64>(gpus, 272, &[0, 1]);
        check::<f16>(gpus, 273, &[-1, 0]);
        check::<bf16>(gpus, 274, &[0, 3]);
    }

    2: fn any_number_of_members(gpus) {
        for n in [3, 5, 8, 9, 16] {
            let n = gpus.up_to(n).max(2);
            let pool = pool(gpus, n);
            let mut rng = Rng(n as u64);
            let mut all = Vec::new();
            for bytes in sizes(gpus, n) {
                for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::ReduceScatterV, Kind::Reduce] {
                    let count = bytes.min(6 << 20) / 4 + rng.below(5);
                    let (op, root, salt) = (rng.pick(&OPS), rng.below(n), rng.next());
                    all.push(Case { kind, op, root, count, starts: rng.pick(&[(0, 0), (1, 2)]), salt });
                }
            }
            check_all::<f32>(&pool, &(0..n).collect::<Vec<_>>(), all);
        }
    }

    // Where `explain` says that one way ends and the next one begins: between more than two members a model decides.
    2: fn where_one_way_ends_by_explain(gpus) {
        for n in [2, 4, 8].into_iter().filter(|&n| n <= gpus.up_to(8)) {
            let pool = builder(gpus, n).check(Check::Off).algorithm(Algorithm::Auto).build().unwrap();
            let how = |bytes| pool.explain(DType::F32, ReduceOp::Sum, bytes).unwrap();
            let mut rng = Rng(276);
            let mut all = Vec::new();
            // More takes long to check.
            for log in 10..24 {
                // The last size on this octave that goes as its first one does.
                let (mut low, mut high) = (1 << log, 2 << log);
                if how(low).reason == how(high).reason {
                    continue;
                }
                while high - low > 4 {
                    let middle = (low + high) / 8 * 4;
                    *if how(middle).reason == how(low).reason { &mut low } else { &mut high } = middle;
                }
                for count in [low / 4, high / 4] {
                    let (op, salt) = (rng.pick(&[ReduceOp::Sum, ReduceOp::Max]), rng.next());
                    all.push(Case { kind: Kind::AllReduce, op, root: 0, count, starts: (0, 0), salt });
                }
            }
            assert_eq!(how(4).limits.contains("by a model, not measured"), n > 4, "{}", how(4));
            assert!(all.len() >= 2 || how(4).meets != "data", "from one trip to another way: {}", how(4));
            check_all::<f32>(&pool, &(0..n).collect::<Vec<_>>(), all);
        }
    }

    // What an empty inbox is full of; u32 data seen as f32; low words of f64.
    2: fn bits_that_look_like_an_empty_inbox(gpus) {
        for n in [2, gpus.up_to(4)] {
            let [_, few, _, more, _] = sizes(gpus, n);
            let lengths = |size: usize| [1, 3, 17, few / size + 1, more / size + 5];
            strange::<f32>(gpus, n, &lengths(4));
            strange::<f64>(gpus, n, &lengths(8));
            strange::<f16>(gpus, n, &lengths(2));
            strange::<bf16>(gpus, n, &lengths(2));
        }
    }

    2: fn all_sizes_by_turns_also_past_the_last_number(gpus) {
        for n in [2, gpus.up_to(8)] {
            let pool = pool(gpus, n);
            let (lengths, rounds) = (lengths(gpus, n), if gpus.is_cuda() { 18 } else { 6 });
            pool.run(|dev, _| by_turns(dev, &lengths, rounds)).unwrap();
            run_as_counters_wrap(&pool, &[0, 1, 2, 9, 40], |dev| by_turns(dev, &lengths, rounds));
        }
    }

    // In large pools members of small groups have small rooms; each pair counts its own meetings.
    3: fn groups_in_turn_with_all(gpus) {
        let n = gpus.up_to(8);
        let pool = pool(gpus, n);
        let lengths = lengths(gpus, n);
        pool.run(|dev, _| {
            let mut x = dev.upload(&vec![1.0f32; lengths.iter().copied().max().unwrap_or(1)])?;
            for round in 0..24 {
                let part = &mut x.slice_mut(..lengths[round % lengths.len()]);
                let members = [[0, 1, 2], [2, 0, 1]][round % 2];
                if dev.rank() < 3 {
                    dev.group(&members)?.all_reduce(part, ReduceOp::Avg)?;
                }
                if dev.rank() < 2 {
                    dev.group(&[1, 0])?.all_reduce(part, ReduceOp::Max)?;
                }
                if round % 3 == 0 {
                    dev.all_reduce(part, ReduceOp::Avg)?;
                }
            }
            assert!(all_are(&dev.download(&x)?, 1.0));
            Ok(())
        })
        .unwrap();
    }

    // One kernel behind the other, as fast as they go; who is late changes.
    2: fn a_thousand_in_a_row(gpus) {
        for n in [2, gpus.up_to(4)] {
            let (pool, rounds) = (pool(gpus, n), if gpus.is_cuda() { 1000 } else { 5 });
            let lengths = lengths(gpus, n).map(|len| len.min(1_500_000));
            pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; 1_500_000])?;
                let mut busy = dev.zeros::<u32>(1)?;
                for round in 0..rounds {
                    if round % 50 == dev.rank() {
                        slow_add(dev, &mut busy, 1, 200)?;
                    }
                    dev.all_reduce(&mut x.slice_mut(..lengths[round % 3]), ReduceOp::Avg)?;
                    dev.all_reduce(&mut x.slice_mut(..lengths[round % lengths.len()]), ReduceOp::Max)?;
                }
                assert!(all_are(&dev.download(&x)?, 1.0));
                Ok(())
            })
            .unwrap();
        }
    }

    2: fn in_graphs(gpus) {
        for n in [2, gpus.up_to(4)] {
            let pool = pool(gpus, n);
            let mut rng = Rng(275);
            let mut all = Vec::new();
            for kind in REDUCING {
                for bytes in &sizes(gpus, n)[..4] {
                    let (op, root, salt) = (rng.pick(&OPS), rng.below(n), rng.next());
                    all.push(Prepared::<f32>::new(Case { kind, op, root, count: bytes / 4, starts: (0, 1), salt }, n));
                }
            }
            pool.run(|dev, _| all.iter().try_for_each(|case| case.check_captured(dev))).unwrap();
            let lengths = lengths(gpus, n);
            // All in one, launched again and again, with calls between.
            pool.run(|dev, _| {
                let mut all: Vec<_> = lengths.iter().map(|&len| dev.zeros::<f64>(len / 2 + 1)).collect::<Result<_>>()?;
                let (graph, ()) =
                    dev.capture(|dev| all.iter_mut().try_for_each(|x| dev.all_reduce(x, ReduceOp::Sum)))?;
                for round in 1..if gpus.is_cuda() { 30 } else { 3 } {
                    all.iter_mut().try_for_each(|x| dev.fill(x, f64::from(round)))?;
                    (0..3).try_for_each(|_| dev.launch_graph(&graph))?;
                    dev.all_reduce(&mut all[round as usize % lengths.len()], ReduceOp::Avg)?;
                    dev.launch_graph(&graph)?;
                    for x in &all {
                        let expected = f64::from(round) * (n as f64).powi(4);
                        assert!(all_are(&dev.download(x)?, expected), "round {round}");
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }

    // Each pool has inboxes of its own, and their gangs take turns on the devices.
    2: fn two_pools_of_the_same_devices(gpus) {
        let n = gpus.up_to(4);
        let (pools, lengths) = ([pool(gpus, n), pool(gpus, n)], lengths(gpus, n));
        std::thread::scope(|scope| {
            for pool in &pools {
                let work = || (0..3).for_each(|_| drop(pool.run(|dev, _| by_turns(dev, &lengths, 4)).unwrap()));
                scope.spawn(work);
            }
        });
    }
}

/// All have agreed, and one kernel cannot be launched: the others have sent already, to it and to each other. None of
/// that may be there when they meet again. (Software GPUs have no inboxes in collectives.)
#[test]
fn what_a_failed_call_leaves_is_removed() {
    on_cuda(2, |gpus| {
        let n = gpus.up_to(4);
        for len in lengths(gpus, n) {
            let victim = len % n;
            let rule = FaultRule::new(Injected::Error).device(victim).op(FaultOp::Launch).nth(1);
            let plan = FaultPlan::new().on(rule).paused();
            let built = builder(gpus, n).check(Check::Off).algorithm(Algorithm::Inbox).faults(plan.clone()).build();
            let pool = built.unwrap();
            assert_launch_failure_is_told(&pool, (&plan, victim), len, |dev, x| {
                (0..victim + 1).try_for_each(|_| dev.all_reduce(x, ReduceOp::Max))
            });
            let lengths = lengths(gpus, n);
            pool.run(|dev, _| by_turns(dev, &lengths, 6)).unwrap();
        }
    });
}
