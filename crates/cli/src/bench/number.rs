//! The element types by nccl-tests' names, and the data of the check: small whole numbers, so that results are exact.

use gpu_pool::{Element, ReduceOp};
use half::{bf16, f16};

/// The period of the data. No piece of a collective has a multiple of it.
pub const PERIOD: usize = 251;

/// `-d`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Type {
    Int8,
    Uint8,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Half,
    Float,
    Double,
    Bfloat16,
}

impl Type {
    pub fn is_half(self) -> bool {
        matches!(self, Type::Half | Type::Bfloat16)
    }
}

/// `-o`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Reduction {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
}

impl Reduction {
    pub fn op(self) -> ReduceOp {
        match self {
            Reduction::Sum => ReduceOp::Sum,
            Reduction::Prod => ReduceOp::Prod,
            Reduction::Min => ReduceOp::Min,
            Reduction::Max => ReduceOp::Max,
            Reduction::Avg => ReduceOp::Avg,
        }
    }

    /// Element `at` of the data of a member. Factors are 1 and 2: their products are powers of two.
    pub fn number<T: Number>(self, rank: usize, at: usize) -> T {
        let at = at % PERIOD;
        let mixed = at * 7 + at / 13 + rank * 5;
        T::small(if self == Reduction::Prod { 1 + (mixed % 2) as u8 } else { (mixed % 4) as u8 })
    }

    /// The reduction of all members' element `at`.
    pub fn expected<T: Number>(self, members: usize, at: usize) -> T {
        let all = (0..members).map(|rank| self.number::<T>(rank, at));
        let combined = all.reduce(|a, b| match self {
            Reduction::Sum | Reduction::Avg => a.plus(b),
            Reduction::Prod => a.times(b),
            Reduction::Min if b < a => b,
            Reduction::Max if b > a => b,
            Reduction::Min | Reduction::Max => a,
        });
        let combined = combined.unwrap_or_else(|| T::small(0));
        if self == Reduction::Avg { combined.part(members) } else { combined }
    }
}

/// An element with the arithmetic of a reduction, in a plain loop.
pub trait Number: Element + PartialOrd {
    fn small(value: u8) -> Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// Divided by the number of members: [`ReduceOp::Avg`].
    fn part(self, members: usize) -> Self;
}

macro_rules! integers {
    ($($T:ty)*) => {$(
        impl Number for $T {
            fn small(value: u8) -> Self { value as $T }
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            fn times(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn part(self, members: usize) -> Self { self / members as $T }
        }
    )*};
}
integers! { i8 u8 i32 u32 i64 u64 }

macro_rules! floats {
    ($($T:ty, $Acc:ty, $from:expr, $to:expr;)*) => {$(
        impl Number for $T {
            fn small(value: u8) -> Self { $from(<$Acc>::from(value)) }
            fn plus(self, other: Self) -> Self { $from($to(self) + $to(other)) }
            fn times(self, other: Self) -> Self { $from($to(self) * $to(other)) }
            fn part(self, members: usize) -> Self { $from($to(self) * (1.0 / members as $Acc)) }
        }
    )*};
}
floats! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::from_f32, f16::to_f32;
    bf16, f32, bf16::from_f32, bf16::to_f32;
}
