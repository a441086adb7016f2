//! Numbers of all ten types: quotients, smaller and larger ones, running sums, sorting; against plain loops.

use crate::{
    each_type, on_both,
    rig::{Type, acc_eps, close, download, upload, values},
    support::{Gpus, cases, failure},
};
use gpu_pool::{Device, DeviceBuffer, Error, Result};
use gpu_pool_train::{Number, prelude::*};
use half::{bf16, f16};
use proptest::prelude::*;
use std::cmp::Ordering;

/// A type, with what a plain loop needs of it.
trait Num: Number + std::fmt::Debug {
    fn of_bits(bits: u64) -> Self;
    fn of(x: i32) -> Self;
    fn bits(self) -> u64;
    fn divided(self, by: Self) -> Self;
    fn order(self, other: Self) -> Ordering;
    fn is_number(self) -> bool;
    /// As it is in `sums`, rounded to the type.
    fn sums(x: &[Self]) -> Vec<Self>;
}

macro_rules! integers {
    ($($T:ty: $U:ty;)+) => {$(
        impl Num for $T {
            fn of_bits(bits: u64) -> Self { bits as $T }
            fn of(x: i32) -> Self { x as $T }
            fn bits(self) -> u64 { u64::from(self as $U) }
            fn divided(self, by: Self) -> Self { if by == 0 { 0 } else { self.wrapping_div(by) } }
            fn order(self, other: Self) -> Ordering { self.cmp(&other) }
            fn is_number(self) -> bool { true }
            fn sums(x: &[Self]) -> Vec<Self> {
                let mut sum: $T = 0;
                x.iter().map(|x| { sum = sum.wrapping_add(*x); sum }).collect()
            }
        }
    )+};
}
integers! { i8: u8; u8: u8; i32: u32; u32: u32; i64: u64; u64: u64; }

macro_rules! floats {
    ($($T:ty: $U:ty, $from:expr, $to:expr;)+) => {$(
        impl Num for $T {
            fn of_bits(bits: u64) -> Self { <$T>::from_bits(bits as $U) }
            fn of(x: i32) -> Self { $from(f64::from(x)) }
            fn bits(self) -> u64 { u64::from(self.to_bits()) }
            fn divided(self, by: Self) -> Self { $from($to(self) / $to(by)) }
            fn order(self, other: Self) -> Ordering { self.total_cmp(&other) }
            fn is_number(self) -> bool { !self.is_nan() }
            fn sums(x: &[Self]) -> Vec<Self> {
                let mut sum = 0.0;
                x.iter().map(|x| { sum += $to(*x); $from(sum) }).collect()
            }
        }
    )+};
}
// A quotient in f64 and its rounding are a quotient that is rounded once.
floats! {
    f32: u32, |x| x as f32, f64::from;
    f64: u64, |x| x, |x: f64| x;
    f16: u16, f16::from_f64, f16::to_f64;
    bf16: u16, bf16::from_f64, bf16::to_f64;
}

/// Calls `$f::<T>` for each of the ten types.
macro_rules! each_number {
    ($f:ident($($arg:expr),*)) => {{
        $f::<i8>($($arg),*);
        $f::<u8>($($arg),*);
        $f::<i32>($($arg),*);
        $f::<u32>($($arg),*);
        $f::<i64>($($arg),*);
        $f::<u64>($($arg),*);
        each_type!($f($($arg),*));
    }};
}

fn random(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

/// Any bits, among them many ends: zeros, the least and the largest, infinities, NaNs.
fn any<T: Num>(n: usize, seed: u64) -> Vec<T> {
    let mut ends = vec![0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 31, (1 << 31) - 1, 0x8000, 0x7fff, 0x80, 0x7f];
    ends.extend([0x7f80_0000, 0xff80_0000, 0x7ff0 << 48, 0xfff0 << 48, 0x7c00, 0xfc00, 0x7f80, 0xff80, 0x7fc0_0000]);
    let of = |x: u64| if x.is_multiple_of(3) { ends[(x / 3) as usize % ends.len()] } else { x >> 7 };
    random(seed).take(n).map(|x| T::of_bits(of(x))).collect()
}

/// The same bits, but for NaNs, of which one is as good as another.
#[track_caller]
fn same<T: Num>(found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len());
    let differ = |i: &usize| {
        let (a, b) = (found[*i], expected[*i]);
        a.bits() != b.bits() && (a.is_number() || b.is_number())
    };
    let at = (0..found.len()).find(differ);
    assert!(at.is_none(), "{}: {:?}", std::any::type_name::<T>(), at.map(|i| (i, found[i], expected[i])));
}

fn better<T: Num>(x: T, y: T, than: Ordering) -> T {
    match [x, y].into_iter().find(|x| !x.is_number()) {
        Some(nan) => nan,
        None => {
            if x.order(y) == than {
                x
            } else {
                y
            }
        }
    }
}

