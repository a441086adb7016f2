//! Operations on rows: softmax, cross-entropy, layer norm, RMS norm, argmax; and sums of columns: `kernels/rows.cu`.
//!
//! `Device`'s methods check shapes and launch the kernels. They use the launch of `device` and the types of `kernel`,
//! and nothing above.
//!
//! Invariant: the launch of a row operation depends on the width of a row only as far as the row's threads go, so the
//! bits of a row do not depend on the number of rows. Sums over rows have a fixed order: the same bits every run.

use super::{
    embedding::Index,
    family::{Address, In, NULL, Out, address, each_row, each_row_mut, kernels, lanes, rows_of, wide},
    same_len,
};
use crate::{
    Device, DeviceBuffer, LaunchDims,
    error::{Error, Result},
    kernel::{
        builtin::{Float, module},
        real::Real,
    },
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};
use std::panic::Location;

module! { ROWS, "rows" }

/// Packs that each thread of a row keeps in registers: as in `kernels/rows.cu`.
const KEPT: usize = 4;
/// Rows that a part of a sum of columns has, unless there would be more parts than [`MOST_PARTS`].
const PART: usize = 64;
const MOST_PARTS: usize = 128;

/// A warp per row, or a block of as many threads as keep the row in registers: by the width alone.
fn row_dims<T>(rows: usize, cols: usize) -> LaunchDims {
    let threads = cols.div_ceil(lanes::<T>() * KEPT).next_power_of_two().clamp(32, 1024);
    let together = if threads == 32 { 4 } else { 1 };
    let blocks = rows.div_ceil(together).clamp(1, i32::MAX as usize);
    LaunchDims { grid: (blocks as u32, 1, 1), block: (threads as u32, together as u32, 1), shared_bytes: 0 }
}

/// A warp per 32 packs of columns, eight warps per part.
fn column_dims<T>(cols: usize, parts: u32) -> LaunchDims {
    LaunchDims { grid: (cols.div_ceil(32 * lanes::<T>()).max(1) as u32, parts, 1), block: (32, 8, 1), shared_bytes: 0 }
}

fn parts_of(rows: usize) -> u32 {
    rows.div_ceil(PART).clamp(1, MOST_PARTS) as u32
}

/// The greatest element of a row, and the sum of the exponentials of the differences to it.
fn top_and_sum<T: Float>(row: &[T]) -> (T::Acc, T::Acc) {
    let top = row.iter().map(wide).fold(T::Acc::of(f64::NEG_INFINITY), Real::max);
    let sum = row.iter().map(|x| (wide(x) - top).exp()).fold(T::Acc::default(), |sum, e| sum + e);
    (top, sum)
}

/// Softmax of one row in place.
fn soften<T: Float>(row: &mut [T], log: u32) {
    let (top, sum) = top_and_sum(row);
    let (factor, shift) = (T::Acc::of(1.0) / sum, sum.ln());
    for x in row {
        let v = wide(x) - top;
        *x = T::narrow(if log != 0 { v - shift } else { v.exp() * factor });
    }
}

fn host_softmax<T: Float>(_: LaunchDims, x: &[T], y: &mut [T], rows: u64, cols: u32, log: u32) {
    for (x, y) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)) {
        y.copy_from_slice(x);
        soften(y, log);
    }
}

fn host_softmax_assign<T: Float>(_: LaunchDims, _: Address, x: &mut [T], rows: u64, cols: u32, log: u32) {
    each_row_mut(x, rows, cols).for_each(|x| soften(x, log));
}

fn host_softmax_backward<T: Float>(_: LaunchDims, y: &[T], dy: &[T], dx: &mut [T], rows: u64, cols: u32, log: u32) {
    let inputs = each_row(y, rows, cols).zip(each_row(dy, rows, cols));
    for (dx, (y, dy)) in each_row_mut(dx, rows, cols).zip(inputs) {
        let both = y.iter().map(wide).zip(dy.iter().map(wide));
        let products = both.clone().map(|(y, dy)| if log != 0 { dy } else { dy * y });
        let sum = products.fold(T::Acc::default(), |sum, p| sum + p);
        for (dx, (y, dy)) in dx.iter_mut().zip(both) {
            *dx = T::narrow(if log != 0 { dy - y.exp() * sum } else { y * (dy - sum) });
        }
    }
}

/// The loss of a row, and its gradient in place of the row.
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

#[allow(clippy::too_many_arguments)]
fn host_entropy<T: Float>(
    _: LaunchDims,
    x: &[T],
    labels: &[u32],
    dx: &mut [T],
    loss: &mut [T::Acc],
    rows: u64,
    cols: u32,
    scale: T::Acc,
) {
    let outputs = each_row_mut(dx, rows, cols).zip(loss);
    for ((x, label), (dx, loss)) in each_row(x, rows, cols).zip(labels).zip(outputs) {
        dx.copy_from_slice(x);
        *loss = entropy(dx, *label, Some(scale));
    }
}

