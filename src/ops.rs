//! The basic operations on buffers. Each takes views, launches a kernel (or a fill, or cuBLAS), and is asynchronous on
//! the current stream. The functions at the end are for `gpu-pool-train`, too.

mod cast;
#[cfg(feature = "blas")]
mod gemm;
#[cfg(feature = "blas")]
mod layout;
#[cfg(feature = "blas")]
mod matrix;

use crate::{
    Device, DeviceBuffer, LaunchDims,
    error::{Error, Result, op_site::OpSite},
    kernel::builtin::{CastTo, FILL_U16, FILL_U64, Float, SUM_BLOCKS, SUM_THREADS},
    memory::{AsView, AsViewMut, DeviceCopy, DeviceView, DeviceViewMut},
};
use std::marker::PhantomData;

#[cfg(feature = "blas")]
pub use self::matrix::{GemmOutput, Matrix, MatrixMut};

const PARTIAL: LaunchDims = LaunchDims { grid: (SUM_BLOCKS, 1, 1), block: (SUM_THREADS, 1, 1), shared_bytes: 0 };

/// Adopted memory may be aligned for its elements only, which may be arrays of bytes.
#[track_caller]
fn is_aligned_for<W>(address: u64) -> Result<()> {
    let is_aligned = address.is_multiple_of(size_of::<W>() as u64);
    invalid_if!(!is_aligned, "fill", "elements of {} bytes at the address {address:#x}", size_of::<W>());
    Ok(())
}

/// Built-in operations. All are asynchronous on the current stream. Errors are [`Error::WrongDevice`],
/// [`Error::Aborted`], [`Error::OutOfMemory`] for those that return a buffer, and the driver's.
impl Device {
    /// Sets every element to `value`. Elements have 1, 2, 4 or 8 bytes.
    ///
    /// ```
    /// # gpu_pool::extend::example(|dev| {
    /// let mut x = dev.zeros::<i32>(3)?;
    /// dev.fill(&mut x, -7)?;
    /// assert_eq!(dev.download(&x)?, [-7; 3]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for elements of another size; else see above.
    #[track_caller]
    pub fn fill<V: AsViewMut>(&self, x: &mut V, value: V::Elem) -> Result<()> {
        let x = x.view_mut();
        let bytes = bytemuck::bytes_of(&value);
        match *bytes {
            [byte] => {
                let mut op = self.op_in_graph("fill")?;
                op.writes(&x)?;
                // SAFETY: the view is live memory of this device, ordered and noted by `op`.
                op.submit(|driver, stream| unsafe { driver.fill_u8(x.address(), byte, x.len(), stream) })
            }
            [a, b, c, d] => {
                let mut op = self.op_in_graph("fill")?;
                op.writes(&x)?;
                is_aligned_for::<u32>(x.address())?;
                let word = u32::from_ne_bytes([a, b, c, d]);
                // SAFETY: as above, and the address is aligned.
                op.submit(|driver, stream| unsafe { driver.fill_u32(x.address(), word, x.len(), stream) })
            }
            [a, b] => self.fill_by_kernel(x, &FILL_U16, u16::from_ne_bytes([a, b])),
            [_, _, _, _, _, _, _, _] => {
                let mut word = [0; 8];
                word.copy_from_slice(bytes);
                self.fill_by_kernel(x, &FILL_U64, u64::from_ne_bytes(word))
            }
            _ => Err(Error::invalid("fill", format_args!("elements of {} bytes", bytes.len()))),
        }
    }

