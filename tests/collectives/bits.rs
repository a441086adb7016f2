//! Bits: the same on all members and in every run; with `ReduceOrder::Rank` also wherever the numbers stand and however
//! they get there; and right, within the bound that the documentation states. NVLink's multicast (nccl#1497) gives
//! other bits in every run, and NCCL's rings other ones for other sizes: 34 % of bf16 elements differ (sglang#34159,
//! vllm#50505).

use crate::{
    numbers::{Rng, own},
    on_both,
    rig::{WAYS, Way, ways},
    support::Gpus,
};
use gpu_pool::{
    Device, Element, Error, GpuPool, ReduceOp,
    collective::{Algorithm, ReduceOrder},
};
use half::{bf16, f16};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

/// Floating-point types: how they are made, what sums are added up in, and how exact both are.
trait Float: Element + std::fmt::Debug {
    type Acc: Copy + std::ops::Add<Output = Self::Acc> + std::ops::Mul<Output = Self::Acc>;
    /// Half a unit in the last place of a number near 1: of the element, and of the accumulator.
    const ROUNDING: f64;
    const ACC_ROUNDING: f64;
    /// Below this, roundings do not shrink with the number any more.
    const SMALLEST: f64;

    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    fn acc(self) -> Self::Acc;
    fn rounded(acc: Self::Acc) -> Self;
    fn acc_of(x: f64) -> Self::Acc;
}

macro_rules! floats {
    ($($T:ty, $Acc:ty: $epsilon:expr, $smallest:expr, $of:expr, $acc:expr, $rounded:expr);+) => {$(
        impl Float for $T {
            type Acc = $Acc;
            const ROUNDING: f64 = $epsilon / 2.0;
            const ACC_ROUNDING: f64 = <$Acc>::EPSILON as f64 / 2.0;
            const SMALLEST: f64 = $smallest;

            fn of(x: f64) -> Self { $of(x) }
            fn wide(self) -> f64 { f64::from(self) }
            fn acc(self) -> $Acc { $acc(self) }
            fn rounded(acc: $Acc) -> Self { $rounded(acc) }
            fn acc_of(x: f64) -> $Acc { x as $Acc }
        }
    )+};
}
floats! {
    f32, f32: f32::EPSILON as f64, f32::MIN_POSITIVE as f64, |x| x as f32, |x| x, |x| x;
    f64, f64: f64::EPSILON, f64::MIN_POSITIVE, |x| x, |x| x, |x| x;
    f16, f32: f16::EPSILON.to_f64_const(), f16::MIN_POSITIVE.to_f64_const(), f16::from_f64, f16::to_f32, f16::from_f32;
    bf16, f32: bf16::EPSILON.to_f64_const(), f32::MIN_POSITIVE as f64, bf16::from_f64, bf16::to_f32, bf16::from_f32
}

