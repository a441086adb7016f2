//! Access between exchanges: where gradients lie, and whose memory they use. It never talks to other members.
//! Invariant: memory that is being exchanged is not given out.

use super::{GradientExchange, element::Gradient, readiness::State, retire, settings::check_weight, step::failed};
use crate::{
    DeviceBuffer, DeviceCopy, ReduceOp,
    error::{Error, Result, op_site::OpSite},
    memory::{AsView, DeviceView, DeviceViewMut},
};
use std::marker::PhantomData;

impl<T: Gradient> GradientExchange<T> {
    /// Where the backward pass writes a gradient. In further steps without exchange it adds to it, if
    /// [`holds`](Self::holds).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, or it is being exchanged.
    #[track_caller]
    pub fn grad_mut(&mut self, gradient: usize) -> Result<DeviceViewMut<'_, T>> {
        let _here = OpSite::here("grad_mut");
        self.unless_failed("grad_mut", gradient, self.readiness.check_open("grad_mut", gradient))?;
        Ok(exclusive(self.view(gradient)))
    }

    /// Several together, for a kernel that writes several gradients.
    ///
    /// # Errors
    /// As of [`grad_mut`](Self::grad_mut), and when one is named twice.
    #[track_caller]
    pub fn grads_mut<const N: usize>(&mut self, gradients: [usize; N]) -> Result<[DeviceViewMut<'_, T>; N]> {
        let _here = OpSite::here("grads_mut");
        for (at, &gradient) in gradients.iter().enumerate() {
            self.unless_failed("grads_mut", gradient, self.readiness.check_open("grads_mut", gradient))?;
            invalid_if!(gradients[..at].contains(&gradient), "grads_mut", "gradient {gradient} is named twice");
        }
        Ok(gradients.map(|gradient| exclusive(self.view(gradient))))
    }

    /// A gradient: the result of all members after [`finish`](Self::finish), this member's own before. (In half types
    /// it is zero after a step that exchanged nothing: the sum is in `f32`, apart. Lent memory has its own sum.)
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, or it is being exchanged.
    #[track_caller]
    pub fn grad(&self, gradient: usize) -> Result<DeviceView<'_, T>> {
        let _here = OpSite::here("grad");
        self.unless_failed("grad", gradient, self.readiness.check_there("grad", gradient))?;
        Ok(self.view(gradient))
    }

    /// After a failed step `finish` does not help: the error then names `reset`.
    fn unless_failed(&self, op: &'static str, gradient: usize, checked: Result<()>) -> Result<()> {
        match checked {
            Err(_) if gradient < self.len() && self.is_broken() => Err(failed(op)),
            checked => checked,
        }
    }

    pub(super) fn view(&self, gradient: usize) -> DeviceView<'_, T> {
        match &self.lent[gradient] {
            Some(lent) => lent.view(),
            None => self.memory[self.layout.extents[gradient].bucket].slice(self.layout.extents[gradient].range()),
        }
    }

    /// Whether a gradient has a value from steps that exchanged nothing. Then the backward pass adds to it. (In half
    /// types it may also write it: the value is apart, unless the memory is [lent](Self::lend).)
    pub fn holds(&self, gradient: usize) -> bool {
        matches!(self.readiness.check("holds", gradient), Ok(State::Held))
    }

    pub(crate) fn must_add(&self, gradient: usize) -> bool {
        !Self::SUMS_IN_F32 && self.holds(gradient)
    }

    /// Gives a gradient memory of the caller's, until it is [taken](Self::take) back. [`grad_mut`](Self::grad_mut) and
    /// all other calls then use that memory. Memory that was lent before is dropped.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, it has another length, it is being exchanged, or it
    /// [`holds`](Self::holds) something, which would be lost: write into [`grad_mut`](Self::grad_mut), or exchange it
    /// first, or buckets are [scattered](super::GradientExchangeBuilder::scatter); [`Error::WrongDevice`],
    /// [`Error::WrongPool`].
    #[track_caller]
    pub fn lend(&mut self, gradient: usize, memory: DeviceBuffer<T>) -> Result<()> {
        let _here = OpSite::here("lend");
        self.unless_failed("lend", gradient, self.readiness.check_open("lend", gradient))?;
        invalid_if!(self.settings.scatter, "lend", "buckets are scattered, and no member has all of a gradient");
        if self.holds(gradient) {
            let why = format_args!(
                "gradient {gradient} holds what earlier steps have left; add to it by `grad_mut`, or exchange it first"
            );
            return Err(Error::invalid("lend", why));
        }
        fail_if!(memory.block.handle.pool != self.home.device.pool, Error::wrong_pool("lend", self.home.device.device));
        let (len, wanted) = (memory.len(), self.sizes[gradient]);
        invalid_if!(len != wanted, "lend", "{len} elements for gradient {gradient}, which has {wanted}");
        if memory.device() != self.home.device.device {
            let (buffer, device) = (memory.device(), self.home.device.device);
            return Err(Error::wrong_device("lend", buffer, device));
        }
        if let Some(old) = self.lent[gradient].replace(memory) {
            retire(&old);
        }
        Ok(())
    }

    /// Gives memory back that was [lent](Self::lend), with the gradient in it. The bucket's own memory takes its place.
    /// A value that the gradient held goes with it, and counts when the memory is lent and ready again.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is none, or it is being exchanged.
    #[track_caller]
    pub fn take(&mut self, gradient: usize) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("take");
        self.unless_failed("take", gradient, self.readiness.check_there("take", gradient))?;
        let Some(lent) = self.lent[gradient].take() else {
            return Err(Error::invalid("take", format_args!("gradient {gradient} has no memory of the caller's")));
        };
        self.readiness.forget(gradient);
        Ok(lent)
    }

    /// This member's weight from the next step on, if gradients are [`Scaled`](crate::ReduceOp::Scaled): its rows of
    /// the batch / all rows. A weight of 0 does not remove a gradient, since 0 times NaN is NaN. A member whose numbers
    /// must not count calls [`nothing`](Self::nothing), and makes no gradient ready.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other operations, within a step, and for weights that are not finite.
    #[track_caller]
    pub fn set_weight(&mut self, weight: f64) -> Result<()> {
        let _here = OpSite::here("set_weight");
        if !matches!(self.settings.reduce, ReduceOp::Scaled(_)) {
            return Err(Error::invalid("set_weight", "only what is `Scaled` has weights"));
        }
        self.between_steps("set_weight")?;
        check_weight::<T>("set_weight", weight)?;
        self.weight = weight;
        Ok(())
    }

    /// Whether steps from now on exchange their gradients. If not, [`ready`](Self::ready) and [`finish`](Self::finish)
    /// only record: gradients stay where they are, the next step adds to them, and gradients that were ready count as
    /// used in the next exchange. All members must do the same. (DDP's `no_sync`.) If they do not, their numbers of
    /// steps differ, and the next meeting returns [`Error::Mismatch`]. With
    /// [`find_unused(false)`](super::GradientExchangeBuilder::find_unused) there is no such meeting after the first
    /// exchange, so nothing compares them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] within a step.
    #[track_caller]
    pub fn set_sync(&mut self, sync: bool) -> Result<()> {
        let _here = OpSite::here("set_sync");
        self.between_steps("set_sync")?;
        self.sync = sync;
        Ok(())
    }

    #[track_caller]
    pub(super) fn between_steps(&self, op: &'static str) -> Result<()> {
        match self.readiness.has_begun() {
            true if self.is_broken() => Err(failed(op)),
            true => Err(Error::invalid(op, "within a step; `finish` ends it")),
            false => Ok(()),
        }
    }
}

/// An exclusive view.
pub fn exclusive<T: DeviceCopy>(view: DeviceView<'_, T>) -> DeviceViewMut<'_, T> {
    DeviceViewMut { block: view.block, address: view.address, len: view.len, of: PhantomData }
}