    #[track_caller]
    fn fill_by_kernel<T: DeviceCopy, W: crate::kernel::Scalar>(
        &self,
        x: DeviceViewMut<'_, T>,
        kernel: &'static crate::Kernel<(&'static mut [W], u64, W)>,
        value: W,
    ) -> Result<()> {
        let n = x.len();
        is_aligned_for::<W>(x.address())?;
        // SAFETY: `W` is as large as the element, and the address is aligned for it, so the words are the view's own
        // bytes; the kernel writes `n` of them.
        unsafe { self.launch(kernel, fours_of_packs::<W>(n), (as_type_mut::<T, W>(x, n), n as u64, value)) }
    }

    /// `x *= a`.
    ///
    /// ```
    /// # gpu_pool::extend::example(|dev| {
    /// let mut x = dev.upload(&[1.0f32, 2.0])?;
    /// dev.scale(&mut x, 0.5)?;
    /// assert_eq!(dev.download(&x)?, [0.5, 1.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    pub fn scale<V: AsViewMut<Elem: Float>>(&self, x: &mut V, a: <V::Elem as Float>::Acc) -> Result<()> {
        let x = x.view_mut();
        let _here = OpSite::here("scale");
        let n = x.len();
        // SAFETY: the kernel writes the `n` elements of `x`.
        unsafe { self.launch(V::Elem::SCALE, tiles::<V::Elem>(n), (x, n as u64, a)) }
    }

    /// `y += a * x`; half types are computed in `f32`.
    ///
    /// ```
    /// # gpu_pool::extend::example(|dev| {
    /// let (gradient, mut weights) = (dev.upload(&[1.0f32, 2.0])?, dev.upload(&[5.0f32, 5.0])?);
    /// dev.axpy(-0.5, &gradient, &mut weights)?;
    /// assert_eq!(dev.download(&weights)?, [4.5, 4.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths; else see above.
    #[track_caller]
    pub fn axpy<X: AsView<Elem: Float>>(
        &self,
        a: <X::Elem as Float>::Acc,
        x: &X,
        y: &mut impl AsViewMut<Elem = X::Elem>,
    ) -> Result<()> {
        let (x, y) = (x.view(), y.view_mut());
        let _here = OpSite::here("axpy");
        same_len("axpy", x.len(), y.len())?;
        let n = x.len();
        // SAFETY: the kernel reads `n` elements of `x` and writes `n` of `y`.
        unsafe { self.launch(X::Elem::AXPY, tiles::<X::Elem>(n), (x, y, n as u64, a)) }
    }

    /// The sum, as one element on this device. The order of the additions is fixed, so every run gives the same bits.
    /// `f32` and half types are summed in `f32`, pairwise, so that the error grows with the logarithm of the length.
    ///
    /// ```
    /// # gpu_pool::extend::example(|dev| {
    /// let x = dev.upload(&[1.0f32, 2.0, 3.0])?;
    /// assert_eq!(dev.download(&dev.sum(&x)?)?, [6.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    pub fn sum<V: AsView<Elem: Float>>(&self, x: &V) -> Result<DeviceBuffer<V::Elem>> {
        let x = x.view();
        let _here = OpSite::here("sum");
        let mut partial = self.allocate("sum", SUM_BLOCKS as usize)?;
        // SAFETY: the kernel reads the elements of `x` and writes one partial sum per block.
        unsafe { self.launch(V::Elem::SUM_PARTIAL, PARTIAL, (x, &mut partial, x.len() as u64))? };
        self.sum_partials(&partial)
    }

    /// The dot product, as one element on this device; summed as in [`sum`](Self::sum).
    ///
    /// ```
    /// # gpu_pool::extend::example(|dev| {
    /// let x = dev.upload(&[1.0f32, 2.0, 3.0])?;
    /// assert_eq!(dev.download(&dev.dot(&x, &x)?)?, [14.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for different lengths; else see above.
    #[track_caller]
    pub fn dot<X: AsView<Elem: Float>>(&self, x: &X, y: &impl AsView<Elem = X::Elem>) -> Result<DeviceBuffer<X::Elem>> {
        let (x, y) = (x.view(), y.view());
        let _here = OpSite::here("dot");
        same_len("dot", x.len(), y.len())?;
        let mut partial = self.allocate("dot", SUM_BLOCKS as usize)?;
        // SAFETY: the kernel reads the elements of `x` and `y` and writes one partial sum per block.
        unsafe { self.launch(X::Elem::DOT_PARTIAL, PARTIAL, (x, y, &mut partial, x.len() as u64))? };
        self.sum_partials(&partial)
    }

    #[track_caller]
    fn sum_partials<T: Float>(&self, partial: &DeviceBuffer<T::Acc>) -> Result<DeviceBuffer<T>> {
        let mut out = self.allocate("sum", 1)?;
        let dims = LaunchDims { grid: (1, 1, 1), ..PARTIAL };
        // SAFETY: the first pass has written all partial sums; this one writes the one element of `out`.
        unsafe { self.launch(T::SUM_FINAL, dims, (partial, &mut out, SUM_BLOCKS))? };
        Ok(out)
    }

    /// A copy in another type, by the rules of `as`: to a floating-point type rounded to nearest; from there to an
    /// integer cut towards zero and saturated, NaN is 0; between integers the low bits.
    ///
    /// ```
    /// # gpu_pool::extend::example(|dev| {
    /// let x = dev.upload(&[2.9f32, -1e9, f32::NAN])?;
    /// assert_eq!(dev.download(&dev.cast::<i8, _>(&x)?)?, [2, -128, 0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    pub fn cast<B: DeviceCopy, V: AsView<Elem: CastTo<B>>>(&self, x: &V) -> Result<DeviceBuffer<B>> {
        let x: DeviceView<'_, V::Elem> = x.view();
        let _here = OpSite::here("cast");
        let n = x.len();
        let mut y = self.allocate("cast", n)?;
        // SAFETY: the kernel reads `n` elements of `x` and writes `n` of `y`.
        unsafe { self.launch(<V::Elem as CastTo<B>>::CAST, LaunchDims::stride(n.div_ceil(4)), (x, &mut y, n as u64))? };
        Ok(y)
    }
}

