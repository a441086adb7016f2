//! The activation functions with their derivatives, and the host kernels beside `kernels/pointwise.cu`.

use crate::kernels::POINTWISE;
use crate::ops::family::{Address, In, Out, kernels, wide};
use crate::runtime::Real;
use gpu_pool::kernel::Float;

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

/// Beyond this far from 0 all factors of `x` are 0 or 1, and their slopes 0. As the other factor of such a 0, `x`
/// counts as no more than this: infinity times 0 is NaN, where the limit is 0. A NaN becomes a number here, and the
/// other factor is NaN.
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
    pub(super) fn activate(_, x: In<T>, _: Address, y: Out<T>, n: u64, _: u32, f: u32) = "activate" {
        y[..n as usize].iter_mut().zip(x).for_each(|(y, x)| *y = T::narrow(value(f, wide(x))));
    }
    pub(super) fn activate_in_place(_, _: Address, _: Address, x: Out<T>, n: u64, _: u32, f: u32) = "activate" {
        x[..n as usize].iter_mut().for_each(|x| *x = T::narrow(value(f, wide(x))));
    }
    pub(super) fn bias(_, x: In<T>, b: In<T>, y: Out<T>, n: u64, cols: u32, f: u32) = "activate" {
        let inputs = x.iter().zip(biases(b, cols));
        y[..n as usize].iter_mut().zip(inputs).for_each(|(y, (x, b))| *y = T::narrow(value(f, wide(x) + b)));
    }
    pub(super) fn bias_in_place(_, _: Address, b: In<T>, x: Out<T>, n: u64, cols: u32, f: u32) = "activate" {
        x[..n as usize].iter_mut().zip(biases(b, cols)).for_each(|(x, b)| *x = T::narrow(value(f, wide(x) + b)));
    }
    pub(super) fn backward(
        _, dy: In<T>, x: In<T>, _: Address, dx: Out<T>, n: u64, _: u32, f: u32,
    ) = "activate_backward" {
        let inputs = dy.iter().zip(x);
        dx[..n as usize].iter_mut().zip(inputs).for_each(|(dx, (dy, x))| *dx = T::narrow(wide(dy) * slope(f, wide(x))));
    }
    pub(super) fn backward_in_place(
        _, _: Address, x: In<T>, _: Address, dy: Out<T>, n: u64, _: u32, f: u32,
    ) = "activate_backward" {
        dy[..n as usize].iter_mut().zip(x).for_each(|(dy, x)| *dy = T::narrow(wide(dy) * slope(f, wide(x))));
    }
    pub(super) fn bias_backward(
        _, dy: In<T>, x: In<T>, b: In<T>, dx: Out<T>, n: u64, cols: u32, f: u32,
    ) = "activate_backward" {
        let inputs = dy.iter().zip(x).zip(biases(b, cols));
        let dx = dx[..n as usize].iter_mut().zip(inputs);
        dx.for_each(|(dx, ((dy, x), b))| *dx = T::narrow(wide(dy) * slope(f, wide(x) + b)));
    }
    pub(super) fn bias_backward_in_place(
        _, _: Address, x: In<T>, b: In<T>, dy: Out<T>, n: u64, cols: u32, f: u32,
    ) = "activate_backward" {
        let dy = dy[..n as usize].iter_mut().zip(x.iter().zip(biases(b, cols)));
        dy.for_each(|(dy, (x, b))| *dy = T::narrow(wide(dy) * slope(f, wide(x) + b)));
    }
}