#[allow(clippy::too_many_arguments)]
fn host_entropy_assign<T: Float>(
    _: LaunchDims,
    _: Address,
    labels: &[u32],
    x: &mut [T],
    loss: &mut [T::Acc],
    rows: u64,
    cols: u32,
    scale: T::Acc,
) {
    for ((x, label), loss) in each_row_mut(x, rows, cols).zip(labels).zip(loss) {
        *loss = entropy(x, *label, Some(scale));
    }
}

#[allow(clippy::too_many_arguments)]
fn host_entropy_loss<T: Float>(
    _: LaunchDims,
    x: &[T],
    labels: &[u32],
    _: Address,
    loss: &mut [T::Acc],
    rows: u64,
    cols: u32,
    _: T::Acc,
) {
    for ((x, label), loss) in each_row(x, rows, cols).zip(labels).zip(loss) {
        *loss = entropy(&mut x.to_vec(), *label, None);
    }
}

/// The mean of `f(i)` over a row of `cols` elements.
fn mean<A: Real>(cols: u32, f: impl Fn(usize) -> A) -> A {
    (0..cols as usize).fold(A::default(), |sum, i| sum + f(i)) / A::of(f64::from(cols))
}

#[allow(clippy::too_many_arguments)]
fn host_layer_norm<T: Float>(
    _: LaunchDims,
    x: &[T],
    gamma: &[T],
    beta: &[T],
    y: &mut [T],
    mean_of: &mut [T::Acc],
    rstd_of: &mut [T::Acc],
    rows: u64,
    cols: u32,
    eps: T::Acc,
) {
    let stats = mean_of.iter_mut().zip(rstd_of);
    for ((x, y), (mean_of, rstd_of)) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)).zip(stats) {
        let average = mean(cols, |i| wide(&x[i]));
        let rstd = T::Acc::of(1.0) / (mean(cols, |i| (wide(&x[i]) - average) * (wide(&x[i]) - average)) + eps).sqrt();
        (*mean_of, *rstd_of) = (average, rstd);
        for (i, y) in y.iter_mut().enumerate() {
            *y = T::narrow((wide(&x[i]) - average) * rstd * wide(&gamma[i]) + wide(&beta[i]));
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn host_rms_norm<T: Float>(
    _: LaunchDims,
    x: &[T],
    gamma: &[T],
    y: &mut [T],
    rstd_of: &mut [T::Acc],
    rows: u64,
    cols: u32,
    eps: T::Acc,
) {
    for ((x, y), rstd_of) in each_row(x, rows, cols).zip(each_row_mut(y, rows, cols)).zip(rstd_of) {
        let rstd = T::Acc::of(1.0) / (mean(cols, |i| wide(&x[i]) * wide(&x[i])) + eps).sqrt();
        *rstd_of = rstd;
        for (i, y) in y.iter_mut().enumerate() {
            *y = T::narrow(wide(&x[i]) * rstd * wide(&gamma[i]));
        }
    }
}

/// The gradient of one row of a norm; `average` is the row's mean where the norm subtracts it.
fn norm_backward_row<T: Float>(dy: &[T], x: &[T], gamma: &[T], average: Option<T::Acc>, rstd: T::Acc, dx: &mut [T]) {
    let cols = x.len() as u32;
    let g = |i: usize| wide(&dy[i]) * wide(&gamma[i]);
    let h = |i: usize| (wide(&x[i]) - average.unwrap_or_default()) * rstd;
    let first = average.map_or(T::Acc::default(), |_| mean(cols, g));
    let second = mean(cols, |i| g(i) * h(i));
    for (i, dx) in dx.iter_mut().enumerate() {
        *dx = T::narrow(rstd * (g(i) - first - h(i) * second));
    }
}

#[allow(clippy::too_many_arguments)]
fn host_layer_norm_backward<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    mean_of: &[T::Acc],
    rstd_of: &[T::Acc],
    dx: &mut [T],
    rows: u64,
    cols: u32,
) {
    let inputs = each_row(dy, rows, cols).zip(each_row(x, rows, cols)).zip(mean_of.iter().zip(rstd_of));
    for (dx, ((dy, x), (average, rstd))) in each_row_mut(dx, rows, cols).zip(inputs) {
        norm_backward_row(dy, x, gamma, Some(*average), *rstd, dx);
    }
}

#[allow(clippy::too_many_arguments)]
fn host_rms_norm_backward<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    rstd_of: &[T::Acc],
    dx: &mut [T],
    rows: u64,
    cols: u32,
) {
    let inputs = each_row(dy, rows, cols).zip(each_row(x, rows, cols)).zip(rstd_of);
    for (dx, ((dy, x), rstd)) in each_row_mut(dx, rows, cols).zip(inputs) {
        norm_backward_row(dy, x, gamma, None, *rstd, dx);
    }
}

