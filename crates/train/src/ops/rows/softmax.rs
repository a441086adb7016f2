//! Softmax and its logarithm, and cross-entropy with labels, each with its step back.

use super::super::embedding::Index;
use super::super::family::{In, Input, Maybe, Out, each_row, each_row_mut, kernels, wide};
use super::row_dims;
use crate::kernels::ROWS;
use crate::runtime::{ErrorInternals, Operations, Real, pairwise, rows_of, same_len};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, Error, Result, kernel::Float};

/// The greatest element of a row, and the sum of the exponentials of the differences to it.
fn top_and_sum<T: Float>(row: &[T]) -> (T::Acc, T::Acc) {
    let top = row.iter().map(wide).fold(T::Acc::of(f64::NEG_INFINITY), Real::max);
    let sum = pairwise(0..row.len(), &|i| (wide(&row[i]) - top).exp());
    (top, sum)
}

fn soften<T: Float>(row: &mut [T], log: u32) {
    let (top, sum) = top_and_sum(row);
    let (factor, shift) = (T::Acc::of(1.0) / sum, sum.ln());
    for x in row {
        let v = wide(x) - top;
        *x = T::narrow(if log != 0 { v - shift } else { v.exp() * factor });
    }
}

fn entropy<T: Float>(row: &mut [T], label: u32, scale: Option<T::Acc>) -> T::Acc {
    let (top, sum) = top_and_sum(row);
    let nan = T::Acc::of(f64::NAN);
    let label = label as usize;
    let there = row.get(label).map(wide);
    if let Some(scale) = scale {
        let factor = if there.is_some() { T::Acc::of(1.0) / sum } else { nan };
        for (c, x) in row.iter_mut().enumerate() {
            let share = (wide(x) - top).exp() * factor;
            *x = T::narrow((if c == label { share - T::Acc::of(1.0) } else { share }) * scale);
        }
    }
    sum.ln() - (there.unwrap_or(nan) - top)
}

kernels! { ROWS;
    fn softmax(_, x: Maybe<T>, y: Out<T>, rows: u64, cols: u32, log: u32) = "softmax" {
        x.into_iter().for_each(|x| y.copy_from_slice(x));
        each_row_mut(y, rows, cols).for_each(|y| soften(y, log));
    }
    fn softmax_backward(_, y: In<T>, dy: In<T>, dx: Out<T>, rows: u64, cols: u32, log: u32) = "softmax_backward" {
        let inputs = each_row(y, rows, cols).zip(each_row(dy, rows, cols));
        for (dx, (y, dy)) in each_row_mut(dx, rows, cols).zip(inputs) {
            let term = |i: usize| if log != 0 { wide(&dy[i]) } else { wide(&dy[i]) * wide(&y[i]) };
            let sum = pairwise(0..dx.len(), &term);
            for (dx, (y, dy)) in dx.iter_mut().zip(y.iter().map(wide).zip(dy.iter().map(wide))) {
                *dx = T::narrow(if log != 0 { dy - y.exp() * sum } else { y * (dy - sum) });
            }
        }
    }
    fn entropy_kernel(
        _, x: Maybe<T>, labels: In<u32>, dx: Out<T>, loss: Out<T::Acc>, rows: u64, cols: u32, scale: T::Acc,
    ) = "cross_entropy" {
        x.into_iter().for_each(|x| dx.copy_from_slice(x));
        for ((dx, label), loss) in each_row_mut(dx, rows, cols).zip(labels).zip(loss) {
            *loss = entropy(dx, *label, Some(scale));
        }
    }
    fn entropy_loss(
        _, x: In<T>, labels: In<u32>, _: Maybe<T>, loss: Out<T::Acc>, rows: u64, cols: u32, _: T::Acc,
    ) = "cross_entropy" {
        for ((x, label), loss) in each_row(x, rows, cols).zip(labels).zip(loss) {
            *loss = entropy(&mut x.to_vec(), *label, None);
        }
    }
}

