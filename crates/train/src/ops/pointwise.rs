//! Sums, differences and products of two buffers, element by element: `binary` of `kernels/pointwise.cu`.
//!
//! The methods check lengths and launch one kernel each. They use the runtime's launch and the types of its kernels,
//! and nothing above.
//!
//! Invariant: each element is computed by itself, in `f32` (of `f64` in `f64`), and rounded once.

use super::family::{Address, In, Out, address, kernels};
use crate::kernels::POINTWISE;
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, LaunchDims, Result,
    extend::train::{Operations, same_len, tiles},
    kernel::Float,
};

/// The operations of two buffers, as `kernels/pointwise.cu` counts them.
#[derive(Clone, Copy)]
enum Binary {
    Add,
    Sub,
    Mul,
}

fn binary<T: Float>(op: u32, x: T, y: T) -> T {
    let (x, y) = (T::wide(x), T::wide(y));
    T::narrow(match op {
        0 => x + y,
        1 => x - y,
        _ => x * y,
    })
}

fn host_binary<T: Float>(_: LaunchDims, x: &[T], y: &[T], z: &mut [T], n: u64, op: u32) {
    let inputs = x.iter().zip(y).take(n as usize);
    z.iter_mut().zip(inputs).for_each(|(z, (x, y))| *z = binary(op, *x, *y));
}

fn host_binary_in_place<T: Float>(_: LaunchDims, _: Address, y: &[T], x: &mut [T], n: u64, op: u32) {
    x[..n as usize].iter_mut().zip(y).for_each(|(x, y)| *x = binary(op, *x, *y));
}
kernels! { POINTWISE;
    fn binary_kernel(In<T>, In<T>, Out<T>, u64, u32) = "binary", host_binary::<T>;
    fn binary_assign_kernel(Address, In<T>, Out<T>, u64, u32) = "binary", host_binary_in_place::<T>;
}

/// The three forms of an operation of two buffers.
macro_rules! binary {
    ($($name:ident $into:ident $assign:ident $which:ident $sign:literal $x:literal $y:literal $z:literal;)+) => {$(
        #[doc = concat!("`x ", $sign, " y` in a new buffer.")]
        ///
        /// ```
        /// # use gpu_pool::GpuPool;
        /// # use gpu_pool_train::prelude::*;
        /// # let pool = GpuPool::builder().host(1).build()?;
        /// # pool.run(|dev, _| {
        #[doc = concat!("let (x, y) = (dev.upload(&[", $x, "f32])?, dev.upload(&[", $y, "f32])?);")]
        #[doc = concat!("let z = dev.", stringify!($name), "(&x, &y)?;")]
        #[doc = concat!("assert_eq!(dev.download(&z)?, [", $z, "]);")]
        /// # Ok(()) })?;
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
        ///
        /// # Errors
        /// See above.
        #[track_caller]
        fn $name<X, Y>(&self, x: &X, y: &Y) -> Result<DeviceBuffer<X::Elem>>
        where
            X: AsView + ?Sized,
            Y: AsView<Elem = X::Elem> + ?Sized,
            X::Elem: Float,
        {
            let (x, y) = (x.view(), y.view());
            let mut z = self.allocate(stringify!($name), x.len())?;
            launch(self.device(), stringify!($name), Binary::$which, x, y, z.view_mut())?;
            Ok(z)
        }

        #[doc = concat!("`z = x ", $sign, " y`.")]
        ///
        /// ```
        /// # use gpu_pool::GpuPool;
        /// # use gpu_pool_train::prelude::*;
        /// # let pool = GpuPool::builder().host(1).build()?;
        /// # pool.run(|dev, _| {
        #[doc = concat!("let (x, y) = (dev.upload(&[", $x, "f32])?, dev.upload(&[", $y, "f32])?);")]
        /// let mut z = dev.zeros::<f32>(1)?;
        #[doc = concat!("dev.", stringify!($into), "(&x, &y, &mut z)?;")]
        #[doc = concat!("assert_eq!(dev.download(&z)?, [", $z, "]);")]
        /// # Ok(()) })?;
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
        ///
        /// # Errors
        /// See above.
        #[track_caller]
        fn $into<X, Y, Z>(&self, x: &X, y: &Y, z: &mut Z) -> Result<()>
        where
            X: AsView + ?Sized,
            Y: AsView<Elem = X::Elem> + ?Sized,
            Z: AsViewMut<Elem = X::Elem> + ?Sized,
            X::Elem: Float,
        {
            launch(self.device(), stringify!($into), Binary::$which, x.view(), y.view(), z.view_mut())
        }

        #[doc = concat!("`x = x ", $sign, " y`, in place.")]
        ///
        /// ```
        /// # use gpu_pool::GpuPool;
        /// # use gpu_pool_train::prelude::*;
        /// # let pool = GpuPool::builder().host(1).build()?;
        /// # pool.run(|dev, _| {
        #[doc = concat!("let (mut x, y) = (dev.upload(&[", $x, "f32])?, dev.upload(&[", $y, "f32])?);")]
        #[doc = concat!("dev.", stringify!($assign), "(&mut x, &y)?;")]
        #[doc = concat!("assert_eq!(dev.download(&x)?, [", $z, "]);")]
        /// # Ok(()) })?;
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
        ///
        /// # Errors
        /// See above.
        #[track_caller]
        fn $assign<X, Y>(&self, x: &mut X, y: &Y) -> Result<()>
        where
            X: AsViewMut + ?Sized,
            Y: AsView<Elem = X::Elem> + ?Sized,
            X::Elem: Float,
        {
            let (x, y) = (x.view_mut(), y.view());
            let _here = self.enter(stringify!($assign));
            same_len(stringify!($assign), x.len(), y.len())?;
            let (n, at) = (x.len(), address(&x));
            let args = (at, y, x, n as u64, Binary::$which as u32);
            // SAFETY: the kernel reads `n` elements of `y`, and reads and writes `n` of `x`.
            unsafe { self.launch(&binary_assign_kernel::<X::Elem>(), tiles::<X::Elem>(n), args) }
        }
    )+};
}

/// Sums, differences and products, element by element. Half types are computed in `f32` and rounded once. All
/// are asynchronous on the current stream and can be captured.
///
/// Errors of all: [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for different lengths,
/// [`Error::WrongDevice`](gpu_pool::Error::WrongDevice), [`Error::Aborted`](gpu_pool::Error::Aborted),
/// [`Error::OutOfMemory`](gpu_pool::Error::OutOfMemory) where a buffer is returned, and the driver's.
pub trait Pointwise: Operations {
    binary! {
        add add_into add_in_place Add "+" "1.0" "2.0" "3.0";
        sub sub_into sub_in_place Sub "-" "1.0" "2.0" "-1.0";
        mul mul_into mul_in_place Mul "*" "3.0" "2.0" "6.0";
    }
}

impl Pointwise for Device {}

#[track_caller]
fn launch<T: Float>(
    dev: &Device,
    op: &'static str,
    which: Binary,
    x: DeviceView<'_, T>,
    y: DeviceView<'_, T>,
    z: DeviceViewMut<'_, T>,
) -> Result<()> {
    let _here = dev.enter(op);
    same_len(op, x.len(), y.len())?;
    same_len(op, x.len(), z.len())?;
    let n = x.len();
    // SAFETY: all three have `n` elements.
    unsafe { dev.launch(&binary_kernel::<T>(), tiles::<T>(n), (x, y, z, n as u64, which as u32)) }
}
