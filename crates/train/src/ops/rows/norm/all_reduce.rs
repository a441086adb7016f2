//! `all_reduce_norm`: an all-reduce, the sum with a residual, and a norm of the rows, in one call: one kernel of the
//! runtime where kernels meet on the devices, else three calls. Invariant: the bits are those of the three calls.

use super::{super::row_dims, kernels};
use crate::ops::Pointwise;
use crate::runtime::{GroupInternals, NormSaved, OpSite, Operations, RowNorm, same_len, sum_and_norm};
use gpu_pool::{AsView, AsViewMut, Device, DeviceView, DeviceViewMut, Element, Group, Result, kernel::Float};

/// A collective with the work after it. Members are all devices of the scope (of a [`Device`]), or of the [`Group`].
///
/// Errors: those of all collectives, [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for lengths that do
/// not fit and an `eps` negative or not finite, and `Mismatch` also for norms of different kinds, row lengths or `eps`.
pub trait AllReduceNorm {
    /// The members.
    #[doc(hidden)]
    fn members(&self) -> Group<'_>;

    /// An all-reduce, the addition of a residual, and a norm of the rows, in one call. It follows a layer whose partial
    /// sums lie on all members (`RowLinear`). `residual` becomes `residual + sum`, and `x` the norm of that. Rows are
    /// as long as the norm's weights, and are as many as `x` has. Returns the values for the step back: there
    /// `residual` is the norm's input.
    ///
    /// The bits are those of [`all_reduce`](Device::all_reduce) (with [`ReduceOp::Sum`](gpu_pool::ReduceOp::Sum)),
    /// [`add_in_place`](crate::ops::Pointwise::add_in_place), and [`rms_norm`](super::Norms::rms_norm) or
    /// [`layer_norm`](super::Norms::layer_norm), one after the other: the sum and the residual are rounded to the
    /// element's type each. The sum is in the order of ranks at every size, as with
    /// [`ReduceOrder::Rank`](gpu_pool::collective::ReduceOrder). So the bits depend on a row's elements alone, not on
    /// the number of rows nor on the row's place. Members with the same residual and weights hold the same bits; each
    /// member's residual and weights are its own.
    ///
    /// Between GPUs with peer access one kernel does it all, for `f32`, `f16` and `bf16`, and rows of whole 16 bytes
    /// and at most 16384 elements; elsewhere it is the three calls. Few rows go by peers' inboxes
    /// ([`Algorithm::Inbox`](gpu_pool::collective::Algorithm::Inbox)), many are read where they are
    /// ([`Algorithm::Direct`](gpu_pool::collective::Algorithm::Direct)); either can be asked for. `Group::explain_norm`
    /// says which. Between processes of one host with a GPU each few rows go by inboxes, too: up to 2 MB of two
    /// processes, less of more. Where such processes make the three calls, a sum of more than two is in NCCL's order.
    ///
    /// Asynchronous on the current stream; can be captured.
    ///
    /// The page "Collectives" of the guide has an example.
    #[track_caller]
    fn all_reduce_norm<X: AsViewMut<Elem: Float + Element>>(
        &self,
        x: &mut X,
        residual: &mut impl AsViewMut<Elem = X::Elem>,
        norm: RowNorm<'_, X::Elem>,
    ) -> Result<NormSaved<X::Elem>> {
        let (group, norm) = (&self.members(), &norm);
        let apart = |residual: DeviceViewMut<'_, _>, y: DeviceViewMut<'_, _>, saved: &mut _| {
            apart(group.device(), residual, norm, y, saved)
        };
        sum_and_norm("all_reduce_norm", group, None, residual.view_mut(), x.view_mut(), norm, apart)
    }

    /// [`all_reduce_norm`](Self::all_reduce_norm) out of place, with the same bits: `src` stays as it is, and `dst`
    /// becomes the norm.
    #[track_caller]
    fn all_reduce_norm_into<S: AsView<Elem: Float + Element>>(
        &self,
        src: &S,
        residual: &mut impl AsViewMut<Elem = S::Elem>,
        norm: RowNorm<'_, S::Elem>,
        dst: &mut impl AsViewMut<Elem = S::Elem>,
    ) -> Result<NormSaved<S::Elem>> {
        const OP: &str = "all_reduce_norm_into";
        let (group, norm, _here) = (&self.members(), &norm, OpSite::here(OP));
        let (src, dst) = (src.view(), dst.view_mut());
        same_len(OP, src.len(), dst.len())?;
        let apart = |residual: DeviceViewMut<'_, _>, y: DeviceViewMut<'_, _>, saved: &mut _| {
            apart(group.device(), residual, norm, y, saved)
        };
        sum_and_norm(OP, group, Some(src), residual.view_mut(), dst, norm, apart)
    }
}

impl AllReduceNorm for Group<'_> {
    fn members(&self) -> Group<'_> {
        GroupInternals::on(self, self.device())
    }
}

impl AllReduceNorm for Device {
    fn members(&self) -> Group<'_> {
        Operations::everyone(self)
    }
}

/// `residual` becomes `residual + y`, and `y` the norm of that: two kernels.
#[track_caller]
fn apart<T: Float>(
    dev: &Device,
    mut residual: DeviceViewMut<'_, T>,
    &RowNorm { gamma, beta, eps }: &RowNorm<'_, T>,
    y: DeviceViewMut<'_, T>,
    NormSaved { mean, rstd }: &mut NormSaved<T>,
) -> Result<()> {
    dev.add_in_place(&mut residual, &y)?;
    let x: DeviceView<'_, T> = residual.view();
    let (rows, cols) = (rstd.len(), gamma.len());
    let dims = row_dims::<T>(rows, cols);
    let shape = (rows as u64, cols as u32);
    match (beta, mean) {
        (Some(beta), Some(mean)) => {
            let args = (x, gamma, beta, y, mean, rstd, shape.0, shape.1, eps);
            // SAFETY: `x` and `y` have `rows` rows of `cols` elements, mean and rstd one for each, the others `cols`.
            unsafe { dev.launch(&kernels::layer_norm::<T>(), dims, args) }
        }
        _ => {
            let args = (x, gamma, y, rstd, shape.0, shape.1, eps);
            // SAFETY: `x` and `y` have `rows` rows of `cols` elements, rstd one for each row, gamma `cols`.
            unsafe { dev.launch(&kernels::rms_norm::<T>(), dims, args) }
        }
    }
}
