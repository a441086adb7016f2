//! Layer norm and RMS norm, with the steps back to their input and to their weights.
//!
//! `Device`'s methods check shapes and launch kernels of `kernels/rows.cu`, as [`rows`](super) says.

use super::{
    super::family::{In, Out, each_row, each_row_mut, kernels, rows_of, wide},
    super::same_len,
    ROWS, column_dims, parts_of, row_dims, sum_parts,
};
use crate::{
    Device, DeviceBuffer, LaunchDims,
    error::Result,
    kernel::{builtin::Float, real::Real},
    memory::{AsView, AsViewMut},
};
use std::panic::Location;

/// What a layer norm gives: `y`, and the mean and `1 / sqrt(variance + eps)` of each row.
type Normed<T> = (DeviceBuffer<T>, DeviceBuffer<<T as Float>::Acc>, DeviceBuffer<<T as Float>::Acc>);

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
    fn layer_norm(In<T>, In<T>, In<T>, Out<T>, Out<T::Acc>, Out<T::Acc>, u64, u32, T::Acc)
        = "layer_norm", host_layer_norm::<T>;
    fn rms_norm(In<T>, In<T>, Out<T>, Out<T::Acc>, u64, u32, T::Acc) = "rms_norm", host_rms_norm::<T>;
    fn layer_norm_backward(In<T>, In<T>, In<T>, In<T::Acc>, In<T::Acc>, Out<T>, u64, u32)
        = "layer_norm_backward", host_layer_norm_backward::<T>;
    fn rms_norm_backward(In<T>, In<T>, In<T>, In<T::Acc>, Out<T>, u64, u32)
        = "rms_norm_backward", host_rms_norm_backward::<T>;
    fn layer_norm_columns(In<T>, In<T>, In<T::Acc>, In<T::Acc>, Out<T::Acc>, Out<T::Acc>, u64, u32, u32)
        = "layer_norm_columns", host_layer_norm_columns::<T>;
    fn rms_norm_columns(In<T>, In<T>, In<T::Acc>, Out<T::Acc>, u64, u32, u32)
        = "rms_norm_columns", host_rms_norm_columns::<T>;
}

impl Device {
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
}

/// The rows of a norm's step back, which has as many statistics.
#[track_caller]
fn normed_rows(op: &'static str, dy: usize, x: usize, cols: usize, stats: usize) -> Result<usize> {
    same_len(op, dy, x)?;
    let rows = rows_of(op, x, cols)?;
    same_len(op, rows, stats)?;
    Ok(rows)
}
