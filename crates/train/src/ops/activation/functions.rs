//! The activation functions with their derivatives, and the host kernels beside `kernels/pointwise.cu`.

use crate::kernels::POINTWISE;
use crate::ops::family::{In, Maybe, Out, each, kernels, wide};
use crate::runtime::Real;
use gpu_pool::kernel::Float;
use std::iter::repeat;

const SQRT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// `1 / sqrt(2 pi)`
const DENSITY: f64 = 0.398_942_280_401_432_7;
/// `2 sqrt(2 / pi)`
const TWICE_SQRT_2_PI: f64 = 1.595_769_121_605_730_7;

/// Function `f` of `kernels/pointwise.cu` at `x`, in the same order of operations; half types have quicker forms there.
fn value<A: Real>(f: u32, x: A) -> A {
    match f {
        0 => x,
        1 if x < A::of(0.0) => A::of(0.0),
        1 => x,
        2 => bounded_below(x) * below(x),
        3 => bounded_below(x) * sigmoid(twice_gelu_inner(x)),
        _ => bounded_below(x) * sigmoid(x),
    }
}

/// Beyond this far from 0 all factors of `x` are 0 or 1, and their slopes 0. Multiplied by such a 0, `x` counts as at
/// most this: infinity times 0 is NaN, where the limit is 0. A NaN becomes a number here, and the other factor is NaN.
const FAR: f64 = 1000.0;

fn bounded_below<A: Real>(x: A) -> A {
    x.max(A::of(-FAR))
}

fn bounded<A: Real>(x: A) -> A {
    -(-bounded_below(x)).max(A::of(-FAR))
}

fn sigmoid<A: Real>(x: A) -> A {
    A::of(1.0) / (A::of(1.0) + (-x).exp())
}

/// `P(X <= x)`, `X` standard normal.
fn below<A: Real>(x: A) -> A {
    A::of(0.5) * (A::of(1.0) + (x * A::of(SQRT_HALF)).erf())
}

/// `2 u`, where `(1 + tanh u) / 2 = sigmoid(2 u)` is the factor of GELU by `tanh`.
fn twice_gelu_inner<A: Real>(x: A) -> A {
    x * (A::of(TWICE_SQRT_2_PI) + A::of(TWICE_SQRT_2_PI * 0.044_715) * x * x)
}

fn slope<A: Real>(f: u32, x: A) -> A {
    let one = A::of(1.0);
    match f {
        0 => one,
        1 if x <= A::of(0.0) => A::of(0.0),
        1 => one,
        2 => below(x) + bounded(x) * (A::of(DENSITY) * (A::of(-0.5) * x * x).exp()),
        3 => {
            let (s, x) = (sigmoid(twice_gelu_inner(x)), bounded(x));
            s + x * (s * (one - s)) * (A::of(TWICE_SQRT_2_PI) + A::of(TWICE_SQRT_2_PI * 0.134_145) * x * x)
        }
        _ => {
            let (s, x) = (sigmoid(x), bounded(x));
            s * (one + x * (one - s))
        }
    }
}

fn biases<T: Float>(b: &[T], cols: u32) -> impl Iterator<Item = T::Acc> {
    b[..cols as usize].iter().map(wide).cycle()
}

kernels! { POINTWISE;
    pub(super) fn activate(_, x: Maybe<T>, b: Maybe<T>, y: Out<T>, n: u64, cols: u32, f: u32) = "activate" {
        let of = |x: T::Acc| T::narrow(value(f, x));
        match b {
            None => each(n, x, y, repeat(()), |x, ()| of(T::wide(x))),
            Some(b) => each(n, x, y, biases(b, cols), |x, b| of(T::wide(x) + b)),
        }
    }
    pub(super) fn backward(
        _, dy: Maybe<T>, x: In<T>, b: Maybe<T>, dx: Out<T>, n: u64, cols: u32, f: u32,
    ) = "activate_backward" {
        let of = |dy: T, x: T::Acc| T::narrow(T::wide(dy) * slope(f, x));
        match b {
            None => each(n, dy, dx, x.iter(), |dy, x| of(dy, wide(x))),
            Some(b) => each(n, dy, dx, x.iter().zip(biases(b, cols)), |dy, (x, b)| of(dy, wide(x) + b)),
        }
    }
}
