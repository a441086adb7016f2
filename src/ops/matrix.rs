//! Matrices in views, for [`Device::gemm`](crate::Device::gemm). Invariant: those of a [`MatrixMut`] do not overlap.

use super::layout::{DIMS, Layout};
use crate::{
    error::{Error, Result},
    memory::{AsView, AsViewMut, DeviceCopy, DeviceView, DeviceViewMut},
};
use std::ops::RangeBounds;

/// A row-major matrix in a view, or a batch of them, as [`gemm`](crate::Device::gemm) reads it. It is small and `Copy`.
///
/// The parts of a matrix are matrices: no element moves for [`columns`](Self::columns), [`rows`](Self::rows),
/// [`t`](Self::t), [`split_rows`](Self::split_rows) and [`split_columns`](Self::split_columns).
///
/// ```
/// # use gpu_pool::Matrix;
/// # gpu_pool::extend::example(|dev| {
/// let x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])?; // 2 x 4
/// let mut y = dev.zeros::<f32>(4)?;
/// let right = Matrix::new(&x, 2, 4)?.columns(2..)?; // 3 4, 7 8
/// dev.gemm(1.0, right, right.t(), 0.0, &mut y)?;
/// assert_eq!(dev.download(&y)?, [25.0, 53.0, 53.0, 113.0]);
/// # Ok(()) });
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T: DeviceCopy = f32> {
    pub(super) view: DeviceView<'a, T>,
    pub(super) layout: Layout,
}

/// A row-major matrix in a view, or a batch of them, that [`gemm`](crate::Device::gemm) writes. Where the result
/// fills a view densely, the view itself does: `&mut c`.
///
/// ```
/// # use gpu_pool::{Matrix, MatrixMut};
/// # gpu_pool::extend::example(|dev| {
/// let (x, mut y) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.zeros::<f32>(6)?); // 2 x 2, 2 x 3
/// let x = Matrix::new(&x, 2, 2)?;
/// dev.gemm(1.0, x, x, 0.0, &mut MatrixMut::new(&mut y, 2, 3)?.columns(..2)?)?;
/// assert_eq!(dev.download(&y)?, [7.0, 10.0, 0.0, 15.0, 22.0, 0.0]);
/// # Ok(()) });
/// ```
#[derive(Debug)]
pub struct MatrixMut<'a, T: DeviceCopy = f32> {
    view: DeviceViewMut<'a, T>,
    layout: Layout,
}

impl<'a, T: DeviceCopy> Matrix<'a, T> {
    /// A matrix of `rows x cols` elements, densely packed, row after row.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the view has another number of elements.
    #[track_caller]
    pub fn new(view: &'a impl AsView<Elem = T>, rows: usize, cols: usize) -> Result<Self> {
        let view = view.view();
        let layout = Layout::filling("Matrix::new", view.len(), rows, cols)?;
        Ok(Matrix { view, layout })
    }

    /// A matrix of `rows x cols` elements whose row `r` begins at element `r * lead`: `lead` is BLAS's leading
    /// dimension. The view may be longer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the view is too short, or `lead` less than `cols`.
    #[track_caller]
    pub fn strided(view: &'a impl AsView<Elem = T>, rows: usize, cols: usize, lead: usize) -> Result<Self> {
        let view = view.view();
        let layout = Layout::strided("Matrix::strided", view.len(), rows, cols, lead)?;
        Ok(Matrix { view, layout })
    }

    /// The same memory, read as its transpose; of a batch, each matrix.
    pub fn t(self) -> Self {
        let Layout { rows, cols, transposed, .. } = self.layout;
        Matrix { layout: Layout { rows: cols, cols: rows, transposed: !transposed, ..self.layout }, ..self }
    }
}

impl<'a, T: DeviceCopy> MatrixMut<'a, T> {
    /// A matrix of `rows x cols` elements, densely packed, row after row.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the view has another number of elements.
    #[track_caller]
    pub fn new(view: &'a mut impl AsViewMut<Elem = T>, rows: usize, cols: usize) -> Result<Self> {
        let view = view.view_mut();
        let layout = Layout::filling("MatrixMut::new", view.len(), rows, cols)?;
        Ok(MatrixMut { view, layout })
    }

    /// A matrix of `rows x cols` elements whose row `r` begins at element `r * lead`. Elements between the rows are not
    /// written. The view may be longer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the view is too short, or `lead` less than `cols`.
    #[track_caller]
    pub fn strided(view: &'a mut impl AsViewMut<Elem = T>, rows: usize, cols: usize, lead: usize) -> Result<Self> {
        let view = view.view_mut();
        let layout = Layout::strided("MatrixMut::strided", view.len(), rows, cols, lead)?;
        Ok(MatrixMut { view, layout })
    }
}

