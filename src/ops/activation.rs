//! Activations and their derivatives, with a bias for each column or without: `kernels/pointwise.cu`.
//!
//! `Device`'s methods check lengths and launch one kernel each. They use the launch of `device` and the types of
//! `kernel`, and nothing above.
//!
//! Invariant: each element is computed by itself, in `f32` (of `f64` in `f64`), and rounded once.

mod functions;

use self::functions::{
    activate, activate_assign, backward, backward_assign, bias, bias_assign, bias_backward, bias_backward_assign,
};
use super::{
    family::{NULL, address, rows_of, tiles},
    same_len,
};
use crate::{
    Device, DeviceBuffer,
    error::{Result, op_site::OpSite},
    kernel::builtin::Float,
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

/// The functions of one argument that have a name of their own.
macro_rules! activations {
    ($($name:ident $which:ident $x:literal $y:literal $what:literal;)+) => {
        /// Activations, and the step back through them. All are asynchronous on the current stream and can be captured.
        /// Half types are computed in `f32` and rounded once.
        ///
        /// The step back needs what went into the function: `dx = dy * f'(x)`. For [`Activation::Relu`] what came out
        /// of it does as well.
        ///
        /// Far from 0, also at infinity, they and their slopes are their limits: `silu(-infinity)` is 0.
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
                let _here = OpSite::here(stringify!($name));
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
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let x = dev.upload(&[-1.0f32, 0.0, 2.0])?;
    /// assert_eq!(dev.download(&dev.activation(Activation::Relu, &x)?)?, [0.0, 0.0, 2.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, mut y) = (dev.upload(&[-1.0f32, 2.0])?, dev.zeros::<f32>(2)?);
    /// dev.activation_into(Activation::Identity, &x, &mut y)?;
    /// assert_eq!(dev.download(&y)?, [-1.0, 2.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let mut x = dev.upload(&[-1.0f32, 2.0])?;
    /// dev.activation_assign(Activation::Relu, &mut x)?;
    /// assert_eq!(dev.download(&x)?, [0.0, 2.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
        unsafe { self.launch(&activate_assign::<X::Elem>(), tiles::<X::Elem>(n), args) }
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
        unsafe { self.launch(&backward::<X::Elem>(), tiles::<X::Elem>(n), args)? };
        Ok(dx)
    }

    /// `dy = dy * f'(x)`, in place.
    ///
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (y, mut dy) = (dev.upload(&[0.0f32, 2.0])?, dev.upload(&[5.0f32, 7.0])?);
    /// dev.activation_backward_assign(Activation::Relu, &mut dy, &y)?;
    /// assert_eq!(dev.download(&dy)?, [0.0, 7.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
        unsafe { self.launch(&backward_assign::<X::Elem>(), tiles::<X::Elem>(n), args) }
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
        unsafe { self.launch(&self::bias::<X::Elem>(), tiles::<X::Elem>(n), args)? };
        Ok(y)
    }

    /// `x = f(x + bias)`, in place, row by row.
    ///
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (mut x, bias) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.upload(&[-2.0f32, 10.0])?);
    /// dev.bias_activation_assign(Activation::Identity, &mut x, &bias)?;
    /// assert_eq!(dev.download(&x)?, [-1.0, 12.0, 1.0, 14.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
        unsafe { self.launch(&bias_assign::<X::Elem>(), tiles::<X::Elem>(n), args) }
    }

    /// `dy * f'(x + bias)` in a new buffer, row by row: the gradient of `x`. That of the bias is its
    /// [`column_sum`](Self::column_sum).
    ///
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, bias) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.upload(&[-2.0f32, 10.0])?);
    /// let dy = dev.upload(&[1.0f32; 4])?;
    /// let dx = dev.bias_activation_backward(Activation::Relu, &dy, &x, &bias)?;
    /// assert_eq!(dev.download(&dx)?, [0.0, 1.0, 1.0, 1.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
        unsafe { self.launch(&bias_backward::<X::Elem>(), tiles::<X::Elem>(n), args)? };
        Ok(dx)
    }

    /// `dy = dy * f'(x + bias)`, in place, row by row.
    ///
    /// ```
    /// # use gpu_pool::{Activation, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, bias) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.upload(&[-2.0f32, 10.0])?);
    /// let mut dy = dev.upload(&[1.0f32; 4])?;
    /// dev.bias_activation_backward_assign(Activation::Relu, &mut dy, &x, &bias)?;
    /// assert_eq!(dev.download(&dy)?, [0.0, 1.0, 1.0, 1.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
        unsafe { self.launch(&bias_backward_assign::<X::Elem>(), tiles::<X::Elem>(n), args) }
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
        unsafe { self.launch(&activate::<T>(), tiles::<T>(n), (x, NULL, y, n as u64, 1, f as u32)) }
    }
}
