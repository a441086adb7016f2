//! Scopes over a [`PerDevice`]: they make its values, run closures on them, and accept them after a failure.

use super::run::Run;
use crate::error::{Error, Result, op_site::OpSite};
use crate::scope::{as_it_is, by_its_text};
use crate::{Device, PerDevice, Shard, sync::Returned, thread::worker::Shared};
use std::{fmt, sync::Arc};

impl<T: 'static> PerDevice<T> {
    #[track_caller]
    pub(crate) fn create(shared: &Arc<Shared>, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<Self> {
        Self::made(shared, |dev, shard| OpSite::outside(|| f(dev, shard)))
    }

    #[track_caller]
    pub(crate) fn made(shared: &Arc<Shared>, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<Self> {
        let this = PerDevice::new(shared);
        this.fill("per_device", f)?;
        Ok(this)
    }

    /// [`run`](Self::run), or [`on`](Self::on) some devices, by the library.
    #[track_caller]
    pub(crate) fn each<R: Send>(
        &self,
        devices: Option<&[usize]>,
        f: impl Fn(&Device, Shard, &mut T) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let run = Run::new(&self.shared, self);
        devices.into_iter().fold(run, Run::on).each("run", f, as_it_is)
    }

    /// Replaces every device's value by a new one. This clears any poison.
    ///
    /// # Errors
    /// As [`GpuPool::run`](crate::GpuPool::run). If some devices fail, the values are poisoned, but those of
    /// devices where `f` has not begun.
    #[track_caller]
    pub fn reset(&mut self, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<()> {
        self.fill("reset", |dev, shard| OpSite::outside(|| f(dev, shard)))
    }

    #[track_caller]
    pub(crate) fn fill(&self, op: &'static str, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<()> {
        let put = |dev: &Device, shard| {
            // The old value, if there is one: it is poisoned, too, if the scope fails.
            drop(self.blame_on(dev, std::slice::from_ref(&dev.session.gang)));
            f(dev, shard).map(|value| self.put(dev, value))
        };
        self.scope(op, put).map(drop)
    }

    /// Accepts every device's value as it is after a failed scope.
    ///
    /// # Errors
    /// As [`GpuPool::run`](crate::GpuPool::run).
    #[track_caller]
    pub fn clear_poison(&mut self) -> Result<()> {
        self.scope("clear_poison", |dev, _| self.accept(dev)).map(drop)
    }

    /// [`clear_poison`](Self::clear_poison) and [`each`](Self::each) in one scope: a value on whose device it does not
    /// begin keeps its poison, and so does one of which `f` says that it does not stand.
    #[track_caller]
    pub(crate) fn accepting<R: Send>(
        &self,
        devices: Option<&[usize]>,
        f: impl Fn(&Device, Shard, &mut T) -> Result<(R, bool)> + Sync,
    ) -> Result<Vec<R>> {
        let accept = |dev: &Device, shard| {
            let before = self.accept(dev)?;
            let (result, stands) = f(dev, shard, &mut *self.borrow_mut(dev)?)?;
            if !stands {
                self.blame_on(dev, &before)?;
            }
            Ok(result)
        };
        let run = Run::new(&self.shared, ());
        devices.into_iter().fold(run, Run::on).scope("clear_poison", accept, as_it_is)
    }

    /// Runs `f` on every device of the pool, each with its own `&mut T`.
    ///
    /// # Errors
    /// As [`GpuPool::run`](crate::GpuPool::run) and [`borrow`](Self::borrow).
    #[track_caller]
    pub fn run<R: Returned>(&mut self, f: impl Fn(&Device, Shard, &mut T) -> Result<R> + Sync) -> Result<Vec<R>> {
        Run::new(&self.shared, &*self).run(f)
    }

    /// A [`run`](Self::run) on some of the devices only: ordinals in the pool, in the order of their ranks. The values
    /// of the other devices stay as they are.
    pub fn on<'p>(&'p mut self, devices: &'p [usize]) -> Run<'p, &'p PerDevice<T>> {
        Run::new(&self.shared, &*self).on(devices)
    }

    /// [`run`](Self::run) with the caller's own error type.
    ///
    /// # Errors
    /// The error of the first closure that fails; `E::from` of this crate's errors, as for [`run`](Self::run).
    #[track_caller]
    pub fn try_run<R: Returned, E: From<Error> + fmt::Display + Send>(
        &mut self,
        f: impl Fn(&Device, Shard, &mut T) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, E> {
        Run::new(&self.shared, &*self).try_run(f)
    }

    #[track_caller]
    fn scope<R: Send>(&self, op: &'static str, f: impl Fn(&Device, Shard) -> Result<R> + Sync) -> Result<Vec<R>> {
        let _here = OpSite::here(op);
        Run::new(&self.shared, ()).scope(op, f, as_it_is)
    }
}

impl<T: 'static> Run<'_, &PerDevice<T>> {
    /// Runs `f` on the devices, each with its shard and its own `&mut T`. As [`PerDevice::run`].
    ///
    /// # Errors
    /// As [`PerDevice::run`]; [`Error::InvalidArgument`] for an empty list of devices, a repeated ordinal or an ordinal
    /// that the pool does not have.
    #[track_caller]
    pub fn run<R: Returned>(self, f: impl Fn(&Device, Shard, &mut T) -> Result<R> + Sync) -> Result<Vec<R>> {
        self.each("run", |dev, shard, own| OpSite::outside(|| f(dev, shard, own)), as_it_is)
    }

    /// [`run`](Self::run) with the caller's own error type. As [`PerDevice::try_run`].
    ///
    /// # Errors
    /// The error of the first closure that fails; `E::from` of this crate's errors.
    #[track_caller]
    pub fn try_run<R: Returned, E: From<Error> + fmt::Display + Send>(
        self,
        f: impl Fn(&Device, Shard, &mut T) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, E> {
        self.each("try_run", |dev, shard, own| OpSite::outside(|| f(dev, shard, own)), by_its_text)
    }

    #[track_caller]
    fn each<R, E>(
        self,
        op: &'static str,
        f: impl Fn(&Device, Shard, &mut T) -> Result<R, E> + Sync,
        tell: impl Fn(&E, &dyn Fn(Error) -> bool) -> bool + Sync,
    ) -> Result<Vec<R>, E>
    where
        R: Send,
        E: From<Error> + Send,
    {
        let state = self.parts;
        let _here = OpSite::here(op);
        self.parted(()).0.scope(op, |dev, shard| f(dev, shard, &mut *state.borrow_mut(dev)?), tell)
    }
}
