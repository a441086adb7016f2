//! A user's model, as [`DataParallel`](super::DataParallel) sees it: its parameters, and where its gradients go.

use crate::Parameter;
use crate::runtime::{ErrorInternals, ExchangeInternals, OpSite};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, DeviceViewMut, Error, Result, gradients::GradientExchange};

/// A replica of a model. The crate has no layers and no automatic differentiation: forward and backward passes are the
/// user's own functions, over `ops`, own kernels, or another crate.
pub trait Model<T: Parameter = f32>: 'static {
    /// The parameters, in the forward pass's order; always as many and as long as at first, on the replica's device.
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>>;
}

/// Where the backward pass leaves its gradients; their numbers are those of [`Model::parameters`].
#[derive(Debug)]
pub struct Gradients<'a, T: Parameter = f32> {
    dev: &'a Device,
    exchange: &'a mut GradientExchange<T>,
    /// In a capture: which gradients were given.
    captured: Option<&'a mut [bool]>,
    /// One over the rows of the whole batch: the factor of each row's loss. (Of a piece that is
    /// [accumulated](super::DataParallel::accumulate), or follows one, it is another number in each pass; the sum over
    /// all pieces is the mean over their rows.) The closure of [`write`](Self::write) cannot name it: copy it before.
    pub scale: f32,
}

impl<'a, T: Parameter> Gradients<'a, T> {
    pub(super) fn new(
        dev: &'a Device,
        exchange: &'a mut GradientExchange<T>,
        scale: f32,
        captured: Option<&'a mut [bool]>,
    ) -> Self {
        Gradients { dev, exchange, captured, scale }
    }

    /// Number of gradients.
    pub fn len(&self) -> usize {
        self.exchange.len()
    }

    /// Whether there are none. (Never so: a model without parameters is an error.)
    pub fn is_empty(&self) -> bool {
        self.exchange.is_empty()
    }

    /// Gives gradient `i`, once in each pass: `f` writes all of it. When the last gradient of a bucket is there, its
    /// exchange begins; in a [capture](super::DataParallel::capture_step), behind the whole pass. The gradient that
    /// earlier passes have [accumulated](super::DataParallel::accumulate) is added to it, for `f32` at the cost of a
    /// buffer and of a pass over it; see [`add`](Self::add).
    ///
    /// # Errors
    /// [`InvalidArgument`](gpu_pool::Error::InvalidArgument) when there is no such gradient, or it was given already;
    /// those of `f`, and of the exchange.
    #[track_caller]
    pub fn write(&mut self, i: usize, f: impl FnOnce(&mut DeviceViewMut<'_, T>) -> Result<()>) -> Result<()> {
        let _here = OpSite::here("Gradients::write");
        let adds = self.exchange.must_add(i);
        let mut own = self.exchange.grad_mut(i)?;
        if adds {
            let mut new = self.dev.zeros::<T>(own.len())?;
            OpSite::outside(|| f(&mut new.view_mut()))?;
            self.dev.axpy(1.0, &new, &mut own)?;
        } else {
            OpSite::outside(|| f(&mut own))?;
        }
        self.given(i)
    }

    /// [`write`](Self::write) for an `f` that can add, like a matrix product: it gets 1 if it must add to the content,
    /// else 0 (`beta` of a product). It is never 1 in half types, whose sums are in `f32`, apart. Errors: as `write`.
    #[track_caller]
    pub fn add(&mut self, i: usize, f: impl FnOnce(&mut DeviceViewMut<'_, T>, f32) -> Result<()>) -> Result<()> {
        let _here = OpSite::here("Gradients::add");
        let beta = if self.exchange.must_add(i) { 1.0 } else { 0.0 };
        {
            let mut own = self.exchange.grad_mut(i)?;
            OpSite::outside(|| f(&mut own, beta))?;
        }
        self.given(i)
    }

    #[track_caller]
    fn given(&mut self, i: usize) -> Result<()> {
        let Some(captured) = &mut self.captured else { return self.exchange.ready(self.dev, i) };
        invalid_if!(captured[i], "Gradients", "gradient {i} was given already");
        captured[i] = true;
        Ok(())
    }
}