/// Elements of a pack, which a thread loads at once.
pub fn lanes<T>() -> usize {
    16 / size_of::<T>()
}

/// A thread for two packs of `n` elements: tiles of `kernels/pack.cuh`.
pub fn tiles<T>(n: usize) -> LaunchDims {
    LaunchDims::stride(n.div_ceil(2 * lanes::<T>()))
}

/// A thread for up to four packs of `n` elements, so that starting it does not count; for fewer where `n` is too small
/// to fill a GPU. Kernels without input do little else.
pub fn fours_of_packs<T>(n: usize) -> LaunchDims {
    let packs = n.div_ceil(lanes::<T>());
    LaunchDims::stride((packs / 4).max(packs.min(1 << 19)))
}

/// The same memory as elements of another type.
///
/// # Safety
/// `len` elements of `B` are the view's bytes, or fewer.
pub unsafe fn as_type<'a, A: DeviceCopy, B: DeviceCopy>(x: DeviceView<'a, A>, len: usize) -> DeviceView<'a, B> {
    DeviceView { block: x.block, address: x.address, len, of: PhantomData }
}

/// As [`as_type`], of what is written.
///
/// # Safety
/// As for [`as_type`].
pub unsafe fn as_type_mut<'a, A: DeviceCopy, B: DeviceCopy>(
    x: DeviceViewMut<'a, A>,
    len: usize,
) -> DeviceViewMut<'a, B> {
    DeviceViewMut { block: x.block, address: x.address, len, of: PhantomData }
}

/// The rows of `cols` elements in `len`. Fewer columns than 2^31, at least one, and no part of a row.
#[track_caller]
pub fn rows_of(op: &'static str, len: usize, cols: usize) -> Result<usize> {
    invalid_if!(cols == 0 || cols > i32::MAX as usize, op, "rows of {cols} elements: 1 to 2^31 - 1 are possible");
    invalid_if!(!len.is_multiple_of(cols), op, "{len} elements are not rows of {cols}");
    Ok(len / cols)
}

/// `Err` unless two lengths are the same.
#[track_caller]
pub fn same_len(op: &'static str, a: usize, b: usize) -> Result<()> {
    if a == b { Ok(()) } else { Err(Error::invalid(op, format_args!("{a} and {b} elements"))) }
}
