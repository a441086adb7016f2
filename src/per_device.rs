//! State that lives on its device between scopes.

use crate::{
    Device, Shard,
    error::{Error, Result},
    gang::{Gang, dispatch::Entry},
    scope,
    sync::unique_id,
    thread::worker::Shared,
};
use std::{
    cell::{Cell, RefCell, UnsafeCell},
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    panic::Location,
    rc::Rc,
    sync::Arc,
};

/// One `T` per device (weights, optimiser state, a cuBLAS handle), made on its device's thread and never leaving it. So
/// `T` need not be `Send`; the handle always is, and `Sync`. `T: 'static`, since a forgotten handle leaves its values
/// on their threads until the pool closes.
///
/// A `T` that was borrowed mutably in a scope that failed is *poisoned*: its contents are unspecified, and replicas
/// that drift apart silently are worse than an error. [`reset`](Self::reset) makes it anew,
/// [`clear_poison`](Self::clear_poison) accepts it as it is.
///
/// ```
/// # use gpu_pool::GpuPool;
/// let pool = GpuPool::builder().host(2).build()?;
/// let mut weights = pool.per_device(|dev, _| dev.upload(&[1.0f32, 2.0]))?;
/// for _step in 0..3 {
///     weights.run(|dev, _shard, w| dev.scale(w, 2.0))?;
/// }
/// let w = pool.run(|dev, _| dev.download(&*weights.borrow(dev)?))?;
/// assert_eq!(w, [[8.0, 16.0], [8.0, 16.0]]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// Two fields at once through a guard need a plain reference first:
/// ```
/// # use gpu_pool::*;
/// struct Model { w: DeviceBuffer<f32>, g: DeviceBuffer<f32> }
/// # fn step(dev: &Device, state: &PerDevice<Model>) -> Result<()> {
/// let m = &mut *state.borrow_mut(dev)?;
/// dev.axpy(-0.1, &m.g, &mut m.w)
/// # }
/// ```
pub struct PerDevice<T: 'static> {
    id: u64,
    shared: Arc<Shared>,
    of: PhantomData<fn() -> T>,
}

struct Slot<T> {
    /// -1: borrowed mutably, else the number of shared borrows.
    borrows: Cell<isize>,
    /// Gangs that have borrowed it mutably, and may have failed or still fail: then the value is poisoned. Several,
    /// since a device may be at the next scope while other members are at the one before.
    writers: RefCell<Vec<Arc<Gang>>>,
    value: UnsafeCell<T>,
}

/// A shared borrow of a device's state.
pub struct Ref<'a, T: 'static> {
    slot: Rc<Slot<T>>,
    of: PhantomData<&'a T>,
}

/// An exclusive borrow of a device's state.
pub struct RefMut<'a, T: 'static> {
    slot: Rc<Slot<T>>,
    of: PhantomData<&'a mut T>,
}

crate::sync::device_thread_only! { ['a, T: 'static] Ref<'a, T>, ['a, T: 'static] RefMut<'a, T> }

impl<T> Deref for Ref<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: `borrows` counts this borrow, so there is no exclusive one; all are on one thread.
        unsafe { &*self.slot.value.get() }
    }
}
impl<T> Deref for RefMut<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: `borrows` is -1, so this is the only borrow.
        unsafe { &*self.slot.value.get() }
    }
}
impl<T> DerefMut for RefMut<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.slot.value.get() }
    }
}
impl<T> Drop for Ref<'_, T> {
    fn drop(&mut self) {
        self.slot.borrows.set(self.slot.borrows.get() - 1);
    }
}
impl<T> Drop for RefMut<'_, T> {
    fn drop(&mut self) {
        self.slot.borrows.set(0);
    }
}

