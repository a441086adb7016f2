//! Sums, differences and products of two buffers, element by element: `binary` of `kernels/pointwise.cu`.
//!
//! `Device`'s methods check lengths and launch one kernel each. They use the launch of `device` and the types of
//! `kernel`, and nothing above.
//!
//! Invariant: each element is computed by itself, in `f32` (of `f64` in `f64`), and rounded once.

use super::{
    family::{Address, In, Out, address, kernels, tiles},
    same_len,
};
use crate::{
    Device, DeviceBuffer, LaunchDims,
    error::Result,
    kernel::builtin::{Float, module},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};
use std::panic::Location;

module! { POINTWISE, "pointwise" }

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

fn host_binary_assign<T: Float>(_: LaunchDims, _: Address, y: &[T], x: &mut [T], n: u64, op: u32) {
    x[..n as usize].iter_mut().zip(y).for_each(|(x, y)| *x = binary(op, *x, *y));
}
kernels! { POINTWISE;
    fn binary_kernel(In<T>, In<T>, Out<T>, u64, u32) = "binary", host_binary::<T>;
    fn binary_assign_kernel(Address, In<T>, Out<T>, u64, u32) = "binary", host_binary_assign::<T>;
}

/// The three forms of an operation of two buffers.
macro_rules! binary {
    ($($name:ident $into:ident $assign:ident $which:ident $sign:literal $x:literal $y:literal $z:literal;)+) => {
        /// Sums, differences and products, element by element. Half types are computed in `f32` and rounded once. All
        /// are asynchronous on the current stream and can be captured.
        ///
        /// Errors of all: [`Error::InvalidArgument`](crate::Error::InvalidArgument) for different lengths,
        /// [`Error::WrongDevice`](crate::Error::WrongDevice), [`Error::Aborted`](crate::Error::Aborted),
        /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) where a buffer is returned, and the driver's.
        impl Device {$(
            #[doc = concat!("`x ", $sign, " y` in a new buffer.")]
            ///
            /// ```
            /// # use gpu_pool::GpuPool;
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
            pub fn $name<X, Y>(&self, x: &X, y: &Y) -> Result<DeviceBuffer<X::Elem>>
            where
                X: AsView + ?Sized,
                Y: AsView<Elem = X::Elem> + ?Sized,
                X::Elem: Float,
            {
                let (x, y) = (x.view(), y.view());
                let mut z = self.allocate(stringify!($name), x.len())?;
                self.binary(stringify!($name), Binary::$which, x, y, z.view_mut())?;
                Ok(z)
            }

            #[doc = concat!("`z = x ", $sign, " y`.")]
            ///
            /// ```
            /// # use gpu_pool::GpuPool;
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
            pub fn $into<X, Y, Z>(&self, x: &X, y: &Y, z: &mut Z) -> Result<()>
            where
                X: AsView + ?Sized,
                Y: AsView<Elem = X::Elem> + ?Sized,
                Z: AsViewMut<Elem = X::Elem> + ?Sized,
                X::Elem: Float,
            {
                self.binary(stringify!($into), Binary::$which, x.view(), y.view(), z.view_mut())
            }

            #[doc = concat!("`x = x ", $sign, " y`, in place.")]
            ///
            /// ```
            /// # use gpu_pool::GpuPool;
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
            pub fn $assign<X, Y>(&self, x: &mut X, y: &Y) -> Result<()>
            where
                X: AsViewMut + ?Sized,
                Y: AsView<Elem = X::Elem> + ?Sized,
                X::Elem: Float,
            {
                let (x, y) = (x.view_mut(), y.view());
                let _here = self.worker.handle.enter(stringify!($assign), Location::caller());
                same_len(stringify!($assign), x.len(), y.len())?;
                let (n, at) = (x.len(), address(&x));
                let args = (at, y, x, n as u64, Binary::$which as u32);
                // SAFETY: the kernel reads `n` elements of `y`, and reads and writes `n` of `x`.
                unsafe { self.launch(&binary_assign_kernel::<X::Elem>(), tiles::<X::Elem>(n), args) }
            }
        )+}
    };
}
binary! {
    add add_into add_assign Add "+" "1.0" "2.0" "3.0";
    sub sub_into sub_assign Sub "-" "1.0" "2.0" "-1.0";
    mul mul_into mul_assign Mul "*" "3.0" "2.0" "6.0";
}

impl Device {
    #[track_caller]
    fn binary<T: Float>(
        &self,
        op: &'static str,
        which: Binary,
        x: DeviceView<'_, T>,
        y: DeviceView<'_, T>,
        z: DeviceViewMut<'_, T>,
    ) -> Result<()> {
        let _here = self.worker.handle.enter(op, Location::caller());
        same_len(op, x.len(), y.len())?;
        same_len(op, x.len(), z.len())?;
        let n = x.len();
        // SAFETY: all three have `n` elements.
        unsafe { self.launch(&binary_kernel::<T>(), tiles::<T>(n), (x, y, z, n as u64, which as u32)) }
    }
}