fn host_argmax<T: Float>(_: LaunchDims, x: &[T], at: &mut [u32], rows: u64, cols: u32) {
    let is_nan = |x: T::Acc| x.to_f64().is_nan();
    for (x, at) in each_row(x, rows, cols).zip(at) {
        let better = |a: T::Acc, b: T::Acc| a > b || (is_nan(a) && !is_nan(b));
        let best = (1..x.len()).fold(0, |best, i| if better(wide(&x[i]), wide(&x[best])) { i } else { best });
        *at = best as u32;
    }
}

/// Adds `f(row, column)` up over each part of the rows.
fn sum_parts<A: Real>(out: &mut [A], rows: u64, cols: u32, parts: u32, f: impl Fn(usize, usize) -> A) {
    let chunk = (rows as usize).div_ceil(parts as usize);
    for (part, out) in each_row_mut(out, u64::from(parts), cols).enumerate() {
        out.fill(A::default());
        for row in (part * chunk).min(rows as usize)..((part + 1) * chunk).min(rows as usize) {
            out.iter_mut().enumerate().for_each(|(c, sum)| *sum += f(row, c));
        }
    }
}

fn host_column_sum<T: Float>(_: LaunchDims, x: &[T], partial: &mut [T::Acc], rows: u64, cols: u32, parts: u32) {
    sum_parts(partial, rows, cols, parts, |row, c| wide(&x[row * cols as usize + c]));
}

fn host_column_final<T: Float>(_: LaunchDims, partial: &[T::Acc], out: &mut [T], parts: u32, cols: u32) {
    let mut sums = vec![T::Acc::default(); cols as usize];
    sum_parts(&mut sums, u64::from(parts), cols, 1, |part, c| partial[part * cols as usize + c]);
    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(sum));
}

#[allow(clippy::too_many_arguments)]
fn host_layer_norm_columns<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    mean_of: &[T::Acc],
    rstd_of: &[T::Acc],
    dgamma: &mut [T::Acc],
    dbeta: &mut [T::Acc],
    rows: u64,
    cols: u32,
    parts: u32,
) {
    let at = |row: usize, c: usize| row * cols as usize + c;
    let share = |row, c| wide(&dy[at(row, c)]) * ((wide(&x[at(row, c)]) - mean_of[row]) * rstd_of[row]);
    sum_parts(dgamma, rows, cols, parts, share);
    sum_parts(dbeta, rows, cols, parts, |row, c| wide(&dy[at(row, c)]));
}

#[allow(clippy::too_many_arguments)]
fn host_rms_norm_columns<T: Float>(
    _: LaunchDims,
    dy: &[T],
    x: &[T],
    rstd_of: &[T::Acc],
    dgamma: &mut [T::Acc],
    rows: u64,
    cols: u32,
    parts: u32,
) {
    let at = |row: usize, c: usize| row * cols as usize + c;
    sum_parts(dgamma, rows, cols, parts, |row, c| wide(&dy[at(row, c)]) * (wide(&x[at(row, c)]) * rstd_of[row]));
}

kernels! { ROWS;
    fn softmax(In<T>, Out<T>, u64, u32, u32) = "softmax", host_softmax::<T>;
    fn softmax_assign(Address, Out<T>, u64, u32, u32) = "softmax", host_softmax_assign::<T>;
    fn softmax_backward(In<T>, In<T>, Out<T>, u64, u32, u32) = "softmax_backward", host_softmax_backward::<T>;
    fn entropy_kernel(In<T>, In<u32>, Out<T>, Out<T::Acc>, u64, u32, T::Acc) = "cross_entropy", host_entropy::<T>;
    fn entropy_assign(Address, In<u32>, Out<T>, Out<T::Acc>, u64, u32, T::Acc)
        = "cross_entropy", host_entropy_assign::<T>;
    fn entropy_loss(In<T>, In<u32>, Address, Out<T::Acc>, u64, u32, T::Acc) = "cross_entropy", host_entropy_loss::<T>;
    fn layer_norm(In<T>, In<T>, In<T>, Out<T>, Out<T::Acc>, Out<T::Acc>, u64, u32, T::Acc)
        = "layer_norm", host_layer_norm::<T>;
    fn rms_norm(In<T>, In<T>, Out<T>, Out<T::Acc>, u64, u32, T::Acc) = "rms_norm", host_rms_norm::<T>;
    fn layer_norm_backward(In<T>, In<T>, In<T>, In<T::Acc>, In<T::Acc>, Out<T>, u64, u32)
        = "layer_norm_backward", host_layer_norm_backward::<T>;
    fn rms_norm_backward(In<T>, In<T>, In<T>, In<T::Acc>, Out<T>, u64, u32)
        = "rms_norm_backward", host_rms_norm_backward::<T>;
    fn argmax(In<T>, Out<u32>, u64, u32) = "argmax", host_argmax::<T>;
    fn column_sum(In<T>, Out<T::Acc>, u64, u32, u32) = "column_sum", host_column_sum::<T>;
    fn layer_norm_columns(In<T>, In<T>, In<T::Acc>, In<T::Acc>, Out<T::Acc>, Out<T::Acc>, u64, u32, u32)
        = "layer_norm_columns", host_layer_norm_columns::<T>;
    fn rms_norm_columns(In<T>, In<T>, In<T::Acc>, Out<T::Acc>, u64, u32, u32)
        = "rms_norm_columns", host_rms_norm_columns::<T>;
    fn column_final(In<T::Acc>, Out<T>, u32, u32) = "column_final", host_column_final::<T>;
}

