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

    /// A gradient of all members, like [`GradientExchange::grad`]. It is here, too, so that one kernel can read it and
    /// the [norm](Self::norm).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) when there is no such gradient.
    ///
    /// Clipping, without a copy and without a wait of the host:
    ///
    /// ```
    /// use gpu_pool::{GpuPool, gradients::GradientExchange, LaunchDims, Module, kernel};
    /// # static MODULE: Module = Module::ptx("");
    /// kernel! {
    ///     static UPDATE: "clipped_sgd" in MODULE,
    ///     fn(w: &mut [f32], g: &[f32], norm: &[f32], n: u64, rate: f32, max: f32) |_| {
    ///         let factor = rate * (max / norm[0]).min(1.0);
    ///         w.iter_mut().zip(g).for_each(|(w, g)| *w -= factor * g);
    ///     }
    /// }
    ///
    /// let pool = GpuPool::builder().host(2).module(&MODULE).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let mut gradients = GradientExchange::builder().norm(true).build(dev, &[4])?;
    ///     let mut w = dev.zeros::<f32>(4)?;
    ///     dev.fill(&mut gradients.grad_mut(0)?, 10.0)?;
    ///     gradients.ready(dev, 0)?;
    ///     let step = gradients.finish(dev)?;
    ///     let (g, norm) = (step.grad(0)?, step.norm().expect("asked for"));
    ///     // SAFETY: the kernel reads one number of `norm` and writes within `w`.
    ///     unsafe { dev.launch(&UPDATE, LaunchDims::cover(4), (&mut w, &g, &norm, 4u64, 1.0f32, 1.0f32))? };
    ///     dev.download(&w)
    /// })?;
    /// assert_eq!(found, [[-0.5; 4]; 2]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
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
