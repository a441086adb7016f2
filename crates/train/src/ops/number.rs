//! Numbers of all ten types: quotients, smaller and larger ones, the smallest and the largest of a buffer; exponentials
//! and roots of floats. `kernels/number.cu`.
//!
//! Invariant: each element is computed alone and rounded once. The smallest and the largest are the same in any order.

use super::family::{In, Input, Maybe, Out, binary, each, kernels};
use crate::kernels::NUMBER;
use crate::runtime::{ErrorInternals, Operations, Real, as_type, as_type_mut, lanes, same_len, stride, tiles};
use gpu_pool::{
    AsView, AsViewMut, DType, Device, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut, Element, Error, LaunchDims,
    Result, kernel::Float,
};
use half::{bf16, f16};
use std::iter::repeat;

/// The types of [`Numbers`] and [`Orders`](super::Orders): `f32`, `f64`, `half::f16`, `half::bf16`, and integers of 8,
/// 32 and 64 bits with and without a sign. Sealed, since the kernels are part of the crate.
pub trait Number: Element {
    /// The type of sums: `f32` for half types, else the same.
    type Sum: Number;
    /// The meaning of the bits: `Kind` of `kernels/words.cuh`.
    #[doc(hidden)]
    const KIND: u32;
    /// The bits of infinity. Integers have none, and none of their magnitudes is beyond this.
    #[doc(hidden)]
    const INFINITY: u64;
    #[doc(hidden)]
    fn quotient(x: Self, y: Self) -> Self;
    #[doc(hidden)]
    fn plus(x: Self, y: Self) -> Self;
    #[doc(hidden)]
    fn to_sum(x: Self) -> Self::Sum;
    #[doc(hidden)]
    fn of_sum(x: Self::Sum) -> Self;
}

const UNSIGNED: u32 = 0;
const SIGNED: u32 = 1;
const FLOAT: u32 = 2;

macro_rules! numbers {
    ($($T:ty: $Sum:ty, $kind:ident, $infinity:expr, $quotient:expr, $plus:expr, $to:expr, $of:expr;)+) => {$(
        impl Number for $T {
            type Sum = $Sum;
            const KIND: u32 = $kind;
            const INFINITY: u64 = $infinity;
            fn quotient(x: Self, y: Self) -> Self {
                $quotient(x, y)
            }
            fn plus(x: Self, y: Self) -> Self {
                $plus(x, y)
            }
            fn to_sum(x: Self) -> $Sum {
                $to(x)
            }
            fn of_sum(x: $Sum) -> Self {
                $of(x)
            }
        }
    )+};
    ($($T:ty: $kind:ident;)+) => {
        numbers! { $(
            $T: $T, $kind, u64::MAX, |x: $T, y| if y == 0 { 0 } else { x.wrapping_div(y) }, <$T>::wrapping_add,
                same, same;
        )+ }
    };
}
numbers! {
    f32: f32, FLOAT, 0x7f80_0000, |x, y| x / y, |x, y| x + y, same, same;
    f64: f64, FLOAT, 0x7ff0 << 48, |x, y| x / y, |x, y| x + y, same, same;
    f16: f32, FLOAT, 0x7c00, |x: f16, y: f16| f16::from_f32(x.to_f32() / y.to_f32()), |x, y| x + y,
        f16::to_f32, f16::from_f32;
    bf16: f32, FLOAT, 0x7f80, |x: bf16, y: bf16| bf16::from_f32(x.to_f32() / y.to_f32()), |x, y| x + y,
        bf16::to_f32, bf16::from_f32;
}
numbers! { i8: SIGNED; u8: UNSIGNED; i32: SIGNED; u32: UNSIGNED; i64: SIGNED; u64: UNSIGNED; }

fn same<T>(x: T) -> T {
    x
}

pub(super) trait Word: DeviceCopy + Into<u64> {}
impl<T: DeviceCopy + Into<u64>> Word for T {}

/// Evaluates an expression with a type's word for `W`.
macro_rules! by_word {
    ($T:ty, $W:ident => $call:expr) => {
        match size_of::<$T>() {
            1 => by_word!(@ $W u8 => $call),
            2 => by_word!(@ $W u16 => $call),
            4 => by_word!(@ $W u32 => $call),
            _ => by_word!(@ $W u64 => $call),
        }
    };
    (@ $W:ident $own:ty => $call:expr) => {{
        type $W = $own;
        $call
    }};
}
pub(super) use by_word;

