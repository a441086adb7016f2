//! Activations and their derivatives, with a bias for each column or without: `kernels/pointwise.cu`.
//!
//! `Device`'s methods check lengths and launch one kernel each. They use the launch of `device` and the types of
//! `kernel`, and nothing above.
//!
//! Invariant: each element is computed by itself, in `f32` (of `f64` in `f64`), and rounded once.

use super::{
    family::{Address, In, NULL, Out, address, kernels, packs, rows_of, wide},
    pointwise::POINTWISE,
    same_len,
};
use crate::{
    Device, DeviceBuffer, LaunchDims,
    error::Result,
    kernel::{builtin::Float, real::Real},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};
use std::panic::Location;

/// An activation function, as neural networks use them: for [`Device::activation`] and its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum Activation {
    /// `x`: a layer without activation.
    Identity,
    /// `max(x, 0)`. Its slope at 0 is 0, as in PyTorch. NaN stays NaN.
    Relu,
    /// `x * P(X <= x)` with `X` standard normal, by the error function: PyTorch's `gelu`.
    Gelu,
    /// The approximation of GELU by `tanh` (Hendrycks and Gimpel, 2016): PyTorch's `gelu(approximate="tanh")`.
    GeluTanh,
    /// `x / (1 + exp(-x))`, also called swish.
    Silu,
}

const SQRT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// `1 / sqrt(2 pi)`
const DENSITY: f64 = 0.398_942_280_401_432_7;
/// `sqrt(2 / pi)`
const SQRT_2_PI: f64 = 0.797_884_560_802_865_4;

/// Function `f` of `kernels/pointwise.cu` at `x`, in the same order of operations.
fn value<A: Real>(f: u32, x: A) -> A {
    let (half, one) = (A::of(0.5), A::of(1.0));
    match f {
        0 => x,
        1 if x < A::of(0.0) => A::of(0.0),
        1 => x,
        2 => half * x * (one + (x * A::of(SQRT_HALF)).erf()),
        3 => half * x * (one + gelu_inner(x).tanh()),
        _ => x / (one + (-x).exp()),
    }
}

fn gelu_inner<A: Real>(x: A) -> A {
    A::of(SQRT_2_PI) * (x + A::of(0.044_715) * x * x * x)
}

/// The derivative of [`value`].
fn slope<A: Real>(f: u32, x: A) -> A {
    let (half, one) = (A::of(0.5), A::of(1.0));
    match f {
        0 => one,
        1 if x <= A::of(0.0) => A::of(0.0),
        1 => one,
        2 => {
            let below = half * (one + (x * A::of(SQRT_HALF)).erf());
            below + x * (A::of(DENSITY) * (-half * x * x).exp())
        }
        3 => {
            let t = gelu_inner(x).tanh();
            let inner_slope = A::of(SQRT_2_PI) * (one + A::of(0.134_145) * x * x);
            half * (one + t) + half * x * (one - t * t) * inner_slope
        }
        _ => {
            let s = one / (one + (-x).exp());
            s * (one + x * (one - s))
        }
    }
}

/// The biases of row-major elements; zeros without columns.
fn biases<T: Float>(b: &[T], cols: u32) -> impl Iterator<Item = T::Acc> {
    b[..cols as usize].iter().map(wide).cycle()
}

fn host_activate<T: Float>(_: LaunchDims, x: &[T], _: Address, y: &mut [T], n: u64, _: u32, f: u32) {
    y[..n as usize].iter_mut().zip(x).for_each(|(y, x)| *y = T::narrow(value(f, wide(x))));
}

fn host_activate_assign<T: Float>(_: LaunchDims, _: Address, _: Address, x: &mut [T], n: u64, _: u32, f: u32) {
    x[..n as usize].iter_mut().for_each(|x| *x = T::narrow(value(f, wide(x))));
}

fn host_bias<T: Float>(_: LaunchDims, x: &[T], b: &[T], y: &mut [T], n: u64, cols: u32, f: u32) {
    let inputs = x.iter().zip(biases(b, cols));
    y[..n as usize].iter_mut().zip(inputs).for_each(|(y, (x, b))| *y = T::narrow(value(f, wide(x) + b)));
}

fn host_bias_assign<T: Float>(_: LaunchDims, _: Address, b: &[T], x: &mut [T], n: u64, cols: u32, f: u32) {
    x[..n as usize].iter_mut().zip(biases(b, cols)).for_each(|(x, b)| *x = T::narrow(value(f, wide(x) + b)));
}

