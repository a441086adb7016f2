//! A region: units from the driver. The pool keeps it alive, and so does every block that lies in it.
//!
//! The backing adds, moves and gives back units; a block's last drop may give back the rest after the pool has ended.

use crate::{
    contain::Contained,
    driver::{Address, DriverResult, FaultKind, fault::invalid, observe::Token},
    memory::DeviceHandle,
};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::{any::Any, collections::BTreeMap, ops::Range, sync::Arc};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChunkKind {
    Device,
    Pinned,
    Managed,
}

/// Its drop gives back the units that are left, and then the addresses. The pool changes it while the pool lives, the
/// last drop of a block afterwards. Both are rare, so a lock is good enough.
pub struct Region {
    pub(crate) handle: Arc<DeviceHandle>,
    pub(crate) kind: ChunkKind,
    /// Other code has allocated the memory.
    pub(crate) adopted: bool,
    window: Option<Range<Address>>,
    units: Mutex<BTreeMap<Address, Unit>>,
    /// With a checker: the knowledge of the threads that have freed its blocks.
    known: Mutex<Option<Box<Token>>>,
    /// Dropped when the memory has been given back; never if some of it was leaked.
    attached: OnceCell<Box<dyn Any + Send + Sync>>,
}

#[derive(Clone, Copy)]
struct Unit {
    bytes: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Here,
    /// Never given back: something may use it for ever.
    Leaked,
    /// The driver has failed to take it back, so it is unknown whether memory is there.
    Spoiled,
}

impl Region {
    pub(crate) fn window(handle: &Arc<DeviceHandle>, window: Range<Address>) -> Arc<Self> {
        Arc::new(Self::new(handle, ChunkKind::Device, Some(window)))
    }

    pub(crate) fn chunk(handle: &Arc<DeviceHandle>, kind: ChunkKind, address: Address, bytes: u64) -> Arc<Self> {
        let region = Self::new(handle, kind, None);
        region.add(address, bytes);
        Arc::new(region)
    }

    /// A region of one unit that other code has allocated, and frees when `keep` is dropped.
    pub(crate) fn adopted(handle: &Arc<DeviceHandle>, at: Address, bytes: u64, keep: impl Send + 'static) -> Arc<Self> {
        let mut region = Self::new(handle, ChunkKind::Device, None);
        region.adopted = true;
        region.add(at, bytes);
        region.attach(Contained::new(Mutex::new(keep)));
        Arc::new(region)
    }

    fn new(handle: &Arc<DeviceHandle>, kind: ChunkKind, window: Option<Range<Address>>) -> Self {
        let (handle, units, known) = (handle.clone(), Mutex::default(), Mutex::default());
        Region { handle, kind, adopted: false, window, units, known, attached: OnceCell::new() }
    }

    /// Attaches a value that is dropped when the memory has been given back. Once.
    pub fn attach(&self, value: impl Any + Send + Sync) {
        let attached = self.attached.set(Box::new(value));
        debug_assert!(attached.is_ok(), "a value is attached already");
    }

    /// The attached value, if it has this type.
    pub fn attached<T: Any>(&self) -> Option<&T> {
        self.attached.get()?.downcast_ref()
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.window.is_none() && self.units.lock().is_empty()
    }

    /// The thread that gives the memory back must know it.
    pub(crate) fn remember(&self, token: Option<Box<Token>>) {
        Token::add(&mut self.known.lock(), token);
    }

    /// Marks the units of these bytes as leaked: a stuck stream may use them for ever, so they are never given back.
    pub(crate) fn leak(&self, range: &Range<Address>) {
        let mut units = self.units.lock();
        for (_, unit) in
            units.range_mut(..range.end).rev().take_while(|(start, unit)| *start + unit.bytes > range.start)
        {
            unit.state = State::Leaked;
        }
    }

    pub(crate) fn add(&self, address: Address, bytes: u64) {
        self.units.lock().insert(address, Unit { bytes, state: State::Here });
    }

    pub(super) fn units_in(&self, range: Range<Address>) -> Vec<Range<Address>> {
        let units = self.units.lock();
        let here = units.range(range.clone()).filter(|(_, unit)| unit.state == State::Here);
        here.map(|(start, unit)| *start..start + unit.bytes).filter(|unit| unit.end <= range.end).collect()
    }

