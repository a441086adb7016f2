//! The matrix product: checks of shapes, and the call.

use super::{
    layout::{DIMS, Layout},
    matrix::{GemmOutput, Matrix},
};
use crate::{
    Device, DeviceBuffer,
    driver::{Gemm, GemmMatrix, GemmType},
    error::{Error, Result},
    kernel::{builtin::Float, real::Real},
    memory::DeviceCopy,
};
use smallvec::SmallVec;

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
    /// Of batches, each matrix is multiplied by that of the same place. A batch can have up to three dimensions: those
    /// of `a` and `b` are matched from the innermost on, and a dimension of one is used for all of the other side, as
    /// in PyTorch. `a` and `b` are [`Matrix`]: columns, rows, transposes and batches of a buffer's elements.
    ///
    /// A batch of one dimension is one cuBLAS call. So is one of several, if the distances between the matrices of `a`,
    /// of `b` and of `c` let them be counted in one. Else the longest dimension is one call, repeated for the others.
    ///
    /// The guide's page "Your own kernels, and cudarc" has an example; "Operations" computes attention with batches.
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
    /// # Errors
    /// As of [`gemm`](Self::gemm).
    #[track_caller]
    pub fn gemm_tf32<C>(&self, alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: &mut C) -> Result<()>
    where
        C: GemmOutput<Elem = f32> + ?Sized,
    {
        self.multiply("gemm_tf32", GemmType::Tf32, (alpha.into(), beta.into()), (a, b), c)
    }

    /// `a * b` in a new buffer: [`gemm`](Self::gemm) with `alpha` 1 and `beta` 0. A batch's products follow each other.
    ///
    /// ```
    /// # use gpu_pool::Matrix;
    /// # gpu_pool::extend::example(|dev| {
    /// let x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?;
    /// let y = dev.matmul(Matrix::new(&x, 2, 2)?, Matrix::new(&x, 2, 2)?.t())?;
    /// assert_eq!(dev.download(&y)?, [5.0, 11.0, 11.0, 25.0]);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// As of [`gemm`](Self::gemm), and [`Error::OutOfMemory`].
    #[track_caller]
    pub fn matmul<T: Float>(&self, a: Matrix<'_, T>, b: Matrix<'_, T>) -> Result<DeviceBuffer<T>> {
        let (x, y) = (a.layout, b.layout);
        // Where the shapes do not fit, `multiply` says so.
        let Some(len) = x.product(&y).map_or(Some(0), |to| to.elements()) else {
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
        let want = x.product(&y).filter(|want| match layout {
            Some(to) => to.shape() == want.shape(),
            None => want.elements() == Some(c.len()),
        });
        let Some(want) = want else {
            let into = layout.map_or_else(|| format!("{} elements", c.len()), |to| format!("({to})"));
            return Err(Error::invalid(name, format_args!("({x}) * ({y}) into {into}")));
        };
        if want.elements() == Some(0) {
            return Ok(());
        }
        let to = layout.unwrap_or(want);
        let (size, m, n, k) = (size_of::<T>(), x.rows, y.cols, x.cols);
        let matrices = [(x, a.view.address()), (y, b.view.address()), (to, c.address())];
        let matrices = matrices.map(|(layout, view)| layout.in_memory(view, size));
        let (outer, (count, strides)) = dims([&x, &y, &to]);
        let (op_name, handle, stream) = (op.name, &self.worker.handle, self.stream.raw);
        op.submit_by(|| {
            for first in firsts(&outer) {
                let [a, b, c] = [0, 1, 2].map(|i| GemmMatrix {
                    address: matrices[i].address + (first[i] * size) as u64,
                    stride: strides[i],
                    ..matrices[i]
                });
                let gemm = Gemm { of, count, m, n, k, alpha, a, b, beta, c };
                // SAFETY: the shapes fit the views, which are live memory of this device, ordered and noted by `op`;
                // the matrices of `c` do not overlap.
                handle.check(op_name, unsafe { handle.driver.gemm(&gemm, stream) })?;
            }
            Ok(())
        })
    }
}

/// A dimension of the products: their number, and the distances between their matrices `a`, `b` and `c`.
type Dim = (usize, [usize; 3]);

/// The dimensions of a batch, fewest first, and the one that a driver takes in one call. Neighbours whose matrices can
/// be counted in one are one dimension.
fn dims(matrices: [&Layout; 3]) -> (SmallVec<[Dim; DIMS]>, Dim) {
    let mut dims = SmallVec::<[Dim; DIMS]>::new();
    for d in 0..DIMS {
        // A matrix that is used for all has no distance.
        let (count, strides) = (matrices[2].batch[d].0, matrices.map(|x| x.batch[d].1));
        match dims.last_mut().filter(|(_, outer)| (0..3).all(|i| count.checked_mul(strides[i]) == Some(outer[i]))) {
            Some(outer) => *outer = (outer.0 * count, strides),
            None if count > 1 => dims.push((count, strides)),
            None => {}
        }
    }
    dims.sort_by_key(|&(count, _)| count);
    let inner = dims.pop().unwrap_or((1, [0; 3]));
    (dims, inner)
}

fn firsts(outer: &[Dim]) -> impl Iterator<Item = [usize; 3]> + '_ {
    (0..outer.iter().map(|&(count, _)| count).product()).map(move |mut call: usize| {
        let mut first = [0; 3];
        for &(count, strides) in outer {
            (0..3).for_each(|i| first[i] += call % count * strides[i]);
            call /= count;
        }
        first
    })
}

#[cfg(test)]
#[path = "../../tests/unit/ops/gemm_tests.rs"]
mod tests;