#[allow(clippy::too_many_arguments)]
fn host_backward<T: Float>(_: LaunchDims, dy: &[T], x: &[T], _: Address, dx: &mut [T], n: u64, _: u32, f: u32) {
    let inputs = dy.iter().zip(x);
    dx[..n as usize].iter_mut().zip(inputs).for_each(|(dx, (dy, x))| *dx = T::narrow(wide(dy) * slope(f, wide(x))));
}

#[allow(clippy::too_many_arguments)]
fn host_backward_assign<T: Float>(
    _: LaunchDims,
    _: Address,
    x: &[T],
    _: Address,
    dy: &mut [T],
    n: u64,
    _: u32,
    f: u32,
) {
    dy[..n as usize].iter_mut().zip(x).for_each(|(dy, x)| *dy = T::narrow(wide(dy) * slope(f, wide(x))));
}

#[allow(clippy::too_many_arguments)]
fn host_bias_backward<T: Float>(_: LaunchDims, dy: &[T], x: &[T], b: &[T], dx: &mut [T], n: u64, cols: u32, f: u32) {
    let inputs = dy.iter().zip(x).zip(biases(b, cols));
    let dx = dx[..n as usize].iter_mut().zip(inputs);
    dx.for_each(|(dx, ((dy, x), b))| *dx = T::narrow(wide(dy) * slope(f, wide(x) + b)));
}

#[allow(clippy::too_many_arguments)]
fn host_bias_backward_assign<T: Float>(
    _: LaunchDims,
    _: Address,
    x: &[T],
    b: &[T],
    dy: &mut [T],
    n: u64,
    cols: u32,
    f: u32,
) {
    let dy = dy[..n as usize].iter_mut().zip(x.iter().zip(biases(b, cols)));
    dy.for_each(|(dy, (x, b))| *dy = T::narrow(wide(dy) * slope(f, wide(x) + b)));
}
kernels! { POINTWISE;
    fn activate(In<T>, Address, Out<T>, u64, u32, u32) = "activate", host_activate::<T>;
    fn activate_assign(Address, Address, Out<T>, u64, u32, u32) = "activate", host_activate_assign::<T>;
    fn bias(In<T>, In<T>, Out<T>, u64, u32, u32) = "activate", host_bias::<T>;
    fn bias_assign(Address, In<T>, Out<T>, u64, u32, u32) = "activate", host_bias_assign::<T>;
    fn backward(In<T>, In<T>, Address, Out<T>, u64, u32, u32) = "activate_backward", host_backward::<T>;
    fn backward_assign(Address, In<T>, Address, Out<T>, u64, u32, u32)
        = "activate_backward", host_backward_assign::<T>;
    fn bias_backward(In<T>, In<T>, In<T>, Out<T>, u64, u32, u32) = "activate_backward", host_bias_backward::<T>;
    fn bias_backward_assign(Address, In<T>, In<T>, Out<T>, u64, u32, u32)
        = "activate_backward", host_bias_backward_assign::<T>;
}

/// The functions of one argument that have a name of their own.
macro_rules! activations {
    ($($name:ident $which:ident $x:literal $y:literal $what:literal;)+) => {
        /// Activations, and the step back through them. All are asynchronous on the current stream and can be captured.
        /// Half types are computed in `f32` and rounded once.
        ///
        /// The step back needs what went into the function: `dx = dy * f'(x)`. For [`Activation::Relu`] what came out
        /// of it does as well.
        ///
        /// Errors of all: [`Error::InvalidArgument`](crate::Error::InvalidArgument) for lengths that do not fit,
        /// [`Error::WrongDevice`](crate::Error::WrongDevice), [`Error::Aborted`](crate::Error::Aborted),
        /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) where a buffer is returned, and the driver's.
        impl Device {$(
            #[doc = concat!($what, ", in a new buffer: [`Activation::", stringify!($which), "`].")]
            ///
            /// ```
            /// # use gpu_pool::GpuPool;
            /// # let pool = GpuPool::builder().host(1).build()?;
            /// # pool.run(|dev, _| {
            #[doc = concat!("let x = dev.upload(&[", $x, "f32])?;")]
            #[doc = concat!("let y = dev.download(&dev.", stringify!($name), "(&x)?)?;")]
            #[doc = concat!("assert!((y[0] - ", $y, ").abs() < 1e-4, \"{y:?}\");")]
            /// # Ok(()) })?;
            /// # Ok::<(), gpu_pool::Error>(())
            /// ```
            ///
            /// # Errors
            /// See above.
            #[track_caller]
            pub fn $name<X>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>>
            where
                X: AsView + ?Sized,
                X::Elem: Float,
            {
                self.activation(Activation::$which, x)
            }
        )+}
    };
}
activations! {
    relu Relu "-2.0" "0.0" "`max(x, 0)`";
    gelu Gelu "1.0" "0.8413" "GELU by the error function";
    gelu_tanh GeluTanh "1.0" "0.8412" "GELU by `tanh`";
    silu Silu "1.0" "0.7311" "`x / (1 + exp(-x))`";
}

