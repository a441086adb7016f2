//! The common part of the operations' files: kernels that are declared once for the four types, and checks of shapes. A
//! kernel of a family is a generic host kernel and a symbol for each type, `<name>_f32` and so on (`kernels!`).
//!
//! **In place.** The device functions take an output that is one of the inputs. A Rust slice cannot be both, so the
//! input's parameter is then a number: the address ([`Address`]) of the output beside it. The hazards see the output.

use crate::runtime::ErrorInternals;
use gpu_pool::{DeviceCopy, DeviceViewMut, Error, Result, kernel::Float};

pub(super) type In<T> = &'static [T];
pub(super) type Out<T> = &'static mut [T];
/// In the place of an input: the address of the output that it is, or null.
pub(super) type Address = u64;
pub(super) const NULL: Address = 0;

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

pub(super) fn address<T: DeviceCopy>(x: &DeviceViewMut<'_, T>) -> Address {
    x.address()
}

/// A kernel's parameter of 32 bits, of which the top one is not used.
#[track_caller]
pub(super) fn small(op: &'static str, what: &str, n: usize) -> Result<u32> {
    invalid_if!(n > i32::MAX as usize, op, "{n} {what}: at most 2^31 - 1 are possible");
    Ok(n as u32)
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
