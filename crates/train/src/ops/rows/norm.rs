//! Layer norm and RMS norm, with the steps back to their input and to their weights.

mod all_reduce;
mod functions;

pub use all_reduce::AllReduceNorm;

use self::functions as kernels;
use super::{column_dims, finish, parts_of, row_dims};
use crate::runtime::{Operations, check_eps, rows_of, same_len};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, LaunchDims, Result, kernel::Float};

type Normed<T> = (DeviceBuffer<T>, DeviceBuffer<<T as Float>::Acc>, DeviceBuffer<<T as Float>::Acc>);

/// Norms of rows, and the steps back through them: a buffer is rows, one after the other. They compute in `f32` (of
/// `f64` in `f64`) and round once. Bits are as those of [`Softmax`](super::Softmax). Streams and errors: see
/// [`ops`](super::super).
pub trait Norms: Operations {
    /// Layer norm of each row (Ba, Kiros and Hinton, 2016): `y = (x - mean) * rstd * gamma + beta`, with
    /// `rstd = 1 / sqrt(variance + eps)`. A row is as long as `gamma` and `beta`. The variance is the mean of the
    /// squared differences, in a second pass. `eps` is finite and not negative. Returns `y`, and the mean and `rstd` of
    /// each row for the step back.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1.0f64, 3.0, 10.0, 20.0])?; // 2 x 2
    /// let (gamma, beta) = (dev.upload(&[1.0f64, 1.0])?, dev.upload(&[0.0f64, 5.0])?);
    /// let (y, mean, rstd) = dev.layer_norm(&x, &gamma, &beta, 0.0)?;
    /// assert_eq!(dev.download(&y)?, [-1.0, 6.0, -1.0, 6.0]);
    /// assert_eq!((dev.download(&mean)?, dev.download(&rstd)?), (vec![2.0, 15.0], vec![1.0, 0.2]));
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn layer_norm<X: AsView<Elem: Float>>(
        &self,
        x: &X,
        gamma: &impl AsView<Elem = X::Elem>,
        beta: &impl AsView<Elem = X::Elem>,
        eps: <X::Elem as Float>::Acc,
    ) -> Result<Normed<X::Elem>> {
        let (x, gamma, beta) = (x.view(), gamma.view(), beta.view());
        let _here = self.enter("layer_norm");
        let cols = gamma.len();
        let rows = rows_of("layer_norm", x.len(), cols)?;
        check_eps("layer_norm", eps)?;
        same_len("layer_norm", cols, beta.len())?;
        let (mut mean, mut rstd) = (self.allocate("layer_norm", rows)?, self.allocate("layer_norm", rows)?);
        let mut y = self.allocate("layer_norm", x.len())?;
        let args = (x, gamma, beta, &mut y, &mut mean, &mut rstd, rows as u64, cols as u32, eps);
        // SAFETY: `x` and `y` have `rows` rows of `cols` elements, mean and rstd one for each row, the others `cols`.
        unsafe { self.launch(&kernels::layer_norm::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok((y, mean, rstd))
    }

    /// The step back through [`layer_norm`](Self::layer_norm): the gradient of `x`, in a new buffer. `mean` and `rstd`
    /// are those that the step forward gave.
    #[track_caller]
    fn layer_norm_backward<X: AsView<Elem: Float>>(
        &self,
        dy: &impl AsView<Elem = X::Elem>,
        x: &X,
        gamma: &impl AsView<Elem = X::Elem>,
        mean: &DeviceBuffer<<X::Elem as Float>::Acc>,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let (dy, x, gamma) = (dy.view(), x.view(), gamma.view());
        let _here = self.enter("layer_norm_backward");
        let cols = gamma.len();
        let rows = normed_rows("layer_norm_backward", dy.len(), x.len(), cols, rstd.len())?;
        same_len("layer_norm_backward", rows, mean.len())?;
        let mut dx = self.allocate("layer_norm_backward", x.len())?;
        let args = (dy, x, gamma, mean, rstd, &mut dx, rows as u64, cols as u32);
        // SAFETY: `dy`, `x` and `dx` have `rows` rows of `cols` elements, mean and rstd one for each row.
        unsafe { self.launch(&kernels::layer_norm_backward::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok(dx)
    }

    /// The gradients of the weights of [`layer_norm`](Self::layer_norm): `dgamma` is the sum over the rows of
    /// `dy * (x - mean) * rstd`, `dbeta` that of `dy`. Sums have a fixed order: the same bits every run.
    #[track_caller]
    fn layer_norm_weights_backward<X: AsView<Elem: Float>>(
        &self,
        dy: &impl AsView<Elem = X::Elem>,
        x: &X,
        mean: &DeviceBuffer<<X::Elem as Float>::Acc>,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
        dgamma: &mut impl AsViewMut<Elem = X::Elem>,
        dbeta: &mut impl AsViewMut<Elem = X::Elem>,
    ) -> Result<()> {
        const OP: &str = "layer_norm_weights_backward";
        let (dy, x, dgamma, dbeta) = (dy.view(), x.view(), dgamma.view_mut(), dbeta.view_mut());
        let _here = self.enter(OP);
        let cols = dgamma.len();
        let rows = normed_rows(OP, dy.len(), x.len(), cols, rstd.len())?;
        same_len(OP, rows, mean.len())?;
        same_len(OP, cols, dbeta.len())?;
        let parts = parts_of(rows);
        let mut gammas = self.allocate(OP, parts as usize * cols)?;
        let mut betas = self.allocate(OP, parts as usize * cols)?;
        let args = (dy, x, mean, rstd, &mut gammas, &mut betas, rows as u64, cols as u32, parts);
        // SAFETY: `dy` and `x` have `rows` rows of `cols` elements, mean and rstd one for each row, the sums `parts`.
        unsafe { self.launch(&kernels::layer_norm_columns::<X::Elem>(), column_dims::<X::Elem>(cols, parts), args)? };
        let args = (&gammas, &betas, dgamma, dbeta, parts, cols as u32);
        let one = column_dims::<<X::Elem as Float>::Acc>(cols, 1);
        let dims = LaunchDims { grid: (one.grid.0, 1, 2), ..one };
        // SAFETY: the first pass has written `parts` rows of `cols` sums of both.
        unsafe { self.launch(&kernels::column_finals::<X::Elem>(), dims, args) }
    }

    /// RMS norm of each row (Zhang and Sennrich, 2019): `y = x * rstd * gamma`, `rstd = 1 / sqrt(mean of x^2 + eps)`. A
    /// row is as long as `gamma`; `eps` is finite, not negative. Returns `y`, and each row's `rstd` for the step back.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let (x, gamma) = (dev.upload(&[2.0f64, -2.0])?, dev.upload(&[1.0f64, 3.0])?);
    /// let (y, rstd) = dev.rms_norm(&x, &gamma, 0.0)?;
    /// assert_eq!((dev.download(&y)?, dev.download(&rstd)?), (vec![1.0, -3.0], vec![0.5]));
    /// # Ok(()) });
    /// ```
    #[track_caller]
    #[allow(clippy::type_complexity)]
    fn rms_norm<X: AsView<Elem: Float>>(
        &self,
        x: &X,
        gamma: &impl AsView<Elem = X::Elem>,
        eps: <X::Elem as Float>::Acc,
    ) -> Result<(DeviceBuffer<X::Elem>, DeviceBuffer<<X::Elem as Float>::Acc>)> {
        let (x, gamma) = (x.view(), gamma.view());
        let _here = self.enter("rms_norm");
        let cols = gamma.len();
        let rows = rows_of("rms_norm", x.len(), cols)?;
        check_eps("rms_norm", eps)?;
        let (mut y, mut rstd) = (self.allocate("rms_norm", x.len())?, self.allocate("rms_norm", rows)?);
        let args = (x, gamma, &mut y, &mut rstd, rows as u64, cols as u32, eps);
        // SAFETY: `x` and `y` have `rows` rows of `cols` elements, rstd one for each row, gamma `cols`.
        unsafe { self.launch(&kernels::rms_norm::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok((y, rstd))
    }

    /// The step back through [`rms_norm`](Self::rms_norm): the gradient of `x`, in a new buffer.
    #[track_caller]
    fn rms_norm_backward<X: AsView<Elem: Float>>(
        &self,
        dy: &impl AsView<Elem = X::Elem>,
        x: &X,
        gamma: &impl AsView<Elem = X::Elem>,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let (dy, x, gamma) = (dy.view(), x.view(), gamma.view());
        let _here = self.enter("rms_norm_backward");
        let cols = gamma.len();
        let rows = normed_rows("rms_norm_backward", dy.len(), x.len(), cols, rstd.len())?;
        let mut dx = self.allocate("rms_norm_backward", x.len())?;
        let args = (dy, x, gamma, rstd, &mut dx, rows as u64, cols as u32);
        // SAFETY: `dy`, `x` and `dx` have `rows` rows of `cols` elements, rstd one for each row.
        unsafe { self.launch(&kernels::rms_norm_backward::<X::Elem>(), row_dims::<X::Elem>(rows, cols), args)? };
        Ok(dx)
    }

    /// The weights' gradient of [`rms_norm`](Self::rms_norm): the sum of `dy * x * rstd` over rows, in a fixed order.
    #[track_caller]
    fn rms_norm_weights_backward<X: AsView<Elem: Float>>(
        &self,
        dy: &impl AsView<Elem = X::Elem>,
        x: &X,
        rstd: &DeviceBuffer<<X::Elem as Float>::Acc>,
        dgamma: &mut impl AsViewMut<Elem = X::Elem>,
    ) -> Result<()> {
        const OP: &str = "rms_norm_weights_backward";
        let (dy, x, dgamma) = (dy.view(), x.view(), dgamma.view_mut());
        let _here = self.enter(OP);
        let cols = dgamma.len();
        let rows = normed_rows(OP, dy.len(), x.len(), cols, rstd.len())?;
        let parts = parts_of(rows);
        let mut gammas = self.allocate(OP, parts as usize * cols)?;
        let args = (dy, x, rstd, &mut gammas, rows as u64, cols as u32, parts);
        // SAFETY: `dy` and `x` have `rows` rows of `cols` elements, rstd one for each row, the sums `parts` rows.
        unsafe { self.launch(&kernels::rms_norm_columns::<X::Elem>(), column_dims::<X::Elem>(cols, parts), args)? };
        finish(self.device(), &gammas, dgamma, parts)
    }
}

impl Norms for Device {}

fn normed_rows(op: &'static str, dy: usize, x: usize, cols: usize, stats: usize) -> Result<usize> {
    same_len(op, dy, x)?;
    let rows = rows_of(op, x, cols)?;
    same_len(op, rows, stats)?;
    Ok(rows)
}