/// Numbers of both signs and many sizes.
fn numbers<T: Float>(rng: &mut Rng, len: usize) -> Vec<T> {
    let any = |_| {
        let unit = (rng.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        T::of(unit * f64::powi(2.0, (rng.next() % 12) as i32))
    };
    (0..len).map(any).collect()
}

/// What the documentation says: strictly in rank order, in the accumulator's type, rounded once.
fn in_rank_order<T: Float>(op: ReduceOp, terms: &[Vec<T>]) -> Vec<T> {
    let one = |i: usize| {
        let sum = terms[1..].iter().fold(terms[0][i].acc(), |sum, x| sum + x[i].acc());
        let average = || T::rounded(sum * T::acc_of(1.0 / terms.len() as f64));
        if op == ReduceOp::Avg { average() } else { T::rounded(sum) }
    };
    (0..terms[0].len()).map(one).collect()
}

fn bits<T: Element>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// Sums up `terms`, each padded on both sides by as much, and gives back what stands at their place.
fn summed<T: Float>(pool: &GpuPool, op: ReduceOp, terms: &[Vec<T>], before: usize, behind: usize) -> Vec<Vec<T>> {
    let len = terms[0].len();
    let sum = |dev: &Device| {
        let padded = [vec![T::of(0.1); before], terms[dev.rank()].clone(), vec![T::of(0.3); behind]].concat();
        let mut x = dev.upload(&padded)?;
        dev.all_reduce(&mut x, op)?;
        dev.download(&x.slice(before..before + len))
    };
    pool.on(&(0..terms.len()).collect::<Vec<_>>()).run(|dev, _| sum(dev)).unwrap()
}

fn same_everywhere_and_every_time<T: Float>(pool: &GpuPool, rng: &mut Rng, way: Way) {
    for len in [1, 7, 1000, 20_011] {
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            let terms: Vec<Vec<T>> = (0..pool.device_count()).map(|_| numbers(rng, len)).collect();
            let first = summed(pool, op, &terms, 0, 0);
            assert!(first.iter().all(|x| bits(x) == bits(&first[0])), "{way:?}, {len} elements: members differ");
            for _ in 0..2 {
                let again = summed(pool, op, &terms, 0, 0);
                assert!(again.iter().all(|x| bits(x) == bits(&first[0])), "{way:?}, {len} elements: runs differ");
            }
        }
    }
}

/// Sums are those in rank order, whatever stands around them.
fn the_same_at_every_place<T: Float>(pool: &GpuPool, rng: &mut Rng, way: Way) {
    let terms: Vec<Vec<T>> = (0..pool.device_count()).map(|_| numbers(rng, 997)).collect();
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let expected = in_rank_order(op, &terms);
        for (before, behind) in [(0, 0), (1, 0), (0, 30_000), (12_345, 10_001), (64, 64), (40_003, 3)] {
            for found in summed(pool, op, &terms, before, behind) {
                assert!(bits(&found) == bits(&expected), "{way:?}, {op}, {before} before and {behind} behind");
            }
        }
    }
}

/// As `reduce` and `reduce_scatter` add up, which never go round a ring; and `all_reduce_into`, which adds up as
/// `all_reduce` does.
fn every_sum_is_in_rank_order<T: Float>(pool: &GpuPool, rng: &mut Rng, way: Way) {
    let (n, each) = (pool.device_count(), 333);
    let terms: Vec<Vec<T>> = (0..n).map(|_| numbers(rng, n * each)).collect();
    let expected = in_rank_order(ReduceOp::Sum, &terms);
    let found = pool.run(|dev, _| {
        let (mut x, mut y) = (dev.upload(&terms[dev.rank()])?, dev.zeros::<T>(n * each)?);
        let (mut part, mut all) = (dev.zeros::<T>(each)?, dev.upload(&terms[dev.rank()])?);
        dev.all_reduce_into(&x, &mut y, ReduceOp::Sum)?;
        dev.all_reduce(&mut all, ReduceOp::Sum)?;
        dev.reduce_scatter(&x, &mut part, ReduceOp::Sum)?;
        dev.reduce(&mut x, ReduceOp::Sum, n - 1)?;
        Ok((dev.download(&y)?, dev.download(&all)?, dev.download(&part)?, dev.download(&x)?))
    });
    let rings = pool.explain(T::DTYPE, ReduceOp::Sum, n * each * size_of::<T>()).unwrap().algorithm == Algorithm::Ring;
    for (rank, (into, all, part, reduced)) in found.unwrap().into_iter().enumerate() {
        assert!(bits(&into) == bits(&all) && (rings || bits(&all) == bits(&expected)), "{way:?}");
        assert!(bits(&part) == bits(&expected[rank * each..(rank + 1) * each]), "{way:?}");
        assert!(rank < n - 1 || bits(&reduced) == bits(&expected), "{way:?}");
    }
}

