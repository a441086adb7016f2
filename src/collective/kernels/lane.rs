//! The arithmetic of reductions, element type by element type: `kernels/fold.cuh` in Rust.

use half::{bf16, f16};

/// An element of a reduction.
pub(super) trait Lane: bytemuck::Pod {
    /// What is computed in: `f32` for half types, else the type itself.
    type Acc: Copy + Default;

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
    ($($T:ty, $Acc:ty, $wide:expr, $narrow:expr;)+) => {$(
        impl Lane for $T {
            type Acc = $Acc;

            fn wide(self) -> $Acc {
                $wide(self)
            }
            fn narrow(acc: $Acc) -> Self {
                $narrow(acc)
            }
            fn add(a: $Acc, b: $Acc) -> $Acc {
                a + b
            }
            fn mul(a: $Acc, b: $Acc) -> $Acc {
                a * b
            }
            fn min(a: $Acc, b: $Acc) -> $Acc {
                if b < a || b.is_nan() { b } else { a }
            }
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
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
}

macro_rules! integers {
    ($($T:ty)+) => {$(
        impl Lane for $T {
            type Acc = $T;

            fn wide(self) -> $T {
                self
            }
            fn narrow(acc: $T) -> Self {
                acc
            }
            fn add(a: $T, b: $T) -> $T {
                a.wrapping_add(b)
            }
            fn mul(a: $T, b: $T) -> $T {
                a.wrapping_mul(b)
            }
            fn min(a: $T, b: $T) -> $T {
                a.min(b)
            }
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
