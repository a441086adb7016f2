//! [`Stage`]: users implement it to run a model as a pipeline.

use gpu_pool::{Device, Error, Result, collective::Transfer};

/// Where in a step a stage is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageContext {
    /// The stage's number, from 0.
    pub stage: usize,
    /// The micro-batch's number, from 0.
    pub micro: usize,
    /// Whether it is stage 0: the gradient of its input is not needed.
    pub is_first: bool,
    /// For backward passes: whether an earlier micro-batch of this step has left gradients of the weights in the stage.
    /// If so, add to them; if not, replace those of the last step.
    pub accumulate: bool,
}

/// A part of a model, on one device.
///
/// The calls are asynchronous, as all work on a device: they enqueue work on the current stream and do not wait. All
/// stages of a pipeline have one type; stages that differ are variants of an enum, or boxes (`Box<dyn Stage<Activation
/// = .., Saved = ..>>` is a stage).
pub trait Stage {
    /// The activation that a stage takes from the stage before and passes to the next. Gradients of it come back.
    type Activation: Transfer;
    /// The values that the backward pass of a micro-batch needs of its forward pass. The pipeline keeps them in
    /// between. `()` if it needs none.
    type Saved;

    /// The forward pass of one micro-batch.
    ///
    /// # Errors
    /// The stage's own. Any error ends the step on all devices.
    fn forward(
        &mut self,
        dev: &Device,
        at: StageContext,
        x: Self::Activation,
    ) -> Result<(Self::Activation, Self::Saved)>;

    /// The backward pass of one micro-batch, from the gradient of the output. It leaves the gradients of the weights in
    /// the stage (see [`StageContext::accumulate`]) and returns the gradient of the input. Stage 0 may return `None`.
    /// Errors: as [`forward`](Self::forward).
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: Self::Saved,
        dy: Self::Activation,
    ) -> Result<Option<Self::Activation>>;

    /// The first half of [`backward`](Self::backward), for schedules that split it (zero bubble): only the gradient of
    /// the input. The values for the second half, such as `dy`, go into `saved`. Errors: as [`forward`](Self::forward).
    /// Without an implementation: [`Error::InvalidArgument`] at the first use.
    fn backward_input(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: &mut Self::Saved,
        dy: Self::Activation,
    ) -> Result<Option<Self::Activation>> {
        let _ = (dev, at, saved, dy);
        Err(Error::custom(NotSplit))
    }

    /// The second half: the gradients of the weights. Errors: as [`backward_input`](Self::backward_input).
    fn backward_weights(&mut self, dev: &Device, at: StageContext, saved: Self::Saved) -> Result<()> {
        let _ = (dev, at, saved);
        Err(Error::custom(NotSplit))
    }
}

impl<S: Stage + ?Sized> Stage for Box<S> {
    type Activation = S::Activation;
    type Saved = S::Saved;

    fn forward(&mut self, dev: &Device, at: StageContext, x: S::Activation) -> Result<(S::Activation, S::Saved)> {
        (**self).forward(dev, at, x)
    }
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: S::Saved,
        dy: S::Activation,
    ) -> Result<Option<S::Activation>> {
        (**self).backward(dev, at, saved, dy)
    }
    fn backward_input(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: &mut S::Saved,
        dy: S::Activation,
    ) -> Result<Option<S::Activation>> {
        (**self).backward_input(dev, at, saved, dy)
    }
    fn backward_weights(&mut self, dev: &Device, at: StageContext, saved: S::Saved) -> Result<()> {
        (**self).backward_weights(dev, at, saved)
    }
}

/// The stage has not implemented the halves of its backward pass. The executor, which knows the schedule, reports it.
#[derive(Debug, thiserror::Error)]
#[error("the stage does not implement `backward_input` and `backward_weights`")]
pub(super) struct NotSplit;