/// `(n - 1)` roundings of the accumulator, each of the size of the sum of magnitudes, and one of the element's; for an
/// average two more of the accumulator's, for the reciprocal and the product.
fn within_the_bound<T: Float>(pool: &GpuPool, op: ReduceOp, terms: &[Vec<T>]) -> Result<(), TestCaseError> {
    let n = terms.len();
    let (divisor, extra) = if op == ReduceOp::Avg { (n as f64, 2.0) } else { (1.0, 0.0) };
    let found = summed(pool, op, terms, 0, 0);
    for i in 0..terms[0].len() {
        let column = || terms.iter().map(|x| x[i].wide());
        let (sum, size) = (column().sum::<f64>() / divisor, column().map(f64::abs).sum::<f64>() / divisor);
        let roundings = (n as f64 - 1.0 + extra) * T::ACC_ROUNDING;
        // 1 %: roundings of roundings, and those of this sum in f64.
        let bound =
            1.01 * (roundings * size + T::ROUNDING * (sum.abs() + roundings * size)) + T::SMALLEST * T::ROUNDING;
        for x in &found {
            let x = x[i].wide();
            prop_assert!((x - sum).abs() <= bound, "{n} members, {op}, element {i}: {x}, not {sum} +- {bound:e}");
        }
    }
    Ok(())
}

/// Bit patterns of floating-point numbers of all sizes for which no sum of eight overflows.
fn any_finite<T: Float>() -> impl Strategy<Value = T> {
    (-1.0..1.0, -20..12i32).prop_map(|(unit, size)| T::of(unit * f64::powi(2.0, size)))
}

fn random_data<T: Float>(gpus: Gpus) {
    let n = gpus.up_to(8);
    let pools: Vec<_> = [Way::Default, Way::Staged].into_iter().map(|way| way.pool(gpus, n)).collect();
    let terms = (1..=n, 0..60usize)
        .prop_flat_map(|(n, len)| prop::collection::vec(prop::collection::vec(any_finite::<T>(), len), n));
    let config = Config { cases: 16, failure_persistence: None, ..Config::default() };
    let run = TestRunner::new(config).run(&(terms, any::<bool>(), 0..2usize), |(terms, average, pool)| {
        within_the_bound(&pools[pool], if average { ReduceOp::Avg } else { ReduceOp::Sum }, &terms)
    });
    run.unwrap_or_else(|failure| panic!("{}: {failure}", std::any::type_name::<T>()));
}

/// Every way must give these; NaNs are compared as one.
fn special<T: Float>(pool: &GpuPool, way: Way) {
    let n = pool.device_count();
    let (inf, nan, max) = (f64::INFINITY, f64::NAN, 1.0);
    // By place: what the first member has, what the last one has, what those between have.
    let columns = [
        (nan, 1.0, 1.0),
        (1.0, nan, 1.0),
        (inf, 1.0, -1.0),
        (inf, -inf, 1.0),
        (-inf, 1.0, 2.0),
        (-0.0, -0.0, -0.0),
        (0.0, -0.0, -0.0),
        (-0.0, 0.0, 0.0),
        (max, -max, 0.0),
        (nan, inf, -inf),
        (1e-6, 1e-6, 0.0),
    ];
    let own_of = |rank: usize| {
        let at = |&(first, last, between): &(f64, f64, f64)| {
            T::of(if rank == 0 {
                first
            } else if rank == n - 1 {
                last
            } else {
                between
            })
        };
        columns.iter().map(at).collect::<Vec<T>>()
    };
    let all: Vec<Vec<T>> = (0..n).map(own_of).collect();
    // NaN wins; of equal ones the lowest rank's.
    let fold = |i: usize, better: fn(f64, f64) -> bool| {
        let pick = |best: f64, x: f64| {
            if best.is_nan() {
                best
            } else if x.is_nan() || better(x, best) {
                x
            } else {
                best
            }
        };
        all[1..].iter().fold(all[0][i].wide(), |best, x| pick(best, x[i].wide()))
    };
    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max] {
        let expected: Vec<T> = match op {
            ReduceOp::Min => (0..columns.len()).map(|i| T::of(fold(i, |x, best| x < best))).collect(),
            ReduceOp::Max => (0..columns.len()).map(|i| T::of(fold(i, |x, best| x > best))).collect(),
            _ => in_rank_order(op, &all),
        };
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&all[dev.rank()])?;
            dev.all_reduce(&mut x, op)?;
            dev.download(&x)
        });
        for (rank, found) in found.unwrap().into_iter().enumerate() {
            for (i, (x, expected)) in found.iter().zip(&expected).enumerate() {
                let same = bits(&[*x]) == bits(&[*expected]) || x.wide().is_nan() && expected.wide().is_nan();
                let (of, x, expected) = (std::any::type_name::<T>(), x.wide(), expected.wide());
                assert!(same, "{way:?}, {of}, {op} of {:?}, rank {rank}: {x}, not {expected}", columns[i]);
            }
        }
    }
}