impl<T: 'static> PerDevice<T> {
    #[track_caller]
    pub(crate) fn create<F>(shared: &Arc<Shared>, f: F) -> Result<Self>
    where
        F: Fn(&Device, Shard) -> Result<T> + Sync,
    {
        let this = PerDevice { id: unique_id(), shared: shared.clone(), of: PhantomData };
        this.fill(f)?;
        Ok(this)
    }

    /// Makes every device's value anew, and so ends any poison.
    ///
    /// # Errors
    /// As [`GpuPool::run`](crate::GpuPool::run). If some devices fail, every value is poisoned.
    #[track_caller]
    pub fn reset<F>(&mut self, f: F) -> Result<()>
    where
        F: Fn(&Device, Shard) -> Result<T> + Sync,
    {
        self.fill(f)
    }

    #[track_caller]
    fn fill<F>(&self, f: F) -> Result<()>
    where
        F: Fn(&Device, Shard) -> Result<T> + Sync,
    {
        self.scope(None, |dev, shard| {
            let value = UnsafeCell::new(f(dev, shard)?);
            // If the scope fails, some devices have a new value and others do not: nobody may take that for a set.
            let writers = RefCell::new(vec![dev.session.gang.clone()]);
            let slot = Rc::new(Slot { borrows: Cell::new(0), writers, value });
            let old = dev.worker.slots.borrow_mut().insert(self.id, slot);
            drop(old);
            Ok(())
        })
        .map(drop)
    }

    /// Accepts every device's value as it is after a failed scope.
    ///
    /// # Errors
    /// As [`GpuPool::run`](crate::GpuPool::run).
    #[track_caller]
    pub fn clear_poison(&mut self) -> Result<()> {
        let site = Location::caller();
        self.scope(None, |dev, _| {
            self.slot(dev).map_err(|error| error.called_at(site))?.writers.take();
            Ok(())
        })
        .map(drop)
    }

    /// This device's value, shared. Tied to `dev` as well, so that it cannot outlive the closure.
    ///
    /// # Errors
    /// [`Error::Borrowed`], [`Error::Poisoned`], [`Error::WrongPool`], [`Error::InvalidArgument`] on a device that
    /// never made a value.
    #[track_caller]
    pub fn borrow<'a>(&'a self, dev: &'a Device) -> Result<Ref<'a, T>> {
        let slot = self.healthy(dev)?;
        if slot.borrows.get() < 0 {
            return Err(Error::Borrowed { device: dev.index() });
        }
        slot.borrows.set(slot.borrows.get() + 1);
        Ok(Ref { slot, of: PhantomData })
    }

    /// This device's value, exclusive.
    ///
    /// # Errors
    /// As [`borrow`](Self::borrow).
    #[track_caller]
    pub fn borrow_mut<'a>(&'a self, dev: &'a Device) -> Result<RefMut<'a, T>> {
        let slot = self.healthy(dev)?;
        if slot.borrows.get() != 0 {
            return Err(Error::Borrowed { device: dev.index() });
        }
        slot.borrows.set(-1);
        let own = &dev.session.gang;
        let mut writers = slot.writers.borrow_mut();
        // One whose members have not all ended may fail yet. In this order: once all have ended, it fails no more.
        writers.retain(|gang| !Arc::ptr_eq(gang, own) && (!gang.is_recovered() || gang.is_aborted()));
        writers.push(own.clone());
        drop(writers);
        Ok(RefMut { slot, of: PhantomData })
    }

    /// A scope on all devices of the pool that gives each its own `&mut T`.
    ///
    /// # Errors
    /// As [`GpuPool::run`](crate::GpuPool::run) and [`borrow`](Self::borrow).
    #[track_caller]
    pub fn run<R, F>(&mut self, f: F) -> Result<Vec<R>>
    where
        R: Send,
        F: Fn(&Device, Shard, &mut T) -> Result<R> + Sync,
    {
        let (this, site) = (&*self, Location::caller());
        this.scope(None, |dev, shard| {
            let mut own = this.borrow_mut(dev).map_err(|error| error.called_at(site))?;
            f(dev, shard, &mut own)
        })
    }

    /// [`run`](Self::run) on some of the devices only (ordinals in the pool, in the order of their ranks). The values
    /// of the others stay as they are.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let mut steps = pool.per_device(|_, _| Ok(0))?;
    /// let found = steps.run_on(&[2, 0], |dev, _, steps| {
    ///     *steps += 1;
    ///     Ok((dev.index(), *steps))
    /// })?;
    /// assert_eq!(found, [(2, 1), (0, 1)]);
    /// assert_eq!(steps.run(|_, _, steps| Ok(*steps))?, [1, 0, 1]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`GpuPool::run_on`](crate::GpuPool::run_on) and [`borrow`](Self::borrow).
    #[track_caller]
    pub fn run_on<R, F>(&mut self, devices: &[usize], f: F) -> Result<Vec<R>>
    where
        R: Send,
        F: Fn(&Device, Shard, &mut T) -> Result<R> + Sync,
    {
        let members = scope::members(&self.shared, "run_on", devices)?;
        let (this, site) = (&*self, Location::caller());
        this.scope(Some(members), |dev, shard| {
            let mut own = this.borrow_mut(dev).map_err(|error| error.called_at(site))?;
            f(dev, shard, &mut own)
        })
    }

    /// [`run`](Self::run) with the caller's own error type.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let mut steps = pool.per_device(|_, _| Ok(0))?;
    /// let failed: anyhow::Result<Vec<()>> = steps.try_run(|dev, _, steps| {
    ///     *steps += dev.index();
    ///     anyhow::ensure!(*steps == 0, "device {} has gone too far", dev.index());
    ///     Ok(())
    /// });
    /// assert_eq!(failed.unwrap_err().to_string(), "device 1 has gone too far");
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// What the first failing closure returned; `E::from` of this crate's errors, as [`run`](Self::run) has them.
    #[track_caller]
    pub fn try_run<R, E, F>(&mut self, f: F) -> Result<Vec<R>, E>
    where
        R: Send,
        E: From<Error> + fmt::Display + Send,
        F: Fn(&Device, Shard, &mut T) -> Result<R, E> + Sync,
    {
        let (this, site) = (&*self, Location::caller());
        let own = |dev: &Device, shard| {
            let mut own = this.borrow_mut(dev).map_err(|error| error.called_at(site))?;
            f(dev, shard, &mut own)
        };
        scope::run(&this.shared, None, own, scope::by_its_text)
    }

    #[track_caller]
    fn scope<R: Send>(
        &self,
        members: Option<&[usize]>,
        f: impl Fn(&Device, Shard) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        scope::run(&self.shared, members, f, scope::as_it_is)
    }

    #[track_caller]
    fn slot(&self, dev: &Device) -> Result<Rc<Slot<T>>> {
        if !Arc::ptr_eq(&dev.worker.shared, &self.shared) {
            let site = Location::caller();
            return Err(Error::WrongPool { op: "PerDevice", device: dev.index(), site });
        }
        let slot = dev.worker.slots.borrow().get(&self.id).cloned();
        match slot.and_then(|slot| slot.downcast().ok()) {
            Some(slot) => Ok(slot),
            None => Err(Error::invalid("PerDevice", format_args!("device {} has no value", dev.index()))),
        }
    }

    #[track_caller]
    fn healthy(&self, dev: &Device) -> Result<Rc<Slot<T>>> {
        let slot = self.slot(dev)?;
        let failed = |gang: &Arc<Gang>| gang.is_aborted() && !Arc::ptr_eq(gang, &dev.session.gang);
        if slot.writers.borrow().iter().any(failed) {
            return Err(Error::Poisoned { device: dev.index() });
        }
        Ok(slot)
    }
}

impl<T: 'static> Drop for PerDevice<T> {
    /// Each device's thread drops its value when it gets to it.
    fn drop(&mut self) {
        let id = self.id;
        if self.shared.gate.is_closed() || std::process::id() != self.shared.pid {
            return;
        }
        for queue in &self.shared.queues {
            queue.post(Entry::Task(Box::new(move |worker| {
                let value = worker.slots.borrow_mut().remove(&id);
                drop(value);
            })));
        }
    }
}

impl<T: 'static> fmt::Debug for PerDevice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PerDevice<{}> on {} devices", std::any::type_name::<T>(), self.shared.devices())
    }
}
