//! The element types and operations as the model sees them.

use gpu_pool::{Element, ReduceOp};
use half::{bf16, f16};
use std::fmt::Debug;

/// An element type, as the model sees it.
pub trait Num: Element + PartialEq + Debug {
    /// Whether it has negative numbers.
    const SIGNED: bool;

    /// Wraps around where the type does.
    fn of(x: f64) -> Self;

    /// The average of `n` numbers with this sum, which is exact.
    fn average(sum: f64, n: usize) -> Self;
}

macro_rules! integers {
    ($($T:ty => $signed:literal),+) => {$(
        impl Num for $T {
            const SIGNED: bool = $signed;

            fn of(x: f64) -> Self {
                x as i64 as $T
            }

            fn average(sum: f64, n: usize) -> Self {
                (sum / n as f64) as i64 as $T
            }
        }
    )+};
}
integers! { i8 => true, u8 => false, i32 => true, u32 => false, i64 => true, u64 => false }

impl Num for f64 {
    const SIGNED: bool = true;

    fn of(x: f64) -> Self {
        x
    }

    fn average(sum: f64, n: usize) -> Self {
        sum * (1.0 / n as f64)
    }
}

/// Types that accumulate in `f32` and are rounded once.
macro_rules! through_f32 {
    ($($T:ty => $of:expr),+) => {$(
        impl Num for $T {
            const SIGNED: bool = true;

            fn of(x: f64) -> Self {
                $of(x as f32)
            }

            fn average(sum: f64, n: usize) -> Self {
                $of(sum as f32 * (1.0 / n as f32))
            }
        }
    )+};
}
through_f32! { f32 => |x: f32| x, f16 => f16::from_f32, bf16 => bf16::from_f32 }

/// Does the same with each element type, as `$T`.
macro_rules! each_type {
    ($T:ident => $body:expr) => {
        $crate::numbers::each_type!(@ $T => $body; f32 f64 half::f16 half::bf16 i8 u8 i32 u32 i64 u64)
    };
    (@ $T:ident => $body:expr; $($type:ty)+) => {$({
        type $T = $type;
        $body;
    })+};
}
pub(crate) use each_type;

/// All operations; each member has its own factor ([`own`]).
pub const OPS: [ReduceOp; 6] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg, ReduceOp::Scaled(0.0)];

/// nccl-tests' factors: 1 for even ranks, 2 for odd ones.
pub fn factor(rank: usize) -> f64 {
    1.0 + (rank % 2) as f64
}

/// The operation as the member with this rank gives it.
pub fn own(op: ReduceOp, rank: usize) -> ReduceOp {
    if let ReduceOp::Scaled(_) = op { ReduceOp::Scaled(factor(rank)) } else { op }
}

/// What the members' elements, in rank order, are together. Exact as long as they come from [`value`].
pub fn combined<T: Num>(op: ReduceOp, terms: impl ExactSizeIterator<Item = f64>) -> T {
    let n = terms.len();
    match op {
        ReduceOp::Sum => T::of(terms.sum()),
        ReduceOp::Prod => T::of(terms.product()),
        ReduceOp::Min => T::of(terms.fold(f64::INFINITY, f64::min)),
        ReduceOp::Max => T::of(terms.fold(f64::NEG_INFINITY, f64::max)),
        ReduceOp::Avg => T::average(terms.sum(), n),
        ReduceOp::Scaled(_) => T::of(terms.enumerate().map(|(rank, x)| x * factor(rank)).sum()),
        other => unreachable!("{other:?}"),
    }
}

/// Element `i` of a member: small integers, so that every order of additions gives the same and nothing is rounded, as
/// in nccl-tests' `verifiable`. What is only moved has more values to tell places apart.
pub fn value<T: Num>(op: Option<ReduceOp>, rank: usize, i: usize, salt: u64) -> f64 {
    let hash = mix(salt ^ (rank as u64) << 48 ^ i as u64);
    let sign = if T::SIGNED && hash >> 60 & 1 == 1 { -1.0 } else { 1.0 };
    match op {
        Some(ReduceOp::Prod) => sign * (1 + hash % 2) as f64,
        Some(_) => sign * (hash % 7 + 1) as f64,
        None => (hash % 97) as f64,
    }
}

fn mix(x: u64) -> u64 {
    let z = (x.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ x >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A random number generator that needs no crate: SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Less than `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// `of` the first `n` numbers, in any order.
    pub fn choose(&mut self, of: usize, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        for at in 0..of {
            let other = at + self.below(n - at);
            all.swap(at, other);
        }
        all.truncate(of);
        all
    }
}
