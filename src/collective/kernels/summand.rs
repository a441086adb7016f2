//! The arithmetic of reductions, element type by element type: `kernels/fold.cuh` in Rust.

use half::{bf16, f16};

pub(in super::super) trait Summand: bytemuck::Pod {
    /// The type of sums: `f32` for half types, else the type itself.
    type Acc: Copy + Default;
    /// Whether [`Acc`](Self::Acc) is the type itself, so that narrowing changes nothing.
    const IS_ACC: bool;

    fn wide(self) -> Self::Acc;
    /// One rounding, to nearest even.
    fn narrow(acc: Self::Acc) -> Self;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn mul(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// `b` where it is smaller or NaN. So a NaN stays, and of equal values (-0.0 and 0.0) the first does.
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// `b` where it is larger or NaN.
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// A factor as the type that is computed in; integers saturate.
    fn factor(factor: f64) -> Self::Acc;
    /// The average, of the sum of `count` values: times the reciprocal; integers are divided towards zero.
    fn average(sum: Self::Acc, count: usize) -> Self::Acc;
}

macro_rules! floats {
    ($($T:ty, $Acc:ty, $x:ident => $wide:expr, $narrow:expr, $is_acc:literal;)+) => {$(
        impl Summand for $T {
            type Acc = $Acc;
            const IS_ACC: bool = $is_acc;

            #[inline(always)]
            fn wide(self) -> $Acc {
                let $x = self;
                $wide
            }
            #[inline(always)]
            fn narrow(acc: $Acc) -> Self {
                let $x = acc;
                $narrow
            }
            #[inline(always)]
            fn add(a: $Acc, b: $Acc) -> $Acc {
                a + b
            }
            #[inline(always)]
            fn mul(a: $Acc, b: $Acc) -> $Acc {
                a * b
            }
            #[inline(always)]
            fn min(a: $Acc, b: $Acc) -> $Acc {
                if b < a || b.is_nan() { b } else { a }
            }
            #[inline(always)]
            fn max(a: $Acc, b: $Acc) -> $Acc {
                if b > a || b.is_nan() { b } else { a }
            }
            fn factor(factor: f64) -> $Acc {
                factor as $Acc
            }
            fn average(sum: $Acc, count: usize) -> $Acc {
                sum * (1.0 / count as $Acc)
            }
        }
    )+};
}
floats! {
    f32, f32, x => x, x, true;
    f64, f64, x => x, x, true;
    f16, f32, x => x.to_f32(), f16::from_f32(x), false;
    bf16, f32, x => x.to_f32(), bf16::from_f32(x), false;
}

macro_rules! integers {
    ($($T:ty)+) => {$(
        impl Summand for $T {
            type Acc = $T;
            const IS_ACC: bool = true;

            #[inline(always)]
            fn wide(self) -> $T {
                self
            }
            #[inline(always)]
            fn narrow(acc: $T) -> Self {
                acc
            }
            #[inline(always)]
            fn add(a: $T, b: $T) -> $T {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn mul(a: $T, b: $T) -> $T {
                a.wrapping_mul(b)
            }
            #[inline(always)]
            fn min(a: $T, b: $T) -> $T {
                a.min(b)
            }
            #[inline(always)]
            fn max(a: $T, b: $T) -> $T {
                a.max(b)
            }
            fn factor(factor: f64) -> $T {
                factor as $T
            }
            fn average(sum: $T, count: usize) -> $T {
                // More devices than the type can count have an average of less than one.
                <$T>::try_from(count).map_or(0, |count| sum / count)
            }
        }
    )+};
}
integers! { i8 u8 i32 u32 i64 u64 }
