//! [`Exchanged`]: the results of a step.

use super::{GradientExchange, element::Gradient};
use crate::{
    error::Result,
    memory::{AsView, DeviceView},
};

/// The results of a step, from [`GradientExchange::finish`].
#[derive(Debug)]
pub struct Exchanged<'a, T: Gradient = f32> {
    pub(super) exchange: &'a GradientExchange<T>,
    pub(super) exchanged: bool,
}

impl<'a, T: Gradient> Exchanged<'a, T> {
    /// The L2 norm of all gradients, as exchanged: one number on the device, with the same bits on all members. The
    /// host has not waited for it. None unless [asked for](super::GradientExchangeBuilder::norm), or when nothing was
    /// exchanged. Squares are summed in `f64`: `f64` gradients beyond 1e154 give infinity.
    pub fn norm(&self) -> Option<DeviceView<'a, T::Norm>> {
        self.exchange.sums.as_ref().filter(|_| self.exchanged).map(|sums| sums.norm.view())
    }

    /// Gradients that no member had since the last exchange; they are zero. Empty without
    /// [`find_unused`](super::GradientExchangeBuilder::find_unused), or when nothing was exchanged.
    pub fn unused(&self) -> &'a [usize] {
        if self.exchanged { &self.exchange.unused } else { &[] }
    }

    /// All members' gradient, like [`GradientExchange::grad`], so that one kernel reads it and the [norm](Self::norm).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no such gradient.
    ///
    /// The page "Gradients" of the guide clips with it, without a wait of the host.
    #[track_caller]
    pub fn grad(&self, gradient: usize) -> Result<DeviceView<'a, T>> {
        self.exchange.grad(gradient)
    }

    /// Whether gradients have moved to other addresses at the end of this step. With
    /// [`ready_order`](super::GradientExchangeBuilder::ready_order) that happens once (and again after a
    /// [`reset`](GradientExchange::reset)): at the end of the first step that was exchanged and of which rank 0 had a
    /// part. A graph that was captured before and names gradients returns
    /// [`Error::GraphInvalidated`](crate::Error::GraphInvalidated) from then on: capture it again.
    pub fn moved(&self) -> bool {
        self.exchanged && self.exchange.moved
    }

    /// Whether gradients were exchanged: false while [`set_sync(false)`](GradientExchange::set_sync) holds.
    pub fn was_exchanged(&self) -> bool {
        self.exchanged
    }
}
