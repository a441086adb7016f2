//! What users implement to run a model as a pipeline: [`Stage`], and [`Hop`] for what goes from stage to stage.
//!
//! `pipeline/execute.rs` calls both. They may use the operations of a device.

use crate::{Device, DeviceBuffer, Error, Result, memory::DeviceCopy};
use std::{fmt, sync::Arc};

/// What goes from stage to stage. It crosses from one device to another by [`hop`](Self::hop).
///
/// Implemented for [`DeviceBuffer`], for an `Arc` of one (a stage can keep its output and pass it on, too), for
/// numbers, `bool` and `String`, and for tuples, `Vec` and `Option` of all these. A type of your own hops each of its
/// fields:
///
/// ```
/// use gpu_pool::{Device, DeviceBuffer, Result, parallel::Hop};
///
/// struct Batch {
///     x: DeviceBuffer<f32>,
///     rows: usize,
/// }
/// impl Hop for Batch {
///     fn hop(self, dev: &Device) -> Result<Self> {
///         Ok(Batch { x: self.x.hop(dev)?, rows: self.rows })
///     }
/// }
/// ```
pub trait Hop: Send + Sized + 'static {
    /// The value with its memory on `dev`. Memory that is there already stays where it is. Asynchronous: copies run on
    /// the current stream of `dev`, which waits for the work of the device that the memory comes from.
    ///
    /// # Errors
    /// `OutOfMemory`, `WrongPool`, [`Error::Aborted`], the driver's.
    fn hop(self, dev: &Device) -> Result<Self>;
}

impl<T: DeviceCopy> Hop for DeviceBuffer<T> {
    fn hop(self, dev: &Device) -> Result<Self> {
        if self.device() == dev.index() {
            return Ok(self);
        }
        let here = self.copy_to(dev)?;
        // The memory goes back to its device. Who uses it next waits for this copy, and not for later ones.
        dev.stream.record_early("hop")?;
        Ok(here)
    }
}

impl<T: DeviceCopy> Hop for Arc<DeviceBuffer<T>> {
    fn hop(self, dev: &Device) -> Result<Self> {
        if self.device() == dev.index() {
            return Ok(self);
        }
        let here = self.copy_to(dev)?;
        dev.stream.record_early("hop")?;
        Ok(Arc::new(here))
    }
}

impl<A: Hop> Hop for Vec<A> {
    fn hop(self, dev: &Device) -> Result<Self> {
        self.into_iter().map(|a| a.hop(dev)).collect()
    }
}

impl<A: Hop> Hop for Option<A> {
    fn hop(self, dev: &Device) -> Result<Self> {
        self.map(|a| a.hop(dev)).transpose()
    }
}

macro_rules! hop_as_they_are {
    ($($T:ty),+) => {
        $(impl Hop for $T {
            fn hop(self, _: &Device) -> Result<Self> {
                Ok(self)
            }
        })+
    };
}
hop_as_they_are!(bool, u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64, String, ());

macro_rules! hop_tuples {
    ($($($A:ident $a:ident),+;)+) => {
        $(impl<$($A: Hop),+> Hop for ($($A,)+) {
            fn hop(self, dev: &Device) -> Result<Self> {
                let ($($a,)+) = self;
                Ok(($($a.hop(dev)?,)+))
            }
        })+
    };
}
hop_tuples! {
    A a;
    A a, B b;
    A a, B b, C c;
    A a, B b, C c, D d;
    A a, B b, C c, D d, E e;
    A a, B b, C c, D d, E e, F f;
}

/// Where in a step a stage is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The stage's number, from 0.
    pub stage: usize,
    /// The micro-batch's number, from 0.
    pub micro: usize,
    /// Whether it is stage 0: nobody needs the gradient of its input.
    pub is_first: bool,
    /// For backward passes: whether an earlier micro-batch of this step has left gradients of the weights in the
    /// stage. If so, add to them; if not, replace what the last step has left.
    pub accumulate: bool,
}

/// A part of a model, on one device.
///
/// The calls are asynchronous, as all work on a device: they enqueue work on the current stream and do not wait. All
/// stages of a pipeline have one type; stages that differ are variants of an enum, or boxes (`Box<dyn Stage<Activation
/// = .., Saved = ..>>` is a stage).
pub trait Stage {
    /// What a stage takes from the stage before and passes to the next. Gradients of it come back.
    type Activation: Hop;
    /// What the backward pass of a micro-batch needs of its forward pass. The pipeline keeps it in between. `()` if it
    /// needs nothing.
    type Saved;

    /// The forward pass of one micro-batch.
    ///
    /// # Errors
    /// The stage's own. Any error ends the step on all devices.
    fn forward(&mut self, dev: &Device, at: At, x: Self::Activation) -> Result<(Self::Activation, Self::Saved)>;

    /// The backward pass of one micro-batch, from the gradient of the output. It leaves the gradients of the weights
    /// in the stage (see [`At::accumulate`]) and returns the gradient of the input. Stage 0 may return `None`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn backward(
        &mut self,
        dev: &Device,
        at: At,
        saved: Self::Saved,
        dy: Self::Activation,
    ) -> Result<Option<Self::Activation>>;

    /// The first half of [`backward`](Self::backward), for schedules that split it (zero bubble): only the gradient of
    /// the input. What the second half needs, such as `dy`, goes into `saved`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward). Without an implementation: [`Error::InvalidArgument`] at the first use.
    fn backward_input(
        &mut self,
        dev: &Device,
        at: At,
        saved: &mut Self::Saved,
        dy: Self::Activation,
    ) -> Result<Option<Self::Activation>> {
        let _ = (dev, at, saved, dy);
        Err(Error::custom(NotSplit))
    }

    /// The second half: the gradients of the weights.
    ///
    /// # Errors
    /// As [`backward_input`](Self::backward_input).
    fn backward_weights(&mut self, dev: &Device, at: At, saved: Self::Saved) -> Result<()> {
        let _ = (dev, at, saved);
        Err(Error::custom(NotSplit))
    }
}

impl<S: Stage + ?Sized> Stage for Box<S> {
    type Activation = S::Activation;
    type Saved = S::Saved;

    fn forward(&mut self, dev: &Device, at: At, x: S::Activation) -> Result<(S::Activation, S::Saved)> {
        (**self).forward(dev, at, x)
    }
    fn backward(&mut self, dev: &Device, at: At, saved: S::Saved, dy: S::Activation) -> Result<Option<S::Activation>> {
        (**self).backward(dev, at, saved, dy)
    }
    fn backward_input(
        &mut self,
        dev: &Device,
        at: At,
        saved: &mut S::Saved,
        dy: S::Activation,
    ) -> Result<Option<S::Activation>> {
        (**self).backward_input(dev, at, saved, dy)
    }
    fn backward_weights(&mut self, dev: &Device, at: At, saved: S::Saved) -> Result<()> {
        (**self).backward_weights(dev, at, saved)
    }
}

/// The stage has not implemented the halves of its backward pass. The executor, which knows the schedule, reports it.
#[derive(Debug)]
pub(super) struct NotSplit;

impl fmt::Display for NotSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the stage does not implement `backward_input` and `backward_weights`")
    }
}

impl std::error::Error for NotSplit {}

impl NotSplit {
    pub(super) fn is_cause(error: &Error) -> bool {
        matches!(error, Error::Custom(cause) if cause.is::<NotSplit>())
    }
}
