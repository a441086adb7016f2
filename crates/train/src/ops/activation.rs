//! Activations and their derivatives, with a bias for each column or without: `kernels/pointwise.cu`. Invariant: each
//! element is computed by itself, in `f32` (of `f64` in `f64`), and rounded once.

mod functions;

use self::functions as kernels;
use super::family::Input;
use crate::runtime::{OpSite, Operations, rows_of, same_len, tiles};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Result, kernel::Float};

/// An activation function, as neural networks use them: for [`Activations`].
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

impl Activation {
    /// `f(x + bias)`: then `x` is rows as long as `bias`, row-major. With [`Activation::Identity`] it adds the bias.
    pub fn biased<B: AsView<Elem: Float>>(self, bias: &B) -> BiasedActivation<'_, B::Elem> {
        BiasedActivation { f: self, bias: Some(bias.view()) }
    }
}

/// An activation function, with a bias for each column or without.
#[derive(Clone, Copy)]
pub struct BiasedActivation<'a, T: Float> {
    f: Activation,
    bias: Option<DeviceView<'a, T>>,
}

impl<T: Float> From<Activation> for BiasedActivation<'_, T> {
    fn from(f: Activation) -> Self {
        BiasedActivation { f, bias: None }
    }
}

debug_as!(BiasedActivation<'_, T> [T: Float], |self| f = self.f, bias = self.bias.map(|bias| bias.len()));

macro_rules! activations {
    ($($name:ident $which:ident $x:literal $y:literal $what:literal;)+) => {$(
        #[doc = concat!($what, ", in a new buffer: [`Activation::", stringify!($which), "`].")]
        ///
        /// ```
        /// # gpu_pool_train::example!(|dev| {
        #[doc = concat!("let x = dev.upload(&[", $x, "f32])?;")]
        #[doc = concat!("let y = dev.download(&dev.", stringify!($name), "(&x)?)?;")]
        #[doc = concat!("assert!((y[0] - ", $y, ").abs() < 1e-4, \"{y:?}\");")]
        /// # Ok(()) });
        /// ```
        #[track_caller]
        fn $name<X: AsView<Elem: Float>>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>> {
            let _here = OpSite::here(stringify!($name));
            self.activation(Activation::$which, x)
        }
    )+};
}

/// Activations and their step back. Half types are computed in `f32`, rounded once. Streams and errors: [`ops`](super).
///
/// `f` is an [`Activation`], or one with a bias for each column: [`Activation::biased`]. The step back needs the input
/// of `f`: `dx = dy * f'(x)`, or `dy * f'(x + bias)`. Without a bias, the output of [`Activation::Relu`] does, too.
///
/// Far from 0, also at infinity, they and their slopes are their limits: `silu(-infinity)` is 0.
pub trait Activations: Operations {
    activations! {
        relu Relu "-2.0" "0.0" "`max(x, 0)`";
        gelu Gelu "1.0" "0.8413" "GELU by the error function";
        gelu_tanh GeluTanh "1.0" "0.8412" "GELU by `tanh`";
        silu Silu "1.0" "0.7311" "`x / (1 + exp(-x))`";
    }

    /// `f(x)` in a new buffer.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[-1.0f32, 0.0, 2.0, 4.0])?;
    /// assert_eq!(dev.download(&dev.activation(Activation::Relu, &x)?)?, [0.0, 0.0, 2.0, 4.0]);
    /// let bias = dev.upload(&[-3.0f32, 10.0])?; // 2 rows of 2
    /// let y = dev.activation(Activation::Relu.biased(&bias), &x)?;
    /// assert_eq!(dev.download(&y)?, [0.0, 10.0, 0.0, 14.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn activation<'b, X: AsView<Elem: Float>>(
        &self,
        f: impl Into<BiasedActivation<'b, X::Elem>>,
        x: &X,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let x = x.view();
        let mut y = self.allocate("activation", x.len())?;
        activate(self.device(), "activation", f.into(), Some(x), y.view_mut())?;
        Ok(y)
    }

    /// `y = f(x)`.
    #[track_caller]
    fn activation_into<'b, X: AsView<Elem: Float>>(
        &self,
        f: impl Into<BiasedActivation<'b, X::Elem>>,
        x: &X,
        y: &mut impl AsViewMut<Elem = X::Elem>,
    ) -> Result<()> {
        activate(self.device(), "activation_into", f.into(), Some(x.view()), y.view_mut())
    }

    /// `x = f(x)`, in place. Then only [`Activation::Relu`] without a bias can be stepped back through.
    #[track_caller]
    fn activation_in_place<'b, X: AsViewMut<Elem: Float>>(
        &self,
        f: impl Into<BiasedActivation<'b, X::Elem>>,
        x: &mut X,
    ) -> Result<()> {
        activate(self.device(), "activation_in_place", f.into(), None, x.view_mut())
    }

    /// `dy * f'(x)` in a new buffer: the gradient before an activation, from the one behind it. The gradient of a bias
    /// is the [sum of its columns](super::Rows::column_sum_into).
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let (x, dy) = (dev.upload(&[-1.0f32, 2.0])?, dev.upload(&[5.0f32, 7.0])?);
    /// let dx = dev.activation_backward(Activation::Relu, &dy, &x)?;
    /// assert_eq!(dev.download(&dx)?, [0.0, 7.0]);
    /// let bias = dev.upload(&[-3.0f32, 0.0])?;
    /// let dx = dev.activation_backward(Activation::Relu.biased(&bias), &dy, &x)?;
    /// assert_eq!(dev.download(&dx)?, [0.0, 7.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn activation_backward<'b, X: AsView<Elem: Float>>(
        &self,
        f: impl Into<BiasedActivation<'b, X::Elem>>,
        dy: &impl AsView<Elem = X::Elem>,
        x: &X,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let (dy, x) = (dy.view(), x.view());
        let mut dx = self.allocate("activation_backward", x.len())?;
        step_back(self.device(), "activation_backward", f.into(), Some(dy), x, dx.view_mut())?;
        Ok(dx)
    }

    /// `dy = dy * f'(x)`, in place.
    #[track_caller]
    fn activation_backward_in_place<'b, X: AsView<Elem: Float>>(
        &self,
        f: impl Into<BiasedActivation<'b, X::Elem>>,
        dy: &mut impl AsViewMut<Elem = X::Elem>,
        x: &X,
    ) -> Result<()> {
        step_back(self.device(), "activation_backward_in_place", f.into(), None, x.view(), dy.view_mut())
    }
}