    pub(super) fn holes(&self) -> Vec<Range<Address>> {
        let Some(window) = self.window.clone() else { return Vec::new() };
        let (mut holes, mut at) = (Vec::new(), window.start);
        for (start, unit) in &*self.units.lock() {
            if *start > at {
                holes.push(at..*start);
            }
            at = start + unit.bytes;
        }
        if at < window.end {
            holes.push(at..window.end);
        }
        holes
    }

    /// Returns whether the unit counts as gone: also after a fault, but not if the call was refused.
    ///
    /// # Safety
    /// Nothing uses it any more, on any device.
    pub(super) unsafe fn unmap(&self, unit: &Range<Address>) -> (bool, DriverResult) {
        let mut units = self.units.lock();
        let state = match whole(&mut units, unit) {
            Ok(state) => state,
            Err(fault) => return (false, Err(fault)),
        };
        // SAFETY: the unit exists; the rest is the caller's promise.
        let result = unsafe { self.give_back(unit) };
        match &result {
            Err(fault) if fault.kind == FaultKind::Misuse => return (false, result),
            Err(_) if self.window.is_some() => *state = State::Spoiled,
            _ => drop(units.remove(&unit.start)),
        }
        (true, result)
    }

    /// Moves a unit of a window. After a fault it is where it was.
    ///
    /// # Safety
    /// Nothing uses it any more, on any device, and the new place is in a hole.
    pub(super) unsafe fn move_unit(&self, unit: &Range<Address>, to: Address) -> DriverResult {
        let mut units = self.units.lock();
        whole(&mut units, unit)?;
        // SAFETY: a whole mapping; the rest is the caller's promise.
        unsafe { self.handle.driver.vm_move(unit.start, to, (unit.end - unit.start) as usize)? };
        if let Some(moved) = units.remove(&unit.start) {
            units.insert(to, moved);
        }
        Ok(())
    }

    unsafe fn give_back(&self, unit: &Range<Address>) -> DriverResult {
        let (driver, at) = (&self.handle.driver, unit.start);
        // SAFETY: it came from this driver, whole, by the call of its kind; the rest is the caller's promise.
        unsafe {
            match (self.kind, &self.window) {
                (ChunkKind::Device, Some(_)) => driver.vm_unmap(at, (unit.end - at) as usize),
                (ChunkKind::Device, None) if self.adopted => driver.disown(at),
                (ChunkKind::Device, None) => driver.mem_free(at),
                (ChunkKind::Pinned, _) => driver.host_free(at as *mut u8),
                (ChunkKind::Managed, _) => driver.managed_free(at as *mut u8),
            }
        }
    }
}

fn whole<'a>(units: &'a mut BTreeMap<Address, Unit>, unit: &Range<Address>) -> DriverResult<&'a mut State> {
    match units.get_mut(&unit.start) {
        Some(found) if found.state == State::Here && unit.start + found.bytes == unit.end => Ok(&mut found.state),
        _ => Err(invalid(format!("{:#x}..{:#x} is no unit", unit.start, unit.end))),
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.handle.acquire(self.known.get_mut().as_deref());
        let units = std::mem::take(&mut *self.units.lock());
        let mut empty = true;
        for (start, Unit { bytes, state }) in units {
            match state {
                State::Here => {
                    // SAFETY: its last block is gone. Blocks go only when their uses are over; else the unit is leaked.
                    if let Err(fault) = unsafe { self.give_back(&(start..start + bytes)) } {
                        // After a fault of another kind it is given back, or nothing more can be done.
                        empty &= fault.kind != FaultKind::Misuse;
                        self.handle.not_returned(fault);
                    }
                }
                State::Leaked => empty = false,
                State::Spoiled => {}
            }
        }
        if let Some(window) = self.window.take().filter(|_| empty) {
            // SAFETY: nothing is mapped there any more, and no code knows the addresses.
            if let Err(fault) = unsafe { self.handle.driver.vm_release(window.start, window.end - window.start) } {
                self.handle.not_returned(fault);
            }
        }
        if !empty {
            std::mem::forget(self.attached.take());
        } else if self.adopted {
            // Its drop may free memory by a call that waits for running kernels.
            #[cfg(feature = "cuda")]
            let _blocking = crate::driver::gate::blocking();
            drop(self.attached.take());
        }
    }
}