/// The four forms of softmax, and the step back through two of them.
macro_rules! softmax {
    ($($name:ident $assign:ident $back:ident $log:literal $what:literal $y:literal $of_y:literal $dx:literal;)+) => {$(
        #[doc = concat!($what, " of each row of `cols` elements, in a new buffer.")]
        ///
        /// The row's maximum is subtracted first, so no exponential overflows ("online softmax", Milakov and
        /// Gimelshein, 2018). A row with a NaN or `+inf`, or all of `-inf`, becomes NaN, as in PyTorch.
        ///
        /// ```
        /// # gpu_pool_train::example!(|dev| {
        /// let x = dev.upload(&[1.0f32, 1.0, 1000.0, 0.0])?; // 2 x 2
        #[doc = concat!("let y = dev.download(&dev.", stringify!($name), "(&x, 2)?)?;")]
        #[doc = concat!("let right = [", $y, "f32];")]
        /// assert!(y.iter().zip(right).all(|(y, right)| (y - right).abs() < 1e-4), "{y:?}");
        /// # Ok(()) });
        /// ```
        #[track_caller]
        fn $name<X: AsView<Elem: Float>>(&self, x: &X, cols: usize) -> Result<DeviceBuffer<X::Elem>> {
            let x = x.view();
            let _here = self.enter(stringify!($name));
            let rows = rows_of(stringify!($name), x.len(), cols)?;
            let mut y = self.allocate(stringify!($name), x.len())?;
            let args = (Input::View(x), &mut y, rows as u64, cols as u32, $log);
            // SAFETY: both have `rows` rows of `cols` elements.
            unsafe { self.launch(&softmax::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
            Ok(y)
        }

        #[doc = concat!($what, " of each row of `cols` elements, in place.")]
        #[track_caller]
        fn $assign<X: AsViewMut<Elem: Float>>(&self, x: &mut X, cols: usize) -> Result<()> {
            let x = x.view_mut();
            let _here = self.enter(stringify!($assign));
            let rows = rows_of(stringify!($assign), x.len(), cols)?;
            let args = (Input::Output(x.address()), x, rows as u64, cols as u32, $log);
            // SAFETY: `x` has `rows` rows of `cols` elements.
            unsafe { self.launch(&softmax::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args) }
        }

        #[doc = concat!("The step back through [`", stringify!($name), "`](Self::", stringify!($name), "):")]
        #[doc = concat!($of_y, ", in a new buffer; `y` is the result of the step forward.")]
        ///
        /// ```
        /// # gpu_pool_train::example!(|dev| {
        /// let (x, dy) = (dev.upload(&[1.0f32, 1.0])?, dev.upload(&[2.0f32, 0.0])?); // one row
        #[doc = concat!("let y = dev.", stringify!($name), "(&x, 2)?;")]
        #[doc = concat!("let dx = dev.download(&dev.", stringify!($back), "(&dy, &y, 2)?)?;")]
        #[doc = concat!("let right = [", $dx, "f32, -", $dx, "];")]
        /// assert!(dx.iter().zip(right).all(|(dx, right)| (dx - right).abs() < 1e-6), "{dx:?}");
        /// # Ok(()) });
        /// ```
        #[track_caller]
        fn $back<Y: AsView<Elem: Float>>(
            &self,
            dy: &impl AsView<Elem = Y::Elem>,
            y: &Y,
            cols: usize,
        ) -> Result<DeviceBuffer<Y::Elem>> {
            let (dy, y) = (dy.view(), y.view());
            let _here = self.enter(stringify!($back));
            let rows = rows_of(stringify!($back), y.len(), cols)?;
            same_len(stringify!($back), dy.len(), y.len())?;
            let mut dx = self.allocate(stringify!($back), y.len())?;
            let args = (y, dy, &mut dx, rows as u64, cols as u32, $log);
            // SAFETY: all three have `rows` rows of `cols` elements.
            unsafe { self.launch(&softmax_backward::<Y::Elem>(), row_dims::<Y::Elem>(rows, cols), args)? };
            Ok(dx)
        }
    )+};
}

type Loss<T> = (DeviceBuffer<<T as Float>::Acc>, DeviceBuffer<T>);

/// Operations on rows: a buffer is rows of `cols` elements, one after the other. They compute in `f32` (of `f64` in
/// `f64`) and round once. Streams and errors: see [`ops`](super::super).
///
/// The bits of a row depend on its elements and its width alone: not on how many rows there are, or on the
/// row's place. So a batch can be cut over devices, or be served together with others, without a difference.
/// A software GPU adds up in another order than a GPU: between these two the last bits may differ.
pub trait Softmax: Operations {
    softmax! {
        softmax softmax_in_place softmax_backward 0u32 "`exp(x) / sum of exp(x)`" "0.5, 0.5, 1.0, 0.0"
            "`y * (dy - sum of dy * y)`" "0.5";
        log_softmax log_softmax_in_place log_softmax_backward 1u32 "`x - log(sum of exp(x))`"
            "-0.6931, -0.6931, 0.0, -1000.0" "`dy - exp(y) * sum of dy`" "1.0";
    }

    /// Softmax and cross-entropy of each row of `logits` with its label: the loss of each row, and the gradient of
    /// `scale` times the sum of the losses. There are as many rows as labels. For the mean over a batch `scale` is
    /// one over the rows of the *whole* batch, on all devices.
    ///
    /// `loss = log(sum of exp(x)) - x[label]`, `gradient = (softmax(x) - one at the label) * scale`.
    ///
    /// A label that is no column makes the loss and the gradient of its row NaN; nothing outside the row is touched. So
    /// the mistake shows in the mean, but costs no wait. [`check_indices`](super::Rows::check_indices) waits, and names
    /// the label: call it once for a data set.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let logits = dev.upload(&[0.0f32, 0.0, 1.0, 1.0])?; // 2 rows of 2 classes
    /// let labels = dev.upload(&[0u32, 1])?;
    /// let (loss, gradient) = dev.cross_entropy(&logits, &labels, 0.5)?;
    /// assert!(dev.download(&loss)?.iter().all(|loss| (loss - 0.6931).abs() < 1e-4));
    /// assert_eq!(dev.download(&gradient)?, [-0.25, 0.25, 0.25, -0.25]);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn cross_entropy<X: AsView<Elem: Float>, L: AsView<Elem: Index>>(
        &self,
        logits: &X,
        labels: &L,
        scale: <X::Elem as Float>::Acc,
    ) -> Result<Loss<X::Elem>> {
        let (x, labels) = (logits.view(), L::Elem::words(labels.view()));
        let _here = self.enter("cross_entropy");
        let (rows, cols) = classes("cross_entropy", x.len(), labels.len())?;
        let (mut loss, mut dx) = (self.allocate("cross_entropy", rows)?, self.allocate("cross_entropy", x.len())?);
        let args = (Input::View(x), labels, &mut dx, &mut loss, rows as u64, cols, scale);
        // SAFETY: `x` and `dx` have `rows` rows of `cols` elements, the others an element for each row.
        unsafe { self.launch(&entropy_kernel::<X::Elem>(), row_dims::<X::Elem>(rows, cols as usize), args)? };
        Ok((loss, dx))
    }

    /// [`cross_entropy`](Self::cross_entropy) that puts the gradient in the place of the logits: for vocabularies so
    /// large that a second buffer costs too much memory. Returns the loss of each row.
    #[track_caller]
    fn cross_entropy_in_place<X: AsViewMut<Elem: Float>, L: AsView<Elem: Index>>(
        &self,
        logits: &mut X,
        labels: &L,
        scale: <X::Elem as Float>::Acc,
    ) -> Result<DeviceBuffer<<X::Elem as Float>::Acc>> {
        let (x, labels) = (logits.view_mut(), L::Elem::words(labels.view()));
        let _here = self.enter("cross_entropy_in_place");
        let (rows, cols) = classes("cross_entropy_in_place", x.len(), labels.len())?;
        let mut loss = self.allocate("cross_entropy_in_place", rows)?;
        let args = (Input::Output(x.address()), labels, x, &mut loss, rows as u64, cols, scale);
        // SAFETY: `x` has `rows` rows of `cols` elements, the others an element for each row.
        unsafe { self.launch(&entropy_kernel::<X::Elem>(), row_dims::<X::Elem>(rows, cols as usize), args)? };
        Ok(loss)
    }

    /// The losses of [`cross_entropy`](Self::cross_entropy) alone: for validation.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let (x, labels) = (dev.upload(&[0.0f32, 0.0, 9.0, 9.0])?, dev.upload(&[1u32, 0])?);
    /// let loss = dev.download(&dev.cross_entropy_loss(&x, &labels)?)?;
    /// assert!(loss.iter().all(|loss| (loss - 0.6931).abs() < 1e-4));
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn cross_entropy_loss<X: AsView<Elem: Float>, L: AsView<Elem: Index>>(
        &self,
        logits: &X,
        labels: &L,
    ) -> Result<DeviceBuffer<<X::Elem as Float>::Acc>> {
        let (x, labels) = (logits.view(), L::Elem::words(labels.view()));
        let _here = self.enter("cross_entropy_loss");
        let (rows, cols) = classes("cross_entropy_loss", x.len(), labels.len())?;
        let mut loss = self.allocate("cross_entropy_loss", rows)?;
        let one = <X::Elem as Float>::Acc::of(1.0);
        let args = (x, labels, Input::Null, &mut loss, rows as u64, cols, one);
        // SAFETY: `x` has `rows` rows of `cols` elements, the others an element for each row; a null gradient is none.
        unsafe { self.launch(&entropy_loss::<X::Elem>(), row_dims::<X::Elem>(rows, cols as usize), args)? };
        Ok(loss)
    }
}

impl Softmax for Device {}

fn classes(op: &'static str, len: usize, labels: usize) -> Result<(usize, u32)> {
    if labels == 0 && len == 0 {
        return Ok((0, 1));
    }
    invalid_if!(labels == 0 || !len.is_multiple_of(labels) || len == 0, op, "{len} logits for {labels} labels");
    rows_of(op, len, len / labels).map(|rows| (rows, (len / labels) as u32))
}
