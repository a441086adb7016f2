//! Elements in another order: transposes, and parts of matrices: `kernels/shape.cu`. Bits move, and nothing is
//! computed: elements have any type.

use super::family::{In, Out, kernels, small};
use super::number::{Word, by_word};
use crate::kernels::SHAPE;
use crate::runtime::{ErrorInternals, Operations, as_type, as_type_mut, same_len, stride};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut, Error, LaunchDims, Result, kernel,
};

kernels! { SHAPE of Word;
    fn transpose_words(_, x: In<T>, y: Out<T>, count: u32, rows: u32, cols: u32) = "transpose" {
        let (rows, cols) = (rows as usize, cols as usize);
        let size = (rows * cols).max(1);
        for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)).take(count as usize) {
            y.iter_mut().enumerate().for_each(|(i, y)| *y = x[i % rows * cols + i / rows]);
        }
    }
}

kernel! {
    static COPY_2D: "copy_2d" in SHAPE,
    fn(src: &[u8], dst: &mut [u8], rows: u64, width: u64, src_pitch: u64, dst_pitch: u64) |_dims| {
        let width = width as usize;
        for row in 0..rows as usize {
            let (from, to) = (row * src_pitch as usize, row * dst_pitch as usize);
            dst[to..][..width].copy_from_slice(&src[from..][..width]);
        }
    }
}

/// Elements in another order. Streams and errors: see [`ops`](super).
pub trait Shapes: Operations {
    /// The transpose of a row-major matrix of `rows x cols` elements, in a new buffer: element `(c, r)` is `x`'s
    /// `(r, c)`. Elements have 1, 2, 4 or 8 bytes. For [`gemm`](Device::gemm) no transpose is needed: see
    /// [`Matrix::t`](gpu_pool::Matrix::t).
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1u8, 2, 3, 4, 5, 6])?; // 2 x 3
    /// assert_eq!(dev.download(&dev.transpose(&x, 2, 3)?)?, [1, 4, 2, 5, 3, 6]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn transpose<X: AsView>(&self, x: &X, rows: usize, cols: usize) -> Result<DeviceBuffer<X::Elem>> {
        let x = x.view();
        let mut y = self.allocate("transpose", x.len())?;
        transposed(self.device(), "transpose", x, y.view_mut(), [1, rows, cols])?;
        Ok(y)
    }

    /// The transposes of a batch of `count` matrices of `rows x cols` elements, one after the other, in a new buffer.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1i32, 2, 3, 4, 5, 6, 7, 8])?; // 2 of 2 x 2
    /// assert_eq!(dev.download(&dev.transpose_batch(&x, 2, 2, 2)?)?, [1, 3, 2, 4, 5, 7, 6, 8]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn transpose_batch<X: AsView>(
        &self,
        x: &X,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let x = x.view();
        let mut y = self.allocate("transpose_batch", x.len())?;
        transposed(self.device(), "transpose_batch", x, y.view_mut(), [count, rows, cols])?;
        Ok(y)
    }

    /// `y` becomes the transpose of the `rows x cols` elements of `x`.
    #[track_caller]
    fn transpose_into<X: AsView>(
        &self,
        x: &X,
        rows: usize,
        cols: usize,
        y: &mut impl AsViewMut<Elem = X::Elem>,
    ) -> Result<()> {
        transposed(self.device(), "transpose_into", x.view(), y.view_mut(), [1, rows, cols])
    }

    /// Copies `rows` rows of `cols` elements between matrices with longer rows: row `r` begins at element
    /// `r * src_pitch` of `src`, and goes to element `r * dst_pitch` of `dst`. A pitch is in elements and at least
    /// `cols`: the "leading dimension" of BLAS, `cudaMemcpy2D`'s pitch divided by the size of an element. A part that
    /// begins at another row or column is a [slice](DeviceBuffer::slice) that begins there.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1i32, 2, 3, 4, 5, 6])?; // 2 x 3
    /// let mut y = dev.zeros::<i32>(4)?; // 2 x 2
    /// dev.copy_2d(&x.slice(1..), 3, &mut y, 2, 2, 2)?; // columns 1 and 2
    /// assert_eq!(dev.download(&y)?, [2, 3, 5, 6]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn copy_2d<X: AsView>(
        &self,
        src: &X,
        src_pitch: usize,
        dst: &mut impl AsViewMut<Elem = X::Elem>,
        dst_pitch: usize,
        rows: usize,
        cols: usize,
    ) -> Result<()> {
        let (src, dst) = (src.view(), dst.view_mut());
        let _here = self.enter("copy_2d");
        fits("copy_2d", "source", src.len(), src_pitch, rows, cols)?;
        fits("copy_2d", "destination", dst.len(), dst_pitch, rows, cols)?;
        let size = size_of::<X::Elem>();
        // Without bytes there may be any number of rows.
        if rows == 0 || cols == 0 || size == 0 {
            return Ok(());
        }
        let (from, to) = (src.len() * size, dst.len() * size);
        let bytes = rows * cols * size;
        // SAFETY: these are the bytes of both.
        let (src, dst) = unsafe { (as_type::<_, u8>(src, from), as_type_mut::<_, u8>(dst, to)) };
        // The pitch of a single row is nowhere.
        let pitch = |pitch: usize| if rows <= 1 { 0 } else { (pitch * size) as u64 };
        let args = (src, dst, rows as u64, (cols * size) as u64, pitch(src_pitch), pitch(dst_pitch));
        // SAFETY: all rows lie in both, as was checked.
        unsafe { self.launch(&COPY_2D, stride(bytes.div_ceil(16)), args) }
    }
}

