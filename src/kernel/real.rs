//! The arithmetic that host kernels need of `f32` and `f64`, so that they are written once for both; and what seals the
//! kernels' traits. `Float::Acc` is always such a type. Users see the trait in a bound and cannot name it.

use std::{
    fmt::Debug,
    ops::{Add, AddAssign, Div, Mul, Neg, Sub},
};

/// Seals the traits of types that have kernels.
pub trait Sealed {}
/// Seals the pairs of types that have a conversion.
pub trait Cast<B> {}

/// `f32` or `f64`.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// The nearest number to `x`.
    fn of(x: f64) -> Self;
    /// The exact value.
    fn to_f64(self) -> f64;
    /// e to the power of it.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The error function.
    fn erf(self) -> Self;
    /// The larger one; a NaN only if both are.
    fn max(self, other: Self) -> Self;
}

macro_rules! real {
    ($T:ty, $erf:path) => {
        impl Real for $T {
            fn of(x: f64) -> Self {
                x as $T
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln(self) -> Self {
                self.ln()
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn erf(self) -> Self {
                $erf(self)
            }
            fn max(self, other: Self) -> Self {
                self.max(other)
            }
        }
    };
}
real! { f32, libm::erff }
real! { f64, libm::erf }