impl Activations for Device {}

#[track_caller]
fn width<T: Float>(op: &'static str, n: usize, bias: Option<DeviceView<'_, T>>) -> Result<u32> {
    let Some(bias) = bias else { return Ok(1) };
    rows_of(op, n, bias.len())?;
    Ok(bias.len() as u32)
}

#[track_caller]
fn activate<T: Float>(
    dev: &Device,
    op: &'static str,
    BiasedActivation { f, bias }: BiasedActivation<'_, T>,
    x: Option<DeviceView<'_, T>>,
    y: DeviceViewMut<'_, T>,
) -> Result<()> {
    let _here = dev.enter(op);
    let n = y.len();
    same_len(op, x.map_or(n, |x| x.len()), n)?;
    let (x, cols) = (Input::view_or(x, y.address()), width(op, n, bias)?);
    let args = (x, Input::view_or_null(bias), y, n as u64, cols, f as u32);
    // SAFETY: `x` and `y` have `n` elements, the bias has `cols`, which divides `n`; a null bias is none.
    unsafe { dev.launch(&kernels::activate::<T>(), tiles::<T>(n), args) }
}

#[track_caller]
fn step_back<T: Float>(
    dev: &Device,
    op: &'static str,
    BiasedActivation { f, bias }: BiasedActivation<'_, T>,
    dy: Option<DeviceView<'_, T>>,
    x: DeviceView<'_, T>,
    dx: DeviceViewMut<'_, T>,
) -> Result<()> {
    let _here = dev.enter(op);
    let n = x.len();
    same_len(op, dy.map_or(dx.len(), |dy| dy.len()), n)?;
    let (dy, cols) = (Input::view_or(dy, dx.address()), width(op, n, bias)?);
    let args = (dy, x, Input::view_or_null(bias), dx, n as u64, cols, f as u32);
    // SAFETY: `dy`, `x` and `dx` have `n` elements, the bias has `cols`, which divides `n`; a null bias is none.
    unsafe { dev.launch(&kernels::backward::<T>(), tiles::<T>(n), args) }
}