macro_rules! parts {
    ($Matrix:ident, $batch:expr) => {
        impl<T: DeviceCopy> $Matrix<'_, T> {
            /// Rows and columns of each matrix.
            pub fn shape(&self) -> (usize, usize) {
                (self.layout.rows, self.layout.cols)
            }

            /// The number of matrices.
            pub fn count(&self) -> usize {
                self.layout.count()
            }

            /// The number of matrices in each dimension of the batch, the outermost first. Empty for a single matrix.
            pub fn counts(&self) -> Vec<usize> {
                self.layout.batch[DIMS - self.layout.depth..].iter().map(|&(count, _)| count).collect()
            }

            /// Some of the columns; of a batch, of each matrix.
            ///
            /// # Errors
            /// [`Error::InvalidArgument`] when there are fewer.
            #[track_caller]
            pub fn columns(self, range: impl RangeBounds<usize>) -> Result<Self> {
                let l = self.layout;
                let (start, cols) = l.range(concat!(stringify!($Matrix), "::columns"), "columns", l.cols, range)?;
                let layout = Layout { first: l.first + start * l.steps().1, cols, ..l };
                Ok($Matrix { layout: layout.normal(), ..self })
            }

            /// Some of the rows; of a batch, of each matrix.
            ///
            /// # Errors
            /// [`Error::InvalidArgument`] when there are fewer.
            #[track_caller]
            pub fn rows(self, range: impl RangeBounds<usize>) -> Result<Self> {
                let l = self.layout;
                let (start, rows) = l.range(concat!(stringify!($Matrix), "::rows"), "rows", l.rows, range)?;
                let layout = Layout { first: l.first + start * l.steps().0, rows, ..l };
                Ok($Matrix { layout: layout.normal(), ..self })
            }

            /// A batch of `parts` matrices: the first has the first rows, and so on. Of a batch, each matrix is split:
            /// `parts` is its new innermost dimension.
            ///
            /// # Errors
            /// [`Error::InvalidArgument`] when the parts cannot be equal, and of a batch of three dimensions.
            #[track_caller]
            pub fn split_rows(self, parts: usize) -> Result<Self> {
                let l = self.layout;
                let op = concat!(stringify!($Matrix), "::split_rows");
                let rows = l.part(op, "rows", l.rows, parts)?;
                let layout = Layout { rows, ..l }.deeper(op, false, parts, rows * l.steps().0)?;
                Ok($Matrix { layout: layout.normal(), ..self })
            }

            /// A batch of `parts` matrices: the first has the first columns, and so on. Of a batch, each matrix is
            /// split: `parts` is its new innermost dimension. The heads of attention are such parts.
            ///
            /// # Errors
            /// [`Error::InvalidArgument`] when the parts cannot be equal, and of a batch of three dimensions.
            #[track_caller]
            pub fn split_columns(self, parts: usize) -> Result<Self> {
                let l = self.layout;
                let op = concat!(stringify!($Matrix), "::split_columns");
                let cols = l.part(op, "columns", l.cols, parts)?;
                let layout = Layout { cols, ..l }.deeper(op, false, parts, cols * l.steps().1)?;
                Ok($Matrix { layout: layout.normal(), ..self })
            }

            /// A batch of `count` such matrices; each begins `stride` elements behind the one before. Of a batch, there
            /// are `count` such batches: `count` is the new outermost dimension.
            ///
            /// ```
            /// # use gpu_pool::Matrix;
            /// # gpu_pool::extend::example(|dev| {
            /// let (x, mut y) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.zeros::<f32>(3)?);
            /// let pairs = Matrix::strided(&x, 1, 2, 2)?.batch(3, 1)?; // 1 2, 2 3, 3 4
            /// dev.gemm(1.0, pairs, pairs.t(), 0.0, &mut y)?;
            /// assert_eq!(dev.download(&y)?, [5.0, 13.0, 25.0]);
            /// # Ok(()) });
            /// ```
            ///
            /// # Errors
            /// [`Error::InvalidArgument`] when the view is too short, and of a batch of three dimensions; of a
            /// [`MatrixMut`], when two of the matrices have an element in common.
            #[track_caller]
            pub fn batch(self, count: usize, stride: usize) -> Result<Self> {
                let op = concat!(stringify!($Matrix), "::batch");
                let layout = self.layout.deeper(op, true, count, stride)?.within(op, self.view.len())?;
                invalid_if!(!$batch(&layout), op, "{layout} overlap");
                Ok($Matrix { layout, ..self })
            }
        }
    };
}
parts!(Matrix, |_| true);
parts!(MatrixMut, Layout::is_disjoint);

/// The destination of a product: a [`MatrixMut`], or a buffer or view that it fills densely.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is nothing that a product can be written to",
    note = "it is written to a `&mut DeviceBuffer`, a `&mut DeviceViewMut` or a `&mut MatrixMut`"
)]
pub trait GemmOutput {
    /// The element type.
    type Elem: DeviceCopy;
    /// For the library: the memory, and where the elements of a matrix in it lie.
    fn output(&mut self) -> (DeviceViewMut<'_, Self::Elem>, Option<Layout>);
}
impl<V: AsViewMut> GemmOutput for V {
    type Elem = V::Elem;
    fn output(&mut self) -> (DeviceViewMut<'_, V::Elem>, Option<Layout>) {
        (self.view_mut(), None)
    }
}
impl<T: DeviceCopy> GemmOutput for MatrixMut<'_, T> {
    type Elem = T;
    fn output(&mut self) -> (DeviceViewMut<'_, T>, Option<Layout>) {
        (self.view.view_mut(), Some(self.layout))
    }
}
