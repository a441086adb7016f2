//! What the operations' files share: kernels that are declared once for the four types, and checks of shapes.
//!
//! A kernel of a family is a generic host kernel and a symbol for each type, `<name>_f32` and so on (`kernels!`).
//!
//! **In place.** The device functions take an output that is one of the inputs. A Rust slice cannot be both, so the
//! input's parameter is then a number: the address ([`Address`]) of the output beside it. The hazards see the output.

use gpu_pool::{DeviceCopy, DeviceViewMut, Error, Result, extend::ErrorInternals, kernel::Float};

/// A parameter that a kernel reads.
pub(super) type In<T> = &'static [T];
/// A parameter that a kernel reads and writes.
pub(super) type Out<T> = &'static mut [T];
/// In the place of an input: the address of the output that it is, or null.
pub(super) type Address = u64;
/// No memory.
pub(super) const NULL: Address = 0;

/// Declares kernels of the four types: `fn name(parameters) = "symbol", host kernel;`, with `T` for the type.
macro_rules! kernels {
    ($module:ident; $($(#[$m:meta])* $vis:vis fn $name:ident($($p:ty),+ $(,)?) = $sym:literal, $host:expr;)+) => {$(
        $(#[$m])*
        $vis fn $name<T: Float>() -> gpu_pool::Kernel<($($p,)+)> {
            let symbols = [concat!($sym, "_f32"), concat!($sym, "_f64"), concat!($sym, "_f16"), concat!($sym, "_bf16")];
            gpu_pool::Kernel::new(&$module, symbols[T::KIND], $host)
        }
    )+};
}
pub(super) use kernels;

/// The address of what an operation changes in place.
pub(super) fn address<T: DeviceCopy>(x: &DeviceViewMut<'_, T>) -> Address {
    x.address()
}

/// A kernel's parameter of 32 bits, of which the top one is not used.
#[track_caller]
pub(super) fn small(op: &'static str, what: &str, n: usize) -> Result<u32> {
    match i32::try_from(n) {
        Ok(n) => Ok(n as u32),
        Err(_) => Err(Error::invalid(op, format_args!("{n} {what}: at most 2^31 - 1 are possible"))),
    }
}

/// The rows of a host kernel.
pub(super) fn each_row<T>(x: &[T], rows: u64, cols: u32) -> impl Iterator<Item = &[T]> {
    x.chunks_exact(cols as usize).take(rows as usize)
}

/// As [`each_row`], to write.
pub(super) fn each_row_mut<T>(x: &mut [T], rows: u64, cols: u32) -> impl Iterator<Item = &mut [T]> {
    x.chunks_exact_mut(cols as usize).take(rows as usize)
}

/// A number in the type of the arithmetic, and back: for host kernels.
pub(super) fn wide<T: Float>(x: &T) -> T::Acc {
    T::wide(*x)
}
