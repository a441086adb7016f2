//! Operations on rows: how they are launched, argmax, sums of columns, and the check of indices: `kernels/rows.cu`
//! and `kernels/columns.cu`. [`softmax`] and [`norm`] have the others.
//!
//! Invariant: the launch of a row operation depends on the width of a row only as far as the row's threads go, so the
//! bits of a row do not depend on the number of rows. Sums over rows have a fixed order: the same bits every run.

mod norm;
mod softmax;

pub use self::{
    norm::{AllReduceNorm, Norms},
    softmax::Softmax,
};

use super::embedding::Index;
use super::family::{In, Out, each_row, each_row_mut, kernels, wide};
use crate::kernels::{COLUMNS, ROWS};
use crate::runtime::{ErrorInternals, Operations, Real, lanes, pairwise, rows_of, threads_of_row};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, LaunchDims, Result, kernel::Float,
};

/// Rows that a part of a sum of columns has, unless there would be more parts than [`MOST_PARTS`].
const PART: usize = 64;
const MOST_PARTS: usize = 128;

fn row_dims<T>(rows: usize, cols: usize) -> LaunchDims {
    let threads = threads_of_row(size_of::<T>(), cols);
    let together = if threads == 32 { 4 } else { 1 };
    let blocks = rows.div_ceil(together).clamp(1, i32::MAX as usize);
    LaunchDims { grid: (blocks as u32, 1, 1), block: (threads, together as u32, 1), shared_bytes: 0 }
}

fn column_dims<T>(cols: usize, parts: u32) -> LaunchDims {
    LaunchDims { grid: (cols.div_ceil(32 * lanes::<T>()).max(1) as u32, parts, 1), block: (32, 8, 1), shared_bytes: 0 }
}

fn parts_of(rows: usize) -> u32 {
    rows.div_ceil(PART).clamp(1, MOST_PARTS) as u32
}

fn sum_parts<A: Real>(out: &mut [A], rows: u64, cols: u32, parts: u32, f: impl Fn(usize, usize) -> A) {
    let chunk = (rows as usize).div_ceil(parts as usize);
    for (part, out) in each_row_mut(out, u64::from(parts), cols).enumerate() {
        let of_part = (part * chunk).min(rows as usize)..((part + 1) * chunk).min(rows as usize);
        out.iter_mut().enumerate().for_each(|(c, sum)| *sum = pairwise(of_part.clone(), &|row| f(row, c)));
    }
}

fn host_column_final<T: Float>(_: LaunchDims, partial: &[T::Acc], out: &mut [T], parts: u32, cols: u32) {
    let mut sums = vec![T::Acc::default(); cols as usize];
    sum_parts(&mut sums, u64::from(parts), cols, 1, |part, c| partial[part * cols as usize + c]);
    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(sum));
}

kernels! { ROWS;
    fn argmax(_, x: In<T>, at: Out<u32>, rows: u64, cols: u32) = "argmax" {
        let is_nan = |x: T::Acc| x.to_f64().is_nan();
        for (x, at) in each_row(x, rows, cols).zip(at) {
            let better = |a: T::Acc, b: T::Acc| a > b || (is_nan(a) && !is_nan(b));
            let best = (1..x.len()).fold(0, |best, i| if better(wide(&x[i]), wide(&x[best])) { i } else { best });
            *at = best as u32;
        }
    }
}
kernels! { COLUMNS;
    fn column_sum(_, x: In<T>, partial: Out<T::Acc>, rows: u64, cols: u32, parts: u32) = "column_sum" {
        sum_parts(partial, rows, cols, parts, |row, c| wide(&x[row * cols as usize + c]));
    }
    fn column_final(dims, sums: In<T::Acc>, out: Out<T>, parts: u32, cols: u32) = "column_final" {
        host_column_final(dims, sums, out, parts, cols);
    }
}