/// All operations of two buffers, whole and from `begin` on.
fn pairs<T: Num>(gpus: Gpus, n: usize, begin: usize, seed: u64) {
    let (a, b) = (any::<T>(n + begin, seed), any::<T>(n + begin, seed + 1));
    let of = |f: &dyn Fn(T, T) -> T| a[begin..].iter().zip(&b[begin..]).map(|(a, b)| f(*a, *b)).collect::<Vec<_>>();
    let quotients = of(&T::divided);
    let smaller = of(&|a, b| better(a, b, Ordering::Less));
    let larger = of(&|a, b| better(a, b, Ordering::Greater));
    gpus.pool(1)
        .run(|dev, _| {
            let (all, other) = (dev.upload(&a)?, dev.upload(&b)?);
            let (x, y) = (all.slice(begin..), other.slice(begin..));
            same(&dev.download(&dev.div(&x, &y)?)?, &quotients);
            same(&dev.download(&dev.minimum(&x, &y)?)?, &smaller);
            same(&dev.download(&dev.maximum(&x, &y)?)?, &larger);
            let mut z = dev.zeros::<T>(n)?;
            let check = |z: &mut DeviceBuffer<T>, f: &dyn Fn(&mut DeviceBuffer<T>) -> Result<()>, wanted: &[T]| {
                f(z)?;
                same(&dev.download(z)?, wanted);
                dev.copy(&x, z)
            };
            check(&mut z, &|z| dev.div_into(&x, &y, z), &quotients)?;
            check(&mut z, &|z| dev.div_in_place(z, &y), &quotients)?;
            check(&mut z, &|z| dev.minimum_into(&x, &y, z), &smaller)?;
            check(&mut z, &|z| dev.minimum_in_place(z, &y), &smaller)?;
            check(&mut z, &|z| dev.maximum_into(&x, &y, z), &larger)?;
            check(&mut z, &|z| dev.maximum_in_place(z, &y), &larger)
        })
        .unwrap();
}

/// The smallest and the largest, and the elements in order.
fn ordered<T: Num>(gpus: Gpus, n: usize, begin: usize, seed: u64) {
    let mut all = any::<T>(n + begin, seed);
    if seed.is_multiple_of(2) {
        // Without NaNs, and with many equal ones.
        let some: Vec<T> = all.iter().copied().filter(|x| x.is_number()).take(7).collect();
        all.iter_mut()
            .zip(random(seed + 1))
            .for_each(|(x, k)| *x = some.get(k as usize % 7).copied().unwrap_or(T::of(1)));
    }
    let mut sorted = all[begin..].to_vec();
    sorted.sort_by(|a, b| a.order(*b));
    let least = |than| all[begin..].iter().copied().reduce(|x, y| better(x, y, than));
    gpus.pool(1)
        .run(|dev, _| {
            let mut own = dev.upload(&all)?;
            if n > 0 {
                same(&dev.download(&dev.min(&own.slice(begin..))?)?, &[least(Ordering::Less).unwrap()]);
                same(&dev.download(&dev.max(&own.slice(begin..))?)?, &[least(Ordering::Greater).unwrap()]);
            }
            // NaNs, too, are in the order of their bits.
            let bits = |x: &[T]| x.iter().map(|x| x.bits()).collect::<Vec<_>>();
            assert_eq!(bits(&dev.download(&dev.sort(&own.slice(begin..))?)?), bits(&sorted));
            dev.sort_in_place(&mut own.slice_mut(begin..))?;
            let found = dev.download(&own)?;
            assert_eq!(bits(&found[begin..]), bits(&sorted));
            assert_eq!(bits(&found[..begin]), bits(&all[..begin]), "what is before the part");
            Ok(())
        })
        .unwrap();
}

/// Running sums of small integers: exact in all types but the smallest, which wrap.
fn summed<T: Num>(gpus: Gpus, n: usize, begin: usize, seed: u64) {
    let all: Vec<T> = random(seed).take(n + begin).map(|x| T::of((x % 5) as i32 - 2)).collect();
    let sums = T::sums(&all[begin..]);
    let before = [&[T::of(0)], &sums[..n.max(1) - 1]].concat();
    gpus.pool(1)
        .run(|dev, _| {
            let own = dev.upload(&all)?;
            same(&dev.download(&dev.inclusive_sum(&own.slice(begin..))?)?, &sums);
            same(&dev.download(&dev.exclusive_sum(&own.slice(begin..))?)?, &before[..n]);
            Ok(())
        })
        .unwrap();
}

fn settings() -> ProptestConfig {
    ProptestConfig { cases: cases(6, 60), failure_persistence: None, ..Default::default() }
}

