//! What the operations' files share: kernels that are declared once for the four types, and checks of shapes.
//!
//! A kernel of a family is a generic host kernel and a symbol for each type, `<name>_f32` and so on (`kernels!`).
//! Its module is loaded at its first launch, not when a pool is built.
//!
//! **In place.** The device functions take an output that is one of the inputs. A Rust slice cannot be both, so the
//! input's parameter is then a number: the address ([`Address`]) of the output beside it. The hazards see the output.

use crate::{
    LaunchDims,
    error::{Error, Result},
    kernel::builtin::Float,
    memory::{DeviceCopy, DeviceView, DeviceViewMut},
};

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
        $vis fn $name<T: Float>() -> $crate::Kernel<($($p,)+)> {
            let symbols = [concat!($sym, "_f32"), concat!($sym, "_f64"), concat!($sym, "_f16"), concat!($sym, "_bf16")];
            $crate::Kernel::new(&$module, symbols[T::KIND], $host)
        }
    )+};
}
pub(super) use kernels;

/// Elements of a pack: what a thread loads at once.
pub(super) fn lanes<T>() -> usize {
    16 / size_of::<T>()
}

/// A thread for two packs of `n` elements: tiles of `kernels/pack.cuh`.
pub(super) fn tiles<T>(n: usize) -> LaunchDims {
    LaunchDims::stride(n.div_ceil(2 * lanes::<T>()))
}

/// A thread for up to four packs of `n` elements, so that starting it does not count; for fewer where `n` is too small
/// to fill a GPU. Kernels without input do little else.
pub(super) fn fours_of_packs<T>(n: usize) -> LaunchDims {
    let packs = n.div_ceil(lanes::<T>());
    LaunchDims::stride((packs / 4).max(packs.min(1 << 19)))
}

/// The address of what an operation changes in place.
pub(super) fn address<T: DeviceCopy>(x: &DeviceViewMut<'_, T>) -> Address {
    x.address
}

/// The same memory as elements of another type.
///
/// # Safety
/// `len` elements of `B` are the view's bytes, or fewer.
pub(super) unsafe fn as_type<'a, A: DeviceCopy, B: DeviceCopy>(x: DeviceView<'a, A>, len: usize) -> DeviceView<'a, B> {
    DeviceView { block: x.block, address: x.address, len, of: std::marker::PhantomData }
}

/// As [`as_type`], of what is written.
///
/// # Safety
/// As for [`as_type`].
pub(super) unsafe fn as_type_mut<'a, A: DeviceCopy, B: DeviceCopy>(
    x: DeviceViewMut<'a, A>,
    len: usize,
) -> DeviceViewMut<'a, B> {
    DeviceViewMut { block: x.block, address: x.address, len, of: std::marker::PhantomData }
}

/// The rows of `cols` elements in `len`. Fewer columns than 2^31, at least one, and no part of a row.
#[track_caller]
pub(super) fn rows_of(op: &'static str, len: usize, cols: usize) -> Result<usize> {
    if cols == 0 || cols > i32::MAX as usize {
        return Err(Error::invalid(op, format_args!("rows of {cols} elements: 1 to 2^31 - 1 are possible")));
    }
    if !len.is_multiple_of(cols) {
        return Err(Error::invalid(op, format_args!("{len} elements are not rows of {cols}")));
    }
    Ok(len / cols)
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