/// An unsigned number for each, in the order of the numbers: `key` of `kernels/words.cuh`.
pub(super) fn key<W: Word>(x: W, kind: u32) -> u64 {
    let (bits, all) = (x.into(), u64::MAX >> (64 - 8 * size_of::<W>()));
    let sign = all ^ (all >> 1);
    match kind {
        UNSIGNED => bits,
        FLOAT if bits & sign != 0 => !bits & all,
        _ => bits ^ sign,
    }
}

fn better<W: Word>(x: W, y: W, infinity: u64, kind: u32, larger: u32) -> W {
    let magnitudes = u64::MAX >> (65 - 8 * size_of::<W>());
    match [x, y].into_iter().find(|&x| x.into() & magnitudes > infinity) {
        Some(nan) => nan,
        None if (key(x, kind) < key(y, kind)) == (larger != 0) => y,
        None => x,
    }
}

kernels! { NUMBER of Number;
    fn divide(_, x: Maybe<T>, y: In<T>, z: Out<T>, n: u64) = "divide" {
        each(n, x, z, y.iter(), |x, y| T::quotient(x, *y));
    }
}
kernels! { NUMBER of Word;
    fn select(_, x: Maybe<T>, y: In<T>, z: Out<T>, n: u64, infinity: u64, kind: u32, larger: u32) = "select" {
        each(n, x, z, y.iter(), |x, y| better(x, *y, infinity, kind, larger));
    }
    fn extreme_kernel(_, x: In<T>, out: Out<T>, n: u64, infinity: u64, kind: u32, larger: u32) = "extreme" {
        let of = |best, x: &T| better(best, *x, infinity, kind, larger);
        // Each block's is that of all: so is the result.
        out.fill(x[..n as usize].iter().fold(x[0], of));
    }
}
kernels! { NUMBER;
    fn unary_kernel(_, x: Maybe<T>, y: Out<T>, n: u64, op: u32) = "unary" {
        each(n, x, y, repeat(()), |x, ()| {
            let x = T::wide(x);
            T::narrow(if op == 0 { x.exp() } else { x.sqrt() })
        });
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Binary {
    Div,
    Min,
    Max,
}

/// The functions of one argument, as `kernels/number.cu` counts them, with their forms.
macro_rules! unary {
    ($($name:ident $in_place:ident $op:literal $x:literal $y:literal $what:literal;)+) => {$(
        #[doc = concat!($what, ", in a new buffer. Of floats.")]
        ///
        /// ```
        /// # gpu_pool_train::example!(|dev| {
        #[doc = concat!("let x = dev.upload(&[", $x, "f32])?;")]
        #[doc = concat!("assert_eq!(dev.download(&dev.", stringify!($name), "(&x)?)?, [", $y, "]);")]
        /// # Ok(()) });
        /// ```
        #[track_caller]
        fn $name<X: AsView<Elem: Float>>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>> {
            let (x, _here) = (x.view(), self.enter(stringify!($name)));
            let (n, mut y) = (x.len(), self.allocate(stringify!($name), x.len())?);
            let args = (Input::View(x), &mut y, n as u64, $op);
            // SAFETY: both have `n` elements.
            unsafe { self.launch(&unary_kernel::<X::Elem>(), tiles::<X::Elem>(n), args)? };
            Ok(y)
        }

        #[doc = concat!($what, ", in place. Of floats.")]
        #[track_caller]
        fn $in_place<X: AsViewMut<Elem: Float>>(&self, x: &mut X) -> Result<()> {
            let (x, _here) = (x.view_mut(), self.enter(stringify!($in_place)));
            let (n, at) = (x.len(), Input::Output(x.address()));
            // SAFETY: the kernel reads and writes `n` elements of `x`.
            unsafe { self.launch(&unary_kernel::<X::Elem>(), tiles::<X::Elem>(n), (at, x, n as u64, $op)) }
        }
    )+};
}

macro_rules! extremes {
    ($($name:ident $larger:literal $y:literal $what:literal;)+) => {$(
        #[doc = concat!("The ", $what, " element, as one element on this device.")]
        ///
        /// ```
        /// # gpu_pool_train::example!(|dev| {
        /// let x = dev.upload(&[3i32, -7, 5])?;
        #[doc = concat!("assert_eq!(dev.download(&dev.", stringify!($name), "(&x)?)?, [", $y, "]);")]
        /// # Ok(()) });
        /// ```
        ///
        /// # Errors
        /// [`Error::InvalidArgument`] if there are no elements; else see above.
        #[track_caller]
        fn $name<X: AsView<Elem: Number>>(&self, x: &X) -> Result<DeviceBuffer<X::Elem>> {
            extreme(self.device(), stringify!($name), x.view(), $larger)
        }
    )+};
}

/// Quotients, smaller and larger ones, element by element, and the smallest and the largest of all, of floats and
/// integers ([`Number`]); exponentials and roots of floats. Streams and errors: see [`ops`](super).
///
/// Half types are computed in `f32` and rounded once. Quotients of integers are cut towards zero; one by 0 is 0, and
/// that of the least by -1 wraps. Where a NaN is compared, the result is a NaN, as in PyTorch. -0 is less than 0.
pub trait Numbers: Operations {
    binary! { Number, launch;
        div div_into div_in_place Div "x / y" "3.0" "2.0" "1.5";
        minimum minimum_into minimum_in_place Min "min(x, y)" "3.0" "2.0" "2.0";
        maximum maximum_into maximum_in_place Max "max(x, y)" "3.0" "2.0" "3.0";
    }
    extremes! {
        min 0 "-7" "smallest";
        max 1 "5" "largest";
    }
    unary! {
        exp exp_in_place 0 "0.0" "1.0" "`e` to the power of `x`";
        sqrt sqrt_in_place 1 "9.0" "3.0" "The square root";
    }
}

impl Numbers for Device {}

#[track_caller]
fn launch<T: Number>(
    dev: &Device,
    op: &'static str,
    which: Binary,
    x: Option<DeviceView<'_, T>>,
    y: DeviceView<'_, T>,
    z: DeviceViewMut<'_, T>,
) -> Result<()> {
    let _here = dev.enter(op);
    let len = y.len();
    same_len(op, x.map_or(z.len(), |x| x.len()), len)?;
    same_len(op, z.len(), len)?;
    let (n, dims, larger) = (len as u64, stride(len.div_ceil(4)), u32::from(which == Binary::Max));
    // SAFETY: all have `n` elements. In place the kernel reads and writes `z`. Words are as large as the elements.
    unsafe {
        let output = z.address();
        if which == Binary::Div {
            return dev.launch(&divide::<T>(), dims, (Input::view_or(x, output), y, z, n));
        }
        by_word!(T, W => {
            let x = Input::view_or(x.map(|x| as_type::<T, W>(x, len)), output);
            let (y, z) = (as_type::<T, W>(y, len), as_type_mut::<T, W>(z, len));
            dev.launch(&select::<W>(), dims, (x, y, z, n, T::INFINITY, T::KIND, larger))
        })
    }
}

const THREADS: usize = 256;

#[track_caller]
fn extreme<T: Number>(dev: &Device, op: &'static str, x: DeviceView<'_, T>, larger: u32) -> Result<DeviceBuffer<T>> {
    let _here = dev.enter(op);
    invalid_if!(x.is_empty(), op, "no elements");
    let blocks = x.len().div_ceil(THREADS * lanes::<T>()).min(THREADS);
    let dims =
        |blocks: usize| LaunchDims { grid: (blocks as u32, 1, 1), block: (THREADS as u32, 1, 1), shared_bytes: 0 };
    let (mut some, mut one) = (dev.allocate::<T>(op, blocks)?, dev.allocate::<T>(op, 1)?);
    by_word!(T, W => {
        let launch = |x: DeviceView<'_, T>, out: DeviceViewMut<'_, T>| {
            let (n, blocks) = (x.len(), out.len());
            // SAFETY: words are as large as the elements; the kernel reads `n`, and writes one for each block.
            unsafe {
                let (x, out) = (as_type::<T, W>(x, n), as_type_mut::<T, W>(out, blocks));
                let args = (x, out, n as u64, T::INFINITY, T::KIND, larger);
                dev.launch(&extreme_kernel::<W>(), dims(blocks), args)
            }
        };
        launch(x, some.view_mut())?;
        launch(some.view(), one.view_mut())?;
    });
    Ok(one)
}