macro_rules! each_float {
    ($f:ident($($arg:expr),*)) => {{
        $f::<f32>($($arg),*);
        $f::<f64>($($arg),*);
        $f::<f16>($($arg),*);
        $f::<bf16>($($arg),*);
    }};
}

on_both! {
    2: fn the_same_bits_on_all_members_and_in_every_run(gpus) {
        let mut rng = Rng(21);
        for (way, pool) in ways(gpus, gpus.up_to(3)) {
            each_float!(same_everywhere_and_every_time(&pool, &mut rng, way));
        }
    }

    // sglang#34159: a number's bits must not depend on which batch it is in.
    2: fn in_rank_order_bits_depend_on_nothing_else(gpus) {
        let mut rng = Rng(22);
        for way in WAYS {
            for n in [2, gpus.up_to(5)] {
                let pool = way.builder(gpus, n).reduce_order(ReduceOrder::Rank).build().unwrap();
                each_float!(the_same_at_every_place(&pool, &mut rng, way));
            }
        }
    }

    2: fn what_does_not_go_round_a_ring_is_always_in_rank_order(gpus) {
        let mut rng = Rng(23);
        for (way, pool) in ways(gpus, gpus.up_to(5)) {
            each_float!(every_sum_is_in_rank_order(&pool, &mut rng, way));
        }
    }

    1: fn sums_are_within_the_documented_bound(gpus) {
        each_float!(random_data(gpus));
    }

    1: fn not_a_number_infinity_and_negative_zero(gpus) {
        for way in WAYS {
            for n in [1, gpus.up_to(2), gpus.up_to(4)] {
                let pool = way.pool(gpus, n);
                each_float!(special(&pool, way));
            }
        }
    }

    // What is only moved keeps every bit, also of NaNs that no arithmetic would pass on.
    2: fn what_is_only_moved_keeps_its_bits(gpus) {
        let n = gpus.up_to(3);
        let strange = [0x7f80_0001u32, 0xffc0_dead, 0x8000_0000, 0x0000_0001, 0x7fc0_0000, 0xff80_0000];
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let own: Vec<f32> = strange.iter().map(|bits| f32::from_bits(bits ^ dev.rank() as u32)).collect();
                let (x, mut all, mut y) = (dev.upload(&own)?, dev.zeros::<f32>(6 * n)?, dev.upload(&own)?);
                dev.all_gather(&x, &mut all)?;
                dev.broadcast(&mut y, n - 1)?;
                let mut z = dev.zeros::<f32>(6)?;
                dev.sendrecv(&x, (dev.rank() + 1) % n, &mut z, (dev.rank() + n - 1) % n)?;
                let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                Ok((bits(dev.download(&all)?), bits(dev.download(&y)?), bits(dev.download(&z)?)))
            });
            let of = |rank: usize| strange.map(|bits| bits ^ rank as u32).to_vec();
            for (rank, found) in found.unwrap().into_iter().enumerate() {
                let all: Vec<u32> = (0..n).flat_map(of).collect();
                assert_eq!(found, (all, of(n - 1), of((rank + n - 1) % n)), "{way:?}");
            }
        }
    }

    // Integers wrap around; averages are cut towards zero; factors are, too.
    2: fn integers_at_their_limits(gpus) {
        macro_rules! integers {
            ($pool:expr, $way:expr; $($T:ty),+) => {$({
                let n = $pool.device_count();
                let own = |rank: usize| {
                    let at = rank as $T;
                    [<$T>::MAX, <$T>::MIN, <$T>::MAX - at, 3 + at, at, (<$T>::MIN >> 1).wrapping_sub(at)]
                };
                let all: Vec<[$T; 6]> = (0..n).map(own).collect();
                let fold = |f: fn($T, $T) -> $T| -> Vec<$T> {
                    (0..6).map(|i| all[1..].iter().fold(all[0][i], |sum, x| f(sum, x[i]))).collect()
                };
                let sum = fold(<$T>::wrapping_add);
                let twice = |sum: $T, x: $T| sum.wrapping_add(x.wrapping_mul(2));
                let scaled = (0..6).map(|i| all.iter().fold(0, |sum, x| twice(sum, x[i]))).collect();
                let expected = [
                    (ReduceOp::Sum, sum.clone()),
                    (ReduceOp::Prod, fold(<$T>::wrapping_mul)),
                    (ReduceOp::Min, fold(<$T>::min)),
                    (ReduceOp::Max, fold(<$T>::max)),
                    (ReduceOp::Avg, sum.iter().map(|x| x / n as $T).collect()),
                    (ReduceOp::Scaled(2.9), scaled),
                ];
                for (op, expected) in expected {
                    let found = $pool.run(|dev, _| {
                        let mut x = dev.upload(&all[dev.rank()])?;
                        dev.all_reduce(&mut x, op)?;
                        dev.download(&x)
                    });
                    assert_eq!(found.unwrap(), vec![expected; n], "{:?}, {}, {op}", $way, stringify!($T));
                }
            })+};
        }
        for way in WAYS {
            for n in [2, gpus.up_to(5)] {
                let pool = way.pool(gpus, n);
                integers!(pool, way; i8, u8, i32, u32, i64, u64);
            }
        }
    }

    // Each member's factor is its own, also of members that are late, and in a group it goes by the group's ranks.
    2: fn factors_are_each_members_own(gpus) {
        let n = gpus.up_to(4);
        for way in WAYS {
            let found = way.pool(gpus, n).run(|dev, _| {
                let ranks: Vec<usize> = (0..n).rev().collect();
                let group = dev.group(&ranks)?;
                let mut x = dev.upload(&[f16::from_f32(1.0 + dev.rank() as f32)])?;
                group.all_reduce(&mut x, own(ReduceOp::Scaled(0.0), group.rank()))?;
                Ok::<_, Error>(dev.download(&x)?[0].to_f32())
            });
            let sum: f32 = (0..n).map(|rank| (1 + rank) as f32 * (1 + (n - 1 - rank) % 2) as f32).sum();
            assert_eq!(found.unwrap(), vec![sum; n], "{way:?}");
        }
    }
}

/// The order of the software GPUs' operations does not show in the bits.
#[test]
fn the_same_bits_in_every_schedule() {
    let mut rng = Rng(24);
    let terms: Vec<Vec<f32>> = (0..4).map(|_| numbers(&mut rng, 5003)).collect();
    let reference = summed(&Gpus::software().pool(4), ReduceOp::Sum, &terms, 0, 0);
    let explored = gpu_pool_lab::Explorer::new().devices(4).seeds(4).run(|pool| {
        assert!(summed(pool, ReduceOp::Sum, &terms, 0, 0) == reference);
        Ok(())
    });
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}