impl Device {
    /// `f(x)` in a new buffer.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn activation<X>(&self, f: Activation, x: &X) -> Result<DeviceBuffer<X::Elem>>
    where
        X: AsView + ?Sized,
        X::Elem: Float,
    {
        let x = x.view();
        let mut y = self.allocate("activation", x.len())?;
        self.activate("activation", f, x, y.view_mut())?;
        Ok(y)
    }

    /// `y = f(x)`.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn activation_into<X, Y>(&self, f: Activation, x: &X, y: &mut Y) -> Result<()>
    where
        X: AsView + ?Sized,
        Y: AsViewMut<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        self.activate("activation_into", f, x.view(), y.view_mut())
    }

    /// `x = f(x)`, in place. Then only [`Activation::Relu`] can be stepped back through.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn activation_assign<X>(&self, f: Activation, x: &mut X) -> Result<()>
    where
        X: AsViewMut + ?Sized,
        X::Elem: Float,
    {
        let x = x.view_mut();
        let _here = self.worker.handle.enter("activation_assign", Location::caller());
        let (n, at) = (x.len(), address(&x));
        let args = (at, NULL, x, n as u64, 1, f as u32);
        // SAFETY: the kernel reads and writes `n` elements of `x`; a null bias is none.
        unsafe { self.launch(&activate_assign::<X::Elem>(), packs::<X::Elem>(n), args) }
    }

    /// `dy * f'(x)` in a new buffer: the gradient before an activation, from the one behind it.
    ///
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, dy) = (dev.upload(&[-1.0f32, 2.0])?, dev.upload(&[5.0f32, 7.0])?);
    /// let dx = dev.activation_backward(Activation::Relu, &dy, &x)?;
    /// assert_eq!(dev.download(&dx)?, [0.0, 7.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn activation_backward<D, X>(&self, f: Activation, dy: &D, x: &X) -> Result<DeviceBuffer<X::Elem>>
    where
        D: AsView<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        X::Elem: Float,
    {
        let (dy, x) = (dy.view(), x.view());
        let _here = self.worker.handle.enter("activation_backward", Location::caller());
        same_len("activation_backward", dy.len(), x.len())?;
        let n = x.len();
        let mut dx = self.allocate("activation_backward", n)?;
        let args = (dy, x, NULL, &mut dx, n as u64, 1, f as u32);
        // SAFETY: all three have `n` elements; a null bias is none.
        unsafe { self.launch(&backward::<X::Elem>(), packs::<X::Elem>(n), args)? };
        Ok(dx)
    }

    /// `dy = dy * f'(x)`, in place.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn activation_backward_assign<D, X>(&self, f: Activation, dy: &mut D, x: &X) -> Result<()>
    where
        D: AsViewMut<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        X::Elem: Float,
    {
        let (dy, x) = (dy.view_mut(), x.view());
        let _here = self.worker.handle.enter("activation_backward_assign", Location::caller());
        same_len("activation_backward_assign", dy.len(), x.len())?;
        let (n, at) = (x.len(), address(&dy));
        let args = (at, x, NULL, dy, n as u64, 1, f as u32);
        // SAFETY: both have `n` elements; a null bias is none.
        unsafe { self.launch(&backward_assign::<X::Elem>(), packs::<X::Elem>(n), args) }
    }

    /// `f(x + bias)` in a new buffer: `x` is rows as long as `bias`, row-major. Keep `x` for
    /// [`bias_activation_backward`](Self::bias_activation_backward). With [`Activation::Identity`] it adds the bias.
    ///
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, bias) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.upload(&[-2.0f32, 10.0])?);
    /// let y = dev.bias_activation(Activation::Relu, &x, &bias)?;
    /// assert_eq!(dev.download(&y)?, [0.0, 12.0, 1.0, 14.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn bias_activation<X, B>(&self, f: Activation, x: &X, bias: &B) -> Result<DeviceBuffer<X::Elem>>
    where
        X: AsView + ?Sized,
        B: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (x, b) = (x.view(), bias.view());
        let _here = self.worker.handle.enter("bias_activation", Location::caller());
        rows_of("bias_activation", x.len(), b.len())?;
        let (n, cols) = (x.len(), b.len());
        let mut y = self.allocate("bias_activation", n)?;
        let args = (x, b, &mut y, n as u64, cols as u32, f as u32);
        // SAFETY: `x` and `y` have `n` elements, `b` has `cols`, which divides `n`.
        unsafe { self.launch(&self::bias::<X::Elem>(), packs::<X::Elem>(n), args)? };
        Ok(y)
    }

    /// `x = f(x + bias)`, in place, row by row.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn bias_activation_assign<X, B>(&self, f: Activation, x: &mut X, bias: &B) -> Result<()>
    where
        X: AsViewMut + ?Sized,
        B: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (x, b) = (x.view_mut(), bias.view());
        let _here = self.worker.handle.enter("bias_activation_assign", Location::caller());
        rows_of("bias_activation_assign", x.len(), b.len())?;
        let (n, cols, at) = (x.len(), b.len(), address(&x));
        let args = (at, b, x, n as u64, cols as u32, f as u32);
        // SAFETY: `x` has `n` elements, `b` has `cols`, which divides `n`.
        unsafe { self.launch(&bias_assign::<X::Elem>(), packs::<X::Elem>(n), args) }
    }

    /// `dy * f'(x + bias)` in a new buffer, row by row: the gradient of `x`. That of the bias is its
    /// [`column_sum`](Self::column_sum).
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn bias_activation_backward<D, X, B>(
        &self,
        f: Activation,
        dy: &D,
        x: &X,
        bias: &B,
    ) -> Result<DeviceBuffer<X::Elem>>
    where
        D: AsView<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        B: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (dy, x, b) = (dy.view(), x.view(), bias.view());
        let _here = self.worker.handle.enter("bias_activation_backward", Location::caller());
        same_len("bias_activation_backward", dy.len(), x.len())?;
        rows_of("bias_activation_backward", x.len(), b.len())?;
        let (n, cols) = (x.len(), b.len());
        let mut dx = self.allocate("bias_activation_backward", n)?;
        let args = (dy, x, b, &mut dx, n as u64, cols as u32, f as u32);
        // SAFETY: `dy`, `x` and `dx` have `n` elements, `b` has `cols`, which divides `n`.
        unsafe { self.launch(&bias_backward::<X::Elem>(), packs::<X::Elem>(n), args)? };
        Ok(dx)
    }

    /// `dy = dy * f'(x + bias)`, in place, row by row.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn bias_activation_backward_assign<D, X, B>(&self, f: Activation, dy: &mut D, x: &X, bias: &B) -> Result<()>
    where
        D: AsViewMut<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        B: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (dy, x, b) = (dy.view_mut(), x.view(), bias.view());
        let _here = self.worker.handle.enter("bias_activation_backward_assign", Location::caller());
        same_len("bias_activation_backward_assign", dy.len(), x.len())?;
        rows_of("bias_activation_backward_assign", x.len(), b.len())?;
        let (n, cols, at) = (x.len(), b.len(), address(&dy));
        let args = (at, x, b, dy, n as u64, cols as u32, f as u32);
        // SAFETY: `dy` and `x` have `n` elements, `b` has `cols`, which divides `n`.
        unsafe { self.launch(&bias_backward_assign::<X::Elem>(), packs::<X::Elem>(n), args) }
    }

    #[track_caller]
    fn activate<T: Float>(
        &self,
        op: &'static str,
        f: Activation,
        x: DeviceView<'_, T>,
        y: DeviceViewMut<'_, T>,
    ) -> Result<()> {
        let _here = self.worker.handle.enter(op, Location::caller());
        same_len(op, x.len(), y.len())?;
        let n = x.len();
        // SAFETY: both have `n` elements; a null bias is none.
        unsafe { self.launch(&activate::<T>(), packs::<T>(n), (x, NULL, y, n as u64, 1, f as u32)) }
    }
}