impl Shapes for Device {}

#[track_caller]
fn transposed<T: DeviceCopy>(
    dev: &Device,
    op: &'static str,
    x: DeviceView<'_, T>,
    y: DeviceViewMut<'_, T>,
    shape: [usize; 3],
) -> Result<()> {
    let _here = dev.enter(op);
    let ([count, rows, cols], size, len) = (shape, size_of::<T>(), x.len());
    if rows.checked_mul(cols).and_then(|n| n.checked_mul(count)) != Some(x.len()) {
        let many = if count == 1 { String::new() } else { format!("{count} of ") };
        return Err(Error::invalid(op, format_args!("{many}{rows} x {cols} of {} elements", x.len())));
    }
    same_len(op, len, y.len())?;
    invalid_if!(![1, 2, 4, 8].contains(&size), op, "elements of {size} bytes");
    if len == 0 {
        return Ok(());
    }
    let (n, r, c) = (small(op, "matrices", count)?, small(op, "rows", rows)?, small(op, "columns", cols)?);
    let aligned = (x.address() | y.address()).is_multiple_of(size as u64);
    invalid_if!(!aligned, op, "an element of {size} bytes at an odd address");
    let tiles = rows.div_ceil(32).saturating_mul(cols.div_ceil(32)).saturating_mul(count);
    let grid = (tiles.min(i32::MAX as usize) as u32, 1, 1);
    let dims = LaunchDims { grid, block: (32, 8, 1), shared_bytes: 0 };
    by_word!(T, W => {
        // SAFETY: `W` is as large as the element; both have `count` times `rows` times `cols` elements.
        unsafe {
            let (x, y) = (as_type::<T, W>(x, len), as_type_mut::<T, W>(y, len));
            dev.launch(&transpose_words::<W>(), dims, (x, y, n, r, c))
        }
    })
}

#[track_caller]
fn fits(op: &'static str, what: &str, len: usize, pitch: usize, rows: usize, cols: usize) -> Result<()> {
    let end = rows.saturating_sub(1).checked_mul(pitch).and_then(|last| last.checked_add(cols));
    let is_in = rows == 0 || end.is_some_and(|end| end <= len);
    let misfits = pitch < cols || !is_in;
    invalid_if!(misfits, op, "{rows} rows of {cols} at a pitch of {pitch} in a {what} of {len} elements");
    Ok(())
}