/// The four forms of softmax, and the step back through two of them.
macro_rules! softmax {
    ($($name:ident $assign:ident $back:ident $log:literal $what:literal $y:literal $of_y:literal;)+) => {
        /// Operations on rows: a buffer is rows of `cols` elements, one after the other. All are asynchronous on the
        /// current stream and can be captured, unless they say that they wait. They compute in `f32` (of `f64` in
        /// `f64`) and round once.
        ///
        /// The bits of a row depend on its elements and its width alone: not on how many rows there are, or on the
        /// row's place. So a batch can be cut over devices, or be served together with others, without a difference.
        /// A software GPU adds up in another order than a GPU: between these two the last bits may differ.
        ///
        /// Errors of all: [`Error::InvalidArgument`] for shapes that do not fit, [`Error::WrongDevice`],
        /// [`Error::Aborted`], [`Error::OutOfMemory`] where a buffer is made, and the driver's.
        impl Device {$(
            #[doc = concat!($what, " of each row of `cols` elements, in a new buffer.")]
            ///
            /// The row's maximum is subtracted first, so no exponential overflows ("online softmax", Milakov and
            /// Gimelshein, 2018). A row with a NaN or `+inf`, or all of `-inf`, becomes NaN, as in PyTorch.
            ///
            /// ```
            /// # use gpu_pool::GpuPool;
            /// # let pool = GpuPool::builder().host(1).build()?;
            /// # pool.run(|dev, _| {
            /// let x = dev.upload(&[1.0f32, 1.0, 1000.0, 0.0])?; // 2 x 2
            #[doc = concat!("let y = dev.download(&dev.", stringify!($name), "(&x, 2)?)?;")]
            #[doc = concat!("let right = [", $y, "f32];")]
            /// assert!(y.iter().zip(right).all(|(y, right)| (y - right).abs() < 1e-4), "{y:?}");
            /// # Ok(()) })?;
            /// # Ok::<(), gpu_pool::Error>(())
            /// ```
            ///
            /// # Errors
            /// See above.
            #[track_caller]
            pub fn $name<X>(&self, x: &X, cols: usize) -> Result<DeviceBuffer<X::Elem>>
            where
                X: AsView + ?Sized,
                X::Elem: Float,
            {
                let x = x.view();
                let _here = self.worker.handle.enter(stringify!($name), Location::caller());
                let rows = rows_of(stringify!($name), x.len(), cols)?;
                let mut y = self.allocate(stringify!($name), x.len())?;
                let args = (x, &mut y, rows as u64, cols as u32, $log);
                // SAFETY: both have `rows` rows of `cols` elements.
                unsafe { self.launch(&softmax::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
                Ok(y)
            }

            #[doc = concat!($what, " of each row of `cols` elements, in place.")]
            ///
            /// # Errors
            /// See above.
            #[track_caller]
            pub fn $assign<X>(&self, x: &mut X, cols: usize) -> Result<()>
            where
                X: AsViewMut + ?Sized,
                X::Elem: Float,
            {
                let x = x.view_mut();
                let _here = self.worker.handle.enter(stringify!($assign), Location::caller());
                let rows = rows_of(stringify!($assign), x.len(), cols)?;
                let args = (address(&x), x, rows as u64, cols as u32, $log);
                // SAFETY: `x` has `rows` rows of `cols` elements.
                unsafe { self.launch(&softmax_assign::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args) }
            }

            #[doc = concat!("The step back through [`", stringify!($name), "`](Self::", stringify!($name), "):")]
            #[doc = concat!($of_y, ", in a new buffer; `y` is what the step forward gave.")]
            ///
            /// # Errors
            /// See above.
            #[track_caller]
            pub fn $back<D, Y>(&self, dy: &D, y: &Y, cols: usize) -> Result<DeviceBuffer<Y::Elem>>
            where
                D: AsView<Elem = Y::Elem> + ?Sized,
                Y: AsView + ?Sized,
                Y::Elem: Float,
            {
                let (dy, y) = (dy.view(), y.view());
                let _here = self.worker.handle.enter(stringify!($back), Location::caller());
                let rows = rows_of(stringify!($back), y.len(), cols)?;
                same_len(stringify!($back), dy.len(), y.len())?;
                let mut dx = self.allocate(stringify!($back), y.len())?;
                let args = (y, dy, &mut dx, rows as u64, cols as u32, $log);
                // SAFETY: all three have `rows` rows of `cols` elements.
                unsafe { self.launch(&softmax_backward::<Y::Elem>(), row_dims::<Y::Elem>(rows, cols), args)? };
                Ok(dx)
            }
        )+}
    };
}
softmax! {
    softmax softmax_assign softmax_backward 0u32 "`exp(x) / sum of exp(x)`" "0.5, 0.5, 1.0, 0.0"
        "`y * (dy - sum of dy * y)`";
    log_softmax log_softmax_assign log_softmax_backward 1u32 "`x - log(sum of exp(x))`" "-0.6931, -0.6931, 0.0, -1000.0"
        "`dy - exp(y) * sum of dy`";
}

/// What a cross-entropy gives: the loss of each row, and the gradient of the logits.
type Loss<T> = (DeviceBuffer<<T as Float>::Acc>, DeviceBuffer<T>);
/// What a layer norm gives: `y`, and the mean and `1 / sqrt(variance + eps)` of each row.
type Normed<T> = (DeviceBuffer<T>, DeviceBuffer<<T as Float>::Acc>, DeviceBuffer<<T as Float>::Acc>);

impl Device {
    /// Softmax and cross-entropy of each row of `logits` with its label: the loss of each row, and the gradient of
    /// `scale` times the sum of the losses. There are as many rows as labels. For the mean over a batch `scale` is
    /// one over the rows of the *whole* batch, on all devices.
    ///
    /// `loss = log(sum of exp(x)) - x[label]`, `gradient = (softmax(x) - one at the label) * scale`.
    ///
    /// A label that is no column makes the loss and the gradient of its row NaN; nothing outside the row is touched. So
    /// the mistake shows in the mean, but costs no wait. [`check_indices`](Self::check_indices) waits, and names the
    /// label: call it once for a data set.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let logits = dev.upload(&[0.0f32, 0.0, 1.0, 1.0])?; // 2 rows of 2 classes
    /// let labels = dev.upload(&[0u32, 1])?;
    /// let (loss, gradient) = dev.cross_entropy(&logits, &labels, 0.5)?;
    /// assert!(dev.download(&loss)?.iter().all(|loss| (loss - 0.6931).abs() < 1e-4));
    /// assert_eq!(dev.download(&gradient)?, [-0.25, 0.25, 0.25, -0.25]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn cross_entropy<X, L>(&self, logits: &X, labels: &L, scale: <X::Elem as Float>::Acc) -> Result<Loss<X::Elem>>
    where
        X: AsView + ?Sized,
        X::Elem: Float,
        L: AsView + ?Sized,
        L::Elem: Index,
    {
        let (x, labels) = (logits.view(), L::Elem::words(labels.view()));
        let _here = self.worker.handle.enter("cross_entropy", Location::caller());
        let (rows, cols) = classes("cross_entropy", x.len(), labels.len())?;
        let (mut loss, mut dx) = (self.allocate("cross_entropy", rows)?, self.allocate("cross_entropy", x.len())?);
        let args = (x, labels, &mut dx, &mut loss, rows as u64, cols, scale);
        // SAFETY: `x` and `dx` have `rows` rows of `cols` elements, the others an element for each row.
        unsafe { self.launch(&entropy_kernel::<X::Elem>(), row_dims::<X::Elem>(rows, cols as usize), args)? };
        Ok((loss, dx))
    }

    /// [`cross_entropy`](Self::cross_entropy) that puts the gradient in the place of the logits: for vocabularies so
    /// large that a second buffer costs too much memory. Returns the loss of each row.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn cross_entropy_assign<X, L>(
        &self,
        logits: &mut X,
        labels: &L,
        scale: <X::Elem as Float>::Acc,
    ) -> Result<DeviceBuffer<<X::Elem as Float>::Acc>>
    where
        X: AsViewMut + ?Sized,
        X::Elem: Float,
        L: AsView + ?Sized,
        L::Elem: Index,
    {
        let (x, labels) = (logits.view_mut(), L::Elem::words(labels.view()));
        let _here = self.worker.handle.enter("cross_entropy_assign", Location::caller());
        let (rows, cols) = classes("cross_entropy_assign", x.len(), labels.len())?;
        let mut loss = self.allocate("cross_entropy_assign", rows)?;
        let args = (address(&x), labels, x, &mut loss, rows as u64, cols, scale);
        // SAFETY: `x` has `rows` rows of `cols` elements, the others an element for each row.
        unsafe { self.launch(&entropy_assign::<X::Elem>(), row_dims::<X::Elem>(rows, cols as usize), args)? };
        Ok(loss)
    }

    /// The losses of [`cross_entropy`](Self::cross_entropy) alone: for validation.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn cross_entropy_loss<X, L>(&self, logits: &X, labels: &L) -> Result<DeviceBuffer<<X::Elem as Float>::Acc>>
    where
        X: AsView + ?Sized,
        X::Elem: Float,
        L: AsView + ?Sized,
        L::Elem: Index,
    {
        let (x, labels) = (logits.view(), L::Elem::words(labels.view()));
        let _here = self.worker.handle.enter("cross_entropy_loss", Location::caller());
        let (rows, cols) = classes("cross_entropy_loss", x.len(), labels.len())?;
        let mut loss = self.allocate("cross_entropy_loss", rows)?;
        let one = <X::Elem as Float>::Acc::of(1.0);
        let args = (x, labels, NULL, &mut loss, rows as u64, cols, one);
        // SAFETY: `x` has `rows` rows of `cols` elements, the others an element for each row; a null gradient is none.
        unsafe { self.launch(&entropy_loss::<X::Elem>(), row_dims::<X::Elem>(rows, cols as usize), args)? };
        Ok(loss)
    }

    /// Layer norm of each row (Ba, Kiros and Hinton, 2016): `y = (x - mean) * rstd * gamma + beta`, with
    /// `rstd = 1 / sqrt(variance + eps)`. A row is as long as `gamma` and `beta`. The variance is the mean of the
    /// squared differences, in a second pass. Returns `y`, and the mean and `rstd` of each row for the step back.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let x = dev.upload(&[1.0f64, 3.0, 10.0, 20.0])?; // 2 x 2
    /// let (gamma, beta) = (dev.upload(&[1.0f64, 1.0])?, dev.upload(&[0.0f64, 5.0])?);
    /// let (y, mean, rstd) = dev.layer_norm(&x, &gamma, &beta, 0.0)?;
    /// assert_eq!(dev.download(&y)?, [-1.0, 6.0, -1.0, 6.0]);
    /// assert_eq!((dev.download(&mean)?, dev.download(&rstd)?), (vec![2.0, 15.0], vec![1.0, 0.2]));
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn layer_norm<X, G, B>(
        &self,
        x: &X,
        gamma: &G,
        beta: &B,
        eps: <X::Elem as Float>::Acc,
    ) -> Result<Normed<X::Elem>>
    where
        X: AsView + ?Sized,
        G: AsView<Elem = X::Elem> + ?Sized,
        B: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (x, gamma, beta) = (x.view(), gamma.view(), beta.view());
        let _here = self.worker.handle.enter("layer_norm", Location::caller());
        let cols = gamma.len();
        let rows = rows_of("layer_norm", x.len(), cols)?;
        same_len("layer_norm", cols, beta.len())?;
        let (mut mean, mut rstd) = (self.allocate("layer_norm", rows)?, self.allocate("layer_norm", rows)?);
        let mut y = self.allocate("layer_norm", x.len())?;
        let args = (x, gamma, beta, &mut y, &mut mean, &mut rstd, rows as u64, cols as u32, eps);
        // SAFETY: `x` and `y` have `rows` rows of `cols` elements, mean and rstd one for each row, the others `cols`.
        unsafe { self.launch(&layer_norm::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok((y, mean, rstd))
    }

    /// The step back through [`layer_norm`](Self::layer_norm): the gradient of `x`, in a new buffer. `mean` and `rstd`
    /// are those that the step forward gave.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn layer_norm_backward<D, X, G>(
        &self,
        dy: &D,
        x: &X,
        gamma: &G,
        mean: &DeviceBuffer<<X::Elem as Float>::Acc>,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
    ) -> Result<DeviceBuffer<X::Elem>>
    where
        D: AsView<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        G: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (dy, x, gamma) = (dy.view(), x.view(), gamma.view());
        let _here = self.worker.handle.enter("layer_norm_backward", Location::caller());
        let cols = gamma.len();
        let rows = normed_rows("layer_norm_backward", dy.len(), x.len(), cols, rstd.len())?;
        same_len("layer_norm_backward", rows, mean.len())?;
        let mut dx = self.allocate("layer_norm_backward", x.len())?;
        let args = (dy, x, gamma, mean, rstd, &mut dx, rows as u64, cols as u32);
        // SAFETY: `dy`, `x` and `dx` have `rows` rows of `cols` elements, mean and rstd one for each row.
        unsafe { self.launch(&layer_norm_backward::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok(dx)
    }

    /// The gradients of the weights of [`layer_norm`](Self::layer_norm): `dgamma` is the sum over the rows of
    /// `dy * (x - mean) * rstd`, `dbeta` that of `dy`. Sums have a fixed order: the same bits every run.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn layer_norm_weights_backward<D, X, G, B>(
        &self,
        dy: &D,
        x: &X,
        mean: &DeviceBuffer<<X::Elem as Float>::Acc>,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
        dgamma: &mut G,
        dbeta: &mut B,
    ) -> Result<()>
    where
        D: AsView<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        G: AsViewMut<Elem = X::Elem> + ?Sized,
        B: AsViewMut<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        const OP: &str = "layer_norm_weights_backward";
        let (dy, x, dgamma, dbeta) = (dy.view(), x.view(), dgamma.view_mut(), dbeta.view_mut());
        let _here = self.worker.handle.enter(OP, Location::caller());
        let cols = dgamma.len();
        let rows = normed_rows(OP, dy.len(), x.len(), cols, rstd.len())?;
        same_len(OP, rows, mean.len())?;
        same_len(OP, cols, dbeta.len())?;
        let parts = parts_of(rows);
        let mut gammas = self.allocate(OP, parts as usize * cols)?;
        let mut betas = self.allocate(OP, parts as usize * cols)?;
        let args = (dy, x, mean, rstd, &mut gammas, &mut betas, rows as u64, cols as u32, parts);
        // SAFETY: `dy` and `x` have `rows` rows of `cols` elements, mean and rstd one for each row, the sums `parts`.
        unsafe { self.launch(&layer_norm_columns::<X::Elem>(), column_dims::<X::Elem>(cols, parts), args)? };
        self.sum_parts(&gammas, dgamma, parts)?;
        self.sum_parts(&betas, dbeta, parts)
    }

    /// RMS norm of each row (Zhang and Sennrich, 2019): `y = x * rstd * gamma`, `rstd = 1 / sqrt(mean of x^2 + eps)`. A
    /// row is as long as `gamma`. Returns `y`, and the `rstd` of each row for the step back.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let (x, gamma) = (dev.upload(&[2.0f64, -2.0])?, dev.upload(&[1.0f64, 3.0])?);
    /// let (y, rstd) = dev.rms_norm(&x, &gamma, 0.0)?;
    /// assert_eq!((dev.download(&y)?, dev.download(&rstd)?), (vec![1.0, -3.0], vec![0.5]));
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    #[allow(clippy::type_complexity)]
    pub fn rms_norm<X, G>(
        &self,
        x: &X,
        gamma: &G,
        eps: <X::Elem as Float>::Acc,
    ) -> Result<(DeviceBuffer<X::Elem>, DeviceBuffer<<X::Elem as Float>::Acc>)>
    where
        X: AsView + ?Sized,
        G: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (x, gamma) = (x.view(), gamma.view());
        let _here = self.worker.handle.enter("rms_norm", Location::caller());
        let cols = gamma.len();
        let rows = rows_of("rms_norm", x.len(), cols)?;
        let (mut y, mut rstd) = (self.allocate("rms_norm", x.len())?, self.allocate("rms_norm", rows)?);
        let args = (x, gamma, &mut y, &mut rstd, rows as u64, cols as u32, eps);
        // SAFETY: `x` and `y` have `rows` rows of `cols` elements, rstd one for each row, gamma `cols`.
        unsafe { self.launch(&rms_norm::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok((y, rstd))
    }

    /// The step back through [`rms_norm`](Self::rms_norm): the gradient of `x`, in a new buffer.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn rms_norm_backward<D, X, G>(
        &self,
        dy: &D,
        x: &X,
        gamma: &G,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
    ) -> Result<DeviceBuffer<X::Elem>>
    where
        D: AsView<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        G: AsView<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (dy, x, gamma) = (dy.view(), x.view(), gamma.view());
        let _here = self.worker.handle.enter("rms_norm_backward", Location::caller());
        let cols = gamma.len();
        let rows = normed_rows("rms_norm_backward", dy.len(), x.len(), cols, rstd.len())?;
        let mut dx = self.allocate("rms_norm_backward", x.len())?;
        let args = (dy, x, gamma, rstd, &mut dx, rows as u64, cols as u32);
        // SAFETY: `dy`, `x` and `dx` have `rows` rows of `cols` elements, rstd one for each row.
        unsafe { self.launch(&rms_norm_backward::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok(dx)
    }

    /// The gradient of the weights of [`rms_norm`](Self::rms_norm): the sum over the rows of `dy * x * rstd`, in a
    /// fixed order.
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn rms_norm_weights_backward<D, X, G>(
        &self,
        dy: &D,
        x: &X,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
        dgamma: &mut G,
    ) -> Result<()>
    where
        D: AsView<Elem = X::Elem> + ?Sized,
        X: AsView + ?Sized,
        G: AsViewMut<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        const OP: &str = "rms_norm_weights_backward";
        let (dy, x, dgamma) = (dy.view(), x.view(), dgamma.view_mut());
        let _here = self.worker.handle.enter(OP, Location::caller());
        let cols = dgamma.len();
        let rows = normed_rows(OP, dy.len(), x.len(), cols, rstd.len())?;
        let parts = parts_of(rows);
        let mut gammas = self.allocate(OP, parts as usize * cols)?;
        let args = (dy, x, rstd, &mut gammas, rows as u64, cols as u32, parts);
        // SAFETY: `dy` and `x` have `rows` rows of `cols` elements, rstd one for each row, the sums `parts` rows.
        unsafe { self.launch(&rms_norm_columns::<X::Elem>(), column_dims::<X::Elem>(cols, parts), args)? };
        self.sum_parts(&gammas, dgamma, parts)
    }

    /// The place of the greatest element of each row of `cols` elements: the first of equals; a NaN is greater than
    /// all numbers, as in PyTorch.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let x = dev.upload(&[1.0f32, 7.0, 7.0, -1.0, f32::NAN, 9.0])?; // 2 x 3
    /// assert_eq!(dev.download(&dev.argmax(&x, 3)?)?, [1, 1]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn argmax<X>(&self, x: &X, cols: usize) -> Result<DeviceBuffer<u32>>
    where
        X: AsView + ?Sized,
        X::Elem: Float,
    {
        let x = x.view();
        let _here = self.worker.handle.enter("argmax", Location::caller());
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
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?; // 3 x 2
    /// let mut sum = dev.zeros::<f32>(2)?;
    /// dev.column_sum(&x, &mut sum)?;
    /// assert_eq!(dev.download(&sum)?, [9.0, 12.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// See above.
    #[track_caller]
    pub fn column_sum<X, Y>(&self, x: &X, out: &mut Y) -> Result<()>
    where
        X: AsView + ?Sized,
        Y: AsViewMut<Elem = X::Elem> + ?Sized,
        X::Elem: Float,
    {
        let (x, out) = (x.view(), out.view_mut());
        let _here = self.worker.handle.enter("column_sum", Location::caller());
        let cols = out.len();
        let rows = rows_of("column_sum", x.len(), cols)?;
        let parts = parts_of(rows);
        let mut partial = self.allocate("column_sum", parts as usize * cols)?;
        let args = (x, &mut partial, rows as u64, cols as u32, parts);
        // SAFETY: `x` has `rows` rows of `cols` elements, the sums `parts` rows.
        unsafe { self.launch(&column_sum::<X::Elem>(), column_dims::<X::Elem>(cols, parts), args)? };
        self.sum_parts(&partial, out, parts)
    }

    /// Checks that all indices (or labels) are less than `bound`: for labels of [`cross_entropy`](Self::cross_entropy)
    /// and indices of [`embedding`](Self::embedding), which do not check. **Waits** for the current stream.
    ///
    /// ```
    /// # use gpu_pool::{Error, GpuPool};
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// # pool.run(|dev, _| {
    /// let labels = dev.upload(&[3u32, 10, 2])?;
    /// let error = dev.check_indices(&labels, 10).unwrap_err();
    /// assert!(error.to_string().contains("index 1 is 10: less than 10 are possible"), "{error}");
    /// # Ok(()) })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the first one that is not, and what [`download`](Self::download) gives.
    #[track_caller]
    pub fn check_indices<L>(&self, indices: &L, bound: usize) -> Result<()>
    where
        L: AsView + ?Sized,
        L::Elem: Index,
    {
        let words = self.download(&L::Elem::words(indices.view()))?;
        match words.iter().position(|&word| word as usize >= bound) {
            None => Ok(()),
            Some(at) => {
                let index = L::Elem::show(words[at]);
                let why = format_args!("index {at} is {index}: less than {bound} are possible").to_string();
                Err(Error::invalid("check_indices", why))
            }
        }
    }

    /// The second pass of a sum of columns.
    #[track_caller]
    fn sum_parts<T: Float>(&self, partial: &DeviceBuffer<T::Acc>, out: DeviceViewMut<'_, T>, parts: u32) -> Result<()> {
        let (cols, partial): (usize, DeviceView<'_, T::Acc>) = (out.len(), partial.view());
        let args = (partial, out, parts, cols as u32);
        // SAFETY: the first pass has written `parts` rows of `cols` sums.
        unsafe { self.launch(&column_final::<T>(), column_dims::<T::Acc>(cols, 1), args) }
    }
}

/// Rows and columns of logits with so many labels.
#[track_caller]
fn classes(op: &'static str, len: usize, labels: usize) -> Result<(usize, u32)> {
    if labels == 0 && len == 0 {
        return Ok((0, 1));
    }
    if labels == 0 || !len.is_multiple_of(labels) || len == 0 {
        return Err(Error::invalid(op, format_args!("{len} logits for {labels} labels")));
    }
    rows_of(op, len, len / labels).map(|rows| (rows, (len / labels) as u32))
}

/// The rows of a norm's step back, which has as many statistics.
#[track_caller]
fn normed_rows(op: &'static str, dy: usize, x: usize, cols: usize, stats: usize) -> Result<usize> {
    same_len(op, dy, x)?;
    let rows = rows_of(op, x, cols)?;
    same_len(op, rows, stats)?;
    Ok(rows)
}
