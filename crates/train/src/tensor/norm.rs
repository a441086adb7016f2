//! Norms with sequence parallel: each member normalizes its own rows.

use super::{Wide, overlapped, put};
use crate::runtime::{ErrorInternals, OpSite, check_eps};
use crate::{NormSaved, prelude::*};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, Element, Error, Group, ReduceOp, Result, kernel::Float};

/// Layer norm or RMS norm of the rows that a member has, with weights that all members have (Korthikanti et al., 2022).
///
/// Forward nothing is exchanged. Backward the gradients of the weights are summed over the members, on a stream of
/// their own, so that all members change the weights alike. Where all members have all rows instead, their gradients
/// are complete already: use [`layer_norm`](crate::ops::Norms::layer_norm) there.
#[derive(Debug)]
pub struct SequenceNorm<T: Float> {
    /// The factors.
    pub gamma: DeviceBuffer<T>,
    /// The summand; none for an RMS norm.
    pub beta: Option<DeviceBuffer<T>>,
    /// The gradient of `gamma`.
    pub gamma_gradient: DeviceBuffer<T>,
    /// The gradient of `beta`.
    pub beta_gradient: Option<DeviceBuffer<T>>,
    /// Of `gamma` and `beta`.
    wide: [Wide; 2],
    eps: T::Acc,
}

impl<T: Float + Element> SequenceNorm<T> {
    /// A layer norm. All members give the same weights.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an `eps` that is negative or not finite, and for other lengths of `gamma` and
    /// `beta`; those of [`Device::upload`].
    #[track_caller]
    pub fn layer(dev: &Device, gamma: &[T], beta: &[T], eps: T::Acc) -> Result<Self> {
        let _here = OpSite::here("SequenceNorm::layer");
        let lens = (gamma.len(), beta.len());
        invalid_if!(lens.0 != lens.1, "SequenceNorm::layer", "{} elements of gamma, and {} of beta", lens.0, lens.1);
        let norm = Self::rms(dev, gamma, eps)?;
        Ok(SequenceNorm { beta: Some(dev.upload(beta)?), beta_gradient: Some(dev.zeros(beta.len())?), ..norm })
    }

    /// An RMS norm. All members give the same weights.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an `eps` that is negative or not finite; those of [`Device::upload`].
    #[track_caller]
    pub fn rms(dev: &Device, gamma: &[T], eps: T::Acc) -> Result<Self> {
        let _here = OpSite::here("SequenceNorm::rms");
        check_eps("SequenceNorm::rms", eps)?;
        let (gamma_gradient, gamma) = (dev.zeros(gamma.len())?, dev.upload(gamma)?);
        Ok(SequenceNorm { gamma, beta: None, gamma_gradient, beta_gradient: None, wide: Default::default(), eps })
    }

    /// The norm of the own rows, in a new buffer. Errors: those of [`layer_norm`](crate::ops::Norms::layer_norm) and
    /// [`rms_norm`](crate::ops::Norms::rms_norm).
    #[track_caller]
    pub fn forward(&self, dev: &Device, x: &impl AsView<Elem = T>) -> Result<(DeviceBuffer<T>, NormSaved<T>)> {
        let _here = OpSite::here("SequenceNorm::forward");
        Ok(match &self.beta {
            Some(beta) => {
                let (y, mean, rstd) = dev.layer_norm(x, &self.gamma, beta, self.eps)?;
                (y, NormSaved { mean: Some(mean), rstd })
            }
            None => {
                let (y, rstd) = dev.rms_norm(x, &self.gamma, self.eps)?;
                (y, NormSaved { mean: None, rstd })
            }
        })
    }

    /// The gradient of the own rows, in a new buffer; and those of the weights, summed over the members, which replace
    /// the last ones, or are added to them with `accumulate`, in `f32` as of [`LinearPart`](super::LinearPart).
    ///
    /// # Errors
    /// Those of [`layer_norm_backward`](crate::ops::Norms::layer_norm_backward),
    /// [`rms_norm_backward`](crate::ops::Norms::rms_norm_backward) and [`Group::all_reduce`].
    #[track_caller]
    pub fn backward(
        &mut self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        saved: &NormSaved<T>,
        dy: &impl AsView<Elem = T>,
        accumulate: bool,
    ) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("SequenceNorm::backward");
        let (dev, x, dy) = (group.device(), x.view(), dy.view());
        let mut gamma = dev.zeros(self.gamma.len())?;
        let dx = match (&saved.mean, &mut self.beta_gradient) {
            (Some(mean), Some(beta_gradient)) => {
                let mut beta = dev.zeros(self.gamma.len())?;
                dev.layer_norm_weights_backward(&dy, &x, mean, &saved.rstd, &mut gamma, &mut beta)?;
                overlapped(group, true, |group| group.all_reduce_many([&mut gamma, &mut beta], ReduceOp::Sum))?;
                let dx = dev.layer_norm_backward(&dy, &x, &self.gamma, mean, &saved.rstd)?;
                put(dev, &beta, (beta_gradient, &mut self.wide[1]), accumulate)?;
                dx
            }
            _ => {
                dev.rms_norm_weights_backward(&dy, &x, &saved.rstd, &mut gamma)?;
                overlapped(group, true, |group| group.all_reduce(&mut gamma.view_mut(), ReduceOp::Sum))?;
                dev.rms_norm_backward(&dy, &x, &self.gamma, &saved.rstd)?
            }
        };
        put(dev, &gamma, (&mut self.gamma_gradient, &mut self.wide[0]), accumulate)?;
        Ok(dx)
    }
}
