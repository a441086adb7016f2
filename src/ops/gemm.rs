//! The matrix product: checks of shapes, and the call.
//!
//! Users and `parallel` call it. It fills in a [`Gemm`] for the driver; it uses `token`, and the matrices beside it.

use super::matrix::{GemmOutput, Layout, Matrix};
use crate::{
    Device, DeviceBuffer,
    driver::{Gemm, GemmType},
    error::{Error, Result},
    kernel::{builtin::Float, real::Real},
    memory::DeviceCopy,
};

/// The types of a product, at the place of [`Float::KIND`].
const TYPES: [GemmType; 4] = [GemmType::F32, GemmType::F64, GemmType::F16, GemmType::Bf16];

impl Device {
    /// `c = alpha * a * b + beta * c`, by cuBLAS, or by the `gemm` crate on software GPUs. `c` is row-major, with as
    /// many rows as `a` and as many columns as `b`. With `beta == 0` the old contents of `c` are not read.
    ///
    /// `f32` is computed in `f32` (no TF32: see [`gemm_tf32`](Self::gemm_tf32)), `f64` in `f64`; sums of `f16` and
    /// `bf16` are `f32` and are rounded once; with `beta != 0` cuBLAS may round the product alone, too. An element is
    /// off by at most `(k + 3) e` times the sum of the absolute values of the terms that it is the sum of, with `e`
    /// 2^-23 (for `f64`: 2^-52); half types add the roundings.
    ///
    /// Of batches, each matrix is multiplied by that of the same place; a batch of one is used for all. `a` and `b` are
    /// [`Matrix`]: columns, rows, transposes and batches of a buffer's elements.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, Matrix};
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let c = pool.run(|dev, _| {
    ///     let a = dev.upload(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?; // 2 x 3
    ///     let mut c = dev.zeros::<f32>(4)?;
    ///     let a = Matrix::new(&a, 2, 3)?;
    ///     dev.gemm(1.0, a, a.t(), 0.0, &mut c)?;
    ///     dev.download(&c)
    /// })?;
    /// assert_eq!(c[0], [14.0, 32.0, 32.0, 77.0]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// The scores of attention with 2 heads, for 3 tokens of 4 elements: one batch.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, Matrix};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (q, k) = (dev.upload(&[1.0f32; 3 * 4])?, dev.upload(&[2.0f32; 3 * 4])?);
    /// let (q, k) = (Matrix::new(&q, 3, 4)?.split_columns(2)?, Matrix::new(&k, 3, 4)?.split_columns(2)?);
    /// let mut scores = dev.zeros::<f32>(2 * 3 * 3)?;
    /// dev.gemm(0.5, q, k.t(), 0.0, &mut scores)?;
    /// assert_eq!(dev.download(&scores)?, [2.0; 2 * 3 * 3]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the shapes do not fit, [`Error::WrongDevice`], [`Error::Aborted`], the driver's
    /// (also when cuBLAS is not installed).
    #[track_caller]
    pub fn gemm<T, C>(&self, alpha: T::Acc, a: Matrix<'_, T>, b: Matrix<'_, T>, beta: T::Acc, c: &mut C) -> Result<()>
    where
        T: Float,
        C: GemmOutput<Elem = T> + ?Sized,
    {
        self.multiply("gemm", TYPES[T::KIND], (alpha.to_f64(), beta.to_f64()), (a, b), c)
    }

    /// As [`gemm`](Self::gemm), but the GPU may round the elements of `a` and `b` to TF32 (10 bits of mantissa) and
    /// multiply on its tensor cores: several times faster, and each product is off by at most 2^-9 of itself more. On
    /// software GPUs it is `gemm`.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, Matrix};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, mut y) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.zeros::<f32>(4)?);
    /// let x = Matrix::new(&x, 2, 2)?;
    /// dev.gemm_tf32(1.0, x, x, 0.0, &mut y)?;
    /// assert_eq!(dev.download(&y)?, [7.0, 10.0, 15.0, 22.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of [`gemm`](Self::gemm).
    #[track_caller]
    pub fn gemm_tf32<C>(&self, alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: &mut C) -> Result<()>
    where
        C: GemmOutput<Elem = f32> + ?Sized,
    {
        self.multiply("gemm_tf32", GemmType::Tf32, (alpha.into(), beta.into()), (a, b), c)
    }

    /// The product `a * b` in a new buffer: [`gemm`](Self::gemm) with `alpha` 1 and `beta` 0. The products of a batch
    /// come one after the other.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, Matrix};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?;
    /// let y = dev.matmul(Matrix::new(&x, 2, 2)?, Matrix::new(&x, 2, 2)?.t())?;
    /// assert_eq!(dev.download(&y)?, [5.0, 11.0, 11.0, 25.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As of [`gemm`](Self::gemm), and [`Error::OutOfMemory`].
    #[track_caller]
    pub fn matmul<T: Float>(&self, a: Matrix<'_, T>, b: Matrix<'_, T>) -> Result<DeviceBuffer<T>> {
        let (x, y) = (a.layout, b.layout);
        let Some(len) = Layout::dense(x.count.max(y.count), x.rows, y.cols).elements() else {
            return Err(Error::invalid("matmul", format_args!("({x}) * ({y}) has too many elements")));
        };
        let mut c = self.allocate("matmul", len)?;
        self.multiply("matmul", TYPES[T::KIND], (1.0, 0.0), (a, b), &mut c)?;
        Ok(c)
    }

    #[track_caller]
    fn multiply<T: DeviceCopy, C: GemmOutput<Elem = T> + ?Sized>(
        &self,
        name: &'static str,
        of: GemmType,
        (alpha, beta): (f64, f64),
        (a, b): (Matrix<'_, T>, Matrix<'_, T>),
        c: &mut C,
    ) -> Result<()> {
        let (c, layout) = c.output();
        let mut op = self.op_in_graph(name)?;
        op.reads(&a.view)?;
        op.reads(&b.view)?;
        op.writes(&c)?;
        let (x, y) = (a.layout, b.layout);
        let count = if x.count == 1 { y.count } else { x.count };
        let want = Layout::dense(count, x.rows, y.cols);
        let to = layout.unwrap_or(want);
        let fits = match layout {
            Some(to) => (to.count, to.rows, to.cols) == (count, x.rows, y.cols),
            None => want.elements() == Some(c.len()),
        };
        if x.cols != y.rows || !(fits && (y.count == count || y.count == 1)) {
            let into = layout.map_or_else(|| format!("{} elements", c.len()), |to| format!("({to})"));
            return Err(Error::invalid(name, format_args!("({x}) * ({y}) into {into}")));
        }
        if want.elements() == Some(0) {
            return Ok(());
        }
        let size = size_of::<T>();
        let (m, n, k) = (x.rows, y.cols, x.cols);
        let (a, b) = (x.in_memory(a.view.address(), size), y.in_memory(b.view.address(), size));
        let gemm = Gemm { of, count, m, n, k, alpha, a, b, beta, c: to.in_memory(c.address(), size) };
        // SAFETY: the shapes fit the views, which are live memory of this device, ordered and noted by `op`; the
        // matrices of `c` do not overlap.
        op.submit(|driver, stream| unsafe { driver.gemm(&gemm, stream) })
    }
}