fn functions<T: Type>(gpus: Gpus) {
    gpus.pool(1)
        .run(|dev, _| {
            for n in [0, 1, 7, 8, 1000, 9001] {
                let a = values::<T>(n, 3);
                let squares: Vec<f64> = a.iter().map(|a| T::of(a * a).to()).collect();
                let (mut x, mut y) = (upload::<T>(dev, &a)?, upload::<T>(dev, &squares)?);
                let powers: Vec<f64> = a.iter().map(|a| a.exp()).collect();
                let roots: Vec<f64> = squares.iter().map(|a| a.sqrt()).collect();
                // Numbers of at most e^3.
                close::<T>(&download(dev, &dev.exp(&x)?)?, &powers, |_| 80.0 * acc_eps::<T>());
                close::<T>(&download(dev, &dev.sqrt(&y)?)?, &roots, |_| 3.0 * acc_eps::<T>());
                let fresh = (dev.exp(&x)?, dev.sqrt(&y)?);
                dev.exp_in_place(&mut x)?;
                dev.sqrt_in_place(&mut y)?;
                assert_eq!((dev.download(&x)?, dev.download(&y)?), (dev.download(&fresh.0)?, dev.download(&fresh.1)?));
            }
            let ends = upload::<T>(dev, &[f64::INFINITY, f64::NEG_INFINITY, -1.0])?;
            assert_eq!(download(dev, &dev.exp(&ends)?)?[..2], [f64::INFINITY, 0.0]);
            let roots = download(dev, &dev.sqrt(&ends)?)?;
            assert!(roots[0] == f64::INFINITY && roots[1..].iter().all(|x| x.is_nan()), "{roots:?}");
            Ok(())
        })
        .unwrap();
}

on_both! {
    1: fn quotients_smaller_and_larger_ones(gpus) {
        proptest!(settings(), |((n, begin, seed) in (0usize..5000, 0usize..5, any_seed()))| {
            each_number!(pairs(gpus, n, begin, seed));
        });
    }

    1: fn extremes_and_order(gpus) {
        proptest!(settings(), |((n, begin, seed) in (0usize..7000, 0usize..5, any_seed()))| {
            each_number!(ordered(gpus, n, begin, seed));
        });
        ordered::<u32>(gpus, 70_001, 0, 1);
        ordered::<f64>(gpus, 2048, 0, 1);
        ordered::<bf16>(gpus, 40_000, 1, 2);
    }

    1: fn running_sums(gpus) {
        proptest!(settings(), |((n, begin, seed) in (0usize..7000, 0usize..5, any_seed()))| {
            each_number!(summed(gpus, n, begin, seed));
        });
        // Tiles of tiles.
        summed::<u32>(gpus, 2048 * 2048 + 3, 0, 1);
        summed::<f16>(gpus, 2048 * 3, 0, 1);
    }

    1: fn exponentials_and_roots(gpus) { each_type!(functions(gpus)) }

    1: fn running_sums_of_floats_have_one_order(gpus) {
        let x: Vec<f32> = values::<f32>(50_000, 1).into_iter().map(|x| x as f32).collect();
        let found = gpus.pool(1).run(|dev, _| {
            let x = dev.upload(&x)?;
            Ok([dev.download(&dev.inclusive_sum(&x)?)?, dev.download(&dev.inclusive_sum(&x)?)?])
        });
        let [a, b] = &found.unwrap()[0];
        assert_eq!(a, b);
        let mut sum = 0.0;
        for (i, (a, x)) in a.iter().zip(&x).enumerate() {
            sum += f64::from(*x);
            assert!((f64::from(*a) - sum).abs() < 3e-5 * (i as f64 + 1.0).sqrt(), "{i}: {a} instead of {sum}");
        }
    }

    1: fn numbers_in_graphs_and_wrong_ones(gpus) {
        gpus.pool(1)
            .run(|dev, _| {
                let (x, y) = (dev.upload(&any::<i32>(5000, 3))?, dev.upload(&any::<i32>(5000, 4))?);
                let all = |dev: &Device| {
                    let sorted = dev.sort(&dev.div(&x, &y)?)?;
                    Ok([dev.inclusive_sum(&sorted)?, dev.max(&sorted)?, dev.minimum(&sorted, &y)?, sorted])
                };
                let (graph, captured) = dev.capture(all)?;
                dev.launch_graph(&graph)?;
                for (captured, direct) in captured.iter().zip(&all(dev)?) {
                    assert_eq!(dev.download(captured)?, dev.download(direct)?);
                }
                let (mut five, empty) = (dev.zeros::<i32>(5)?, dev.zeros::<i32>(0)?);
                for error in [
                    failure(dev.div(&x, &five)),
                    failure(dev.minimum_in_place(&mut five, &x)),
                    failure(dev.maximum_into(&x, &y, &mut five)),
                    failure(dev.min(&empty)),
                    failure(dev.max(&empty)),
                ] {
                    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                }
                assert!(dev.sort(&empty)?.is_empty() && dev.inclusive_sum(&empty)?.is_empty());
                Ok(())
            })
            .unwrap();
    }
}

fn any_seed() -> impl Strategy<Value = u64> {
    0u64..1000
}