/// Operations on rows without arithmetic on them, and sums of columns: a buffer is rows of `cols` elements, one after
/// the other. Streams and errors: see [`ops`](super).
pub trait Rows: Operations {
    /// The place of the greatest of each row's `cols` elements: the first of equals; a NaN is greatest, as in PyTorch.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1.0f32, 7.0, 7.0, -1.0, f32::NAN, 9.0])?; // 2 x 3
    /// assert_eq!(dev.download(&dev.argmax(&x, 3)?)?, [1, 1]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn argmax<X: AsView<Elem: Float>>(&self, x: &X, cols: usize) -> Result<DeviceBuffer<u32>> {
        let x = x.view();
        let _here = self.enter("argmax");
        let rows = rows_of("argmax", x.len(), cols)?;
        let mut at = self.allocate("argmax", rows)?;
        let args = (x, &mut at, rows as u64, cols as u32);
        // SAFETY: `x` has `rows` rows of `cols` elements, `at` an element for each row.
        unsafe { self.launch(&argmax::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok(at)
    }

    /// `out` becomes the sum of the rows of `x`, which are as long as `out`: the gradient of a bias. The sum has a
    /// fixed order: the same bits every run.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?; // 3 x 2
    /// let mut sum = dev.zeros::<f32>(2)?;
    /// dev.column_sum_into(&x, &mut sum)?;
    /// assert_eq!(dev.download(&sum)?, [9.0, 12.0]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn column_sum_into<X: AsView<Elem: Float>>(&self, x: &X, out: &mut impl AsViewMut<Elem = X::Elem>) -> Result<()> {
        let (x, out) = (x.view(), out.view_mut());
        let _here = self.enter("column_sum_into");
        let cols = out.len();
        let rows = rows_of("column_sum_into", x.len(), cols)?;
        let parts = parts_of(rows);
        let mut partial = self.allocate("column_sum_into", parts as usize * cols)?;
        let args = (x, &mut partial, rows as u64, cols as u32, parts);
        // SAFETY: `x` has `rows` rows of `cols` elements, the sums `parts` rows.
        unsafe { self.launch(&column_sum::<X::Elem>(), column_dims::<X::Elem>(cols, parts), args)? };
        finish(self.device(), &partial, out, parts)
    }

    /// Checks that all indices (or labels) are less than `bound`: for labels of
    /// [`cross_entropy`](Softmax::cross_entropy) and indices of [`embedding`](super::Embeddings::embedding), which do
    /// not check. **Waits** for the current stream.
    ///
    /// ```
    /// # use gpu_pool::Error;
    /// # gpu_pool_train::example!(|dev| {
    /// let labels = dev.upload(&[3u32, 10, 2])?;
    /// let error = dev.check_indices(&labels, 10).unwrap_err();
    /// assert!(error.to_string().contains("index 1 is 10: less than 10 are possible"), "{error}");
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the first one that is not, and what [`download`](Device::download) gives.
    #[track_caller]
    fn check_indices<L: AsView<Elem: Index>>(&self, indices: &L, bound: usize) -> Result<()> {
        let words = self.device().download(&L::Elem::words(indices.view()))?;
        let Some(at) = words.iter().position(|&word| word as usize >= bound) else { return Ok(()) };
        let why = format!("index {at} is {}: less than {bound} are possible", L::Elem::show(words[at]));
        Err(Error::invalid("check_indices", why))
    }
}

impl Rows for Device {}

fn finish<T: Float>(dev: &Device, partial: &DeviceBuffer<T::Acc>, out: DeviceViewMut<'_, T>, parts: u32) -> Result<()> {
    let (cols, partial): (usize, DeviceView<'_, T::Acc>) = (out.len(), partial.view());
    let args = (partial, out, parts, cols as u32);
    // SAFETY: the first pass has written `parts` rows of `cols` sums.
    unsafe { dev.launch(&column_final::<T>(), column_dims::<T::Acc>(cols, 1), args) }
}
