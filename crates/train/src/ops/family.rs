//! The common part of the operations' files: kernels that are declared once for the four types, and checks of shapes. A
//! kernel of a family is a generic host kernel and a symbol for each type, `<name>_f32` and so on (`kernels!`).
//!
//! **In place.** The device functions take an output that is one of the inputs. A Rust slice cannot be both, so the
//! input's parameter is a [`Maybe`]: in place it gets the address of the output beside it. The hazards see the output.

use crate::runtime::{ErrorInternals, HostArg};
use gpu_pool::{
    DeviceCopy, DeviceView, Error, Result,
    kernel::{Arg, Float, Packed, Param},
};
use std::marker::PhantomData;

pub(super) type In<T> = &'static [T];
pub(super) type Out<T> = &'static mut [T];

/// The parameter for an input that may be the output beside it, or not there. The host kernel gets a slice or nothing.
pub(super) struct Maybe<T>(PhantomData<fn(T)>);

/// The argument for a [`Maybe`].
pub(super) enum Input<'v, T: DeviceCopy> {
    View(DeviceView<'v, T>),
    /// In place: the address of the output.
    Output(u64),
    Null,
}

impl<'v, T: DeviceCopy> Input<'v, T> {
    pub(super) fn view_or(view: Option<DeviceView<'v, T>>, output: u64) -> Self {
        view.map_or(Input::Output(output), Input::View)
    }

    pub(super) fn view_or_null(view: Option<DeviceView<'v, T>>) -> Self {
        view.map_or(Input::Null, Input::View)
    }
}

// SAFETY: a shared slice, or an address where the device function reads what it may write by another parameter.
unsafe impl<T: DeviceCopy> Param for Maybe<T> {
    type Host<'a> = Option<&'a [T]>;

    unsafe fn host<'a>(arg: &HostArg) -> Option<&'a [T]> {
        // SAFETY: `pack` has packed a slice of `T`.
        matches!(arg, HostArg::Slice { .. }).then(|| unsafe { In::<T>::host(arg) })
    }
}

impl<T: DeviceCopy> Arg<Maybe<T>> for Input<'_, T> {
    fn pack(self) -> Packed {
        match self {
            Input::View(view) => Arg::<In<T>>::pack(view),
            Input::Output(address) => Arg::<u64>::pack(address),
            Input::Null => Arg::<u64>::pack(0),
        }
    }
}

/// Declares kernels of the four types, with `T` for the type: `fn name(dims, x: In<T>, ..) = "symbol" { host kernel }`.
/// After `of Number` they are of the ten types, and after `of Word` of the four sizes.
macro_rules! kernels {
    (@symbol Float $sym:literal) => {
        [concat!($sym, "_f32"), concat!($sym, "_f64"), concat!($sym, "_f16"), concat!($sym, "_bf16")][T::KIND]
    };
    (@symbol Number $sym:literal) => {
        gpu_pool::typed_name!(T::DTYPE, $sym)
    };
    (@symbol Word $sym:literal) => {
        match size_of::<T>() {
            1 => concat!($sym, "_u8"),
            2 => concat!($sym, "_u16"),
            4 => concat!($sym, "_u32"),
            _ => concat!($sym, "_u64"),
        }
    };
    ($module:ident; $($rest:tt)+) => { kernels! { $module of Float; $($rest)+ } };
    ($module:ident of $Bound:ident; $(
        $(#[$m:meta])*
        $vis:vis fn $name:ident($dims:tt, $($arg:tt: $p:ty),+ $(,)?) = $sym:literal $host:block
    )+) => {$(
        $(#[$m])*
        $vis fn $name<T: $Bound>() -> gpu_pool::Kernel<($($p,)+)> {
            #[allow(clippy::too_many_arguments)]
            fn host<T: $Bound>($dims: gpu_pool::LaunchDims, $($arg: <$p as gpu_pool::kernel::Param>::Host<'_>),+) $host
            gpu_pool::Kernel::new(&$module, kernels!(@symbol $Bound $sym), host::<T>)
        }
    )+};
}
pub(super) use kernels;

/// The three forms of an operation of two buffers of type `Bound`. `launch` takes the output alone where it is `x`.
macro_rules! binary {
    ($Bound:ident, $launch:path; $(
        $name:ident $into:ident $assign:ident $which:ident $formula:literal $x:literal $y:literal $z:literal;
    )+) => {$(
        #[doc = concat!("`", $formula, "` in a new buffer.")]
        ///
        /// ```
        /// # gpu_pool_train::example!(|dev| {
        #[doc = concat!("let (x, y) = (dev.upload(&[", $x, "f32])?, dev.upload(&[", $y, "f32])?);")]
        #[doc = concat!("let z = dev.", stringify!($name), "(&x, &y)?;")]
        #[doc = concat!("assert_eq!(dev.download(&z)?, [", $z, "]);")]
        /// # Ok(()) });
        /// ```
        #[track_caller]
        fn $name<X: AsView<Elem: $Bound>>(
            &self,
            x: &X,
            y: &impl AsView<Elem = X::Elem>,
        ) -> Result<DeviceBuffer<X::Elem>> {
            let (x, y) = (x.view(), y.view());
            let mut z = self.allocate(stringify!($name), x.len())?;
            $launch(self.device(), stringify!($name), Binary::$which, Some(x), y, z.view_mut())?;
            Ok(z)
        }

        #[doc = concat!("`z = ", $formula, "`.")]
        #[track_caller]
        fn $into<X: AsView<Elem: $Bound>>(
            &self,
            x: &X,
            y: &impl AsView<Elem = X::Elem>,
            z: &mut impl AsViewMut<Elem = X::Elem>,
        ) -> Result<()> {
            $launch(self.device(), stringify!($into), Binary::$which, Some(x.view()), y.view(), z.view_mut())
        }

        #[doc = concat!("`x = ", $formula, "`, in place.")]
        #[track_caller]
        fn $assign<X: AsViewMut<Elem: $Bound>>(&self, x: &mut X, y: &impl AsView<Elem = X::Elem>) -> Result<()> {
            $launch(self.device(), stringify!($assign), Binary::$which, None, y.view(), x.view_mut())
        }
    )+};
}

pub(super) use binary;

/// A kernel's parameter of 32 bits, of which the top one is not used.
#[track_caller]
pub(super) fn small(op: &'static str, what: &str, n: usize) -> Result<u32> {
    invalid_if!(n > i32::MAX as usize, op, "{n} {what}: at most 2^31 - 1 are possible");
    Ok(n as u32)
}

/// `y = f(x, other)` for each of `n` elements. In place, `y` is the input.
pub(super) fn each<T: Copy, O>(
    n: u64,
    x: Option<&[T]>,
    y: &mut [T],
    others: impl Iterator<Item = O>,
    f: impl Fn(T, O) -> T,
) {
    let y = y[..n as usize].iter_mut();
    match x {
        Some(x) => y.zip(x).zip(others).for_each(|((y, x), other)| *y = f(*x, other)),
        None => y.zip(others).for_each(|(y, other)| *y = f(*y, other)),
    }
}

pub(super) fn each_row<T>(x: &[T], rows: u64, cols: u32) -> impl Iterator<Item = &[T]> {
    x.chunks_exact(cols as usize).take(rows as usize)
}

pub(super) fn each_row_mut<T>(x: &mut [T], rows: u64, cols: u32) -> impl Iterator<Item = &mut [T]> {
    x.chunks_exact_mut(cols as usize).take(rows as usize)
}

pub(super) fn wide<T: Float>(x: &T) -> T::Acc {
    T::wide(*x)
}
