//! State that lives on its device's thread between scopes: the type, its borrows and its poison. Invariant: all borrows
//! of a value are on one thread, so plain cells count them.

use crate::error::{Error, Result, op_site::OpSite};
use crate::gang::{Gang, dispatch::Entry};
use crate::{Device, sync::unique_id, thread::worker::Shared};
use std::cell::{Cell, RefCell, UnsafeCell};
use std::ops::{Deref, DerefMut};
use std::{fmt, marker::PhantomData, panic::Location, rc::Rc, sync::Arc};

/// One `T` per device: weights, optimiser state, a cuBLAS handle. Each value is made on its device's thread and never
/// leaves that thread, so `T` need not be `Send`. The handle is always `Send` and `Sync`. `T` must be `'static`: if the
/// handle is forgotten (`mem::forget`), its values stay on their threads until the pool closes.
///
/// If a scope fails after it has borrowed a value mutably, the value is *poisoned*: its contents are unspecified, and
/// an error is better than replicas that silently differ. [`reset`](Self::reset) makes new values,
/// [`clear_poison`](Self::clear_poison) accepts the values as they are.
///
/// ```
/// let pool = gpu_pool::GpuPool::builder().host(2).build()?;
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
/// `let m = &mut *state.borrow_mut(dev)?; dev.axpy(-0.1, &m.g, &mut m.w)`.
pub struct PerDevice<T: 'static> {
    id: u64,
    pub(crate) shared: Arc<Shared>,
    of: PhantomData<fn() -> T>,
}

struct Slot<T> {
    /// -1: borrowed mutably; otherwise the number of shared borrows.
    borrows: Cell<isize>,
    /// Those that have failed or may still fail: a failure poisons the value. Several, since a device may run the next
    /// scope while other members still run the scope before.
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

impl<T: fmt::Debug> fmt::Debug for Ref<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: fmt::Debug> fmt::Debug for RefMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T> Deref for Ref<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: `borrows` counts this borrow, so there is no exclusive borrow. All borrows are on one thread.
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
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        PerDevice { id: unique_id(), shared: shared.clone(), of: PhantomData }
    }

    /// Gives this device a new value. If the scope fails, some devices have new values and others do not, so the
    /// scope's gang counts as a writer.
    pub(crate) fn put(&self, dev: &Device, value: T) {
        let writers = RefCell::new(vec![dev.session.gang.clone()]);
        let slot = Rc::new(Slot { borrows: Cell::new(0), writers, value: UnsafeCell::new(value) });
        let old = dev.worker.slots.borrow_mut().insert(self.id, slot);
        drop(old);
    }

    /// Drops a poisoned value: two may not fit the memory. Returns whether the device has no value now.
    #[track_caller]
    pub(crate) fn drop_if_poisoned(&self, dev: &Device) -> Result<bool> {
        match self.healthy("borrow_mut", dev) {
            Ok(_) => return Ok(false),
            Err(Error::Poisoned { .. } | Error::InvalidArgument { .. }) => {}
            Err(other) => return Err(other),
        }
        let old = dev.worker.slots.borrow_mut().remove(&self.id);
        drop(old);
        Ok(true)
    }

    /// Returns the gangs that may have left it.
    #[track_caller]
    pub(crate) fn accept(&self, dev: &Device) -> Result<Vec<Arc<Gang>>> {
        Ok(self.slot("clear_poison", dev)?.writers.take())
    }

    #[track_caller]
    pub(crate) fn blame_on(&self, dev: &Device, gangs: &[Arc<Gang>]) -> Result<()> {
        self.slot("clear_poison", dev)?.writers.borrow_mut().extend_from_slice(gangs);
        Ok(())
    }

    /// This device's value, shared. The guard borrows `dev`, too, so it cannot outlive the closure.
    ///
    /// # Errors
    /// [`Error::Borrowed`], [`Error::Poisoned`], [`Error::WrongPool`]; [`Error::InvalidArgument`] on a device that has
    /// no value.
    #[track_caller]
    pub fn borrow<'a>(&'a self, dev: &'a Device) -> Result<Ref<'a, T>> {
        let slot = self.healthy("borrow", dev)?;
        fail_if!(slot.borrows.get() < 0, Error::borrowed("borrow", dev.index()));
        slot.borrows.set(slot.borrows.get() + 1);
        Ok(Ref { slot, of: PhantomData })
    }

    /// This device's value, exclusive.
    ///
    /// # Errors
    /// As [`borrow`](Self::borrow).
    #[track_caller]
    pub fn borrow_mut<'a>(&'a self, dev: &'a Device) -> Result<RefMut<'a, T>> {
        let slot = self.healthy("borrow_mut", dev)?;
        fail_if!(slot.borrows.get() != 0, Error::borrowed("borrow_mut", dev.index()));
        slot.borrows.set(-1);
        let own = &dev.session.gang;
        let mut writers = slot.writers.borrow_mut();
        // A gang may fail until it has ended everywhere. So `is_settled` comes first: after it, `is_aborted` is final.
        writers.retain(|gang| !Arc::ptr_eq(gang, own) && (!gang.is_settled() || gang.is_aborted()));
        writers.push(own.clone());
        drop(writers);
        Ok(RefMut { slot, of: PhantomData })
    }

    #[track_caller]
    fn slot(&self, op: &'static str, dev: &Device) -> Result<Rc<Slot<T>>> {
        fail_if!(!Arc::ptr_eq(&dev.worker.shared, &self.shared), Error::wrong_pool(op, dev.index()));
        let slot = dev.worker.slots.borrow().get(&self.id).cloned();
        match slot.and_then(|slot| slot.downcast().ok()) {
            Some(slot) => Ok(slot),
            None => Err(Error::invalid(op, format_args!("device {} has no value", dev.index()))),
        }
    }

    #[track_caller]
    fn healthy(&self, op: &'static str, dev: &Device) -> Result<Rc<Slot<T>>> {
        let slot = self.slot(op, dev)?;
        let failed = |gang: &Arc<Gang>| gang.is_aborted() && !Arc::ptr_eq(gang, &dev.session.gang);
        if slot.writers.borrow().iter().any(failed) {
            let OpSite { op, site } = OpSite::outermost(op, Location::caller());
            return Err(Error::Poisoned { op, device: dev.index(), site });
        }
        Ok(slot)
    }
}

impl<T: 'static> Drop for PerDevice<T> {
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

debug_as! {
    PerDevice<T> [T: 'static], |self|
    "PerDevice<{}> on {} devices", std::any::type_name::<T>(), self.shared.device_count()
}
