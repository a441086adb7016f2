//! State that the devices of one [`wrap`](super::wrap) share: lost devices, and the owners of events and memory.

use super::plan::Injected;
use gpu_pool::extend::driver::{Address, Driver, DriverRef, DriverResult, Fault, FaultKind, RawEvent};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashMap},
    ptr,
    sync::{Arc, Weak},
};

pub(super) struct Common {
    inner: Vec<Weak<dyn Driver>>,
    lost: Mutex<Vec<Option<Fault>>>,
    events: Mutex<HashMap<RawEvent, usize>>,
    memory: Mutex<BTreeMap<Address, Owned>>,
}

#[derive(Clone, Copy)]
pub(super) struct Owned {
    pub bytes: usize,
    pub device: usize,
    /// The injected lie about copies to and from this mapping.
    pub lie: Option<Injected>,
}

impl Common {
    pub fn new(drivers: &[DriverRef]) -> Self {
        Common {
            inner: drivers.iter().map(Arc::downgrade).collect(),
            lost: Mutex::new(vec![None; drivers.len()]),
            events: Mutex::default(),
            memory: Mutex::default(),
        }
    }

    pub fn inner(&self, index: usize) -> Option<DriverRef> {
        self.inner[index].upgrade()
    }

    /// The index of a device, also in further layers. Compares the innermost objects, since devices may share a GPU.
    pub fn index(&self, driver: &dyn Driver) -> Option<usize> {
        let is_it = |device: DriverRef| ptr::addr_eq(device.as_any(), driver.as_any());
        self.inner.iter().position(|device| device.upgrade().is_some_and(is_it))
    }

    pub fn alive(&self, index: usize) -> DriverResult {
        self.lost.lock()[index].clone().map_or(Ok(()), Err)
    }

    /// Marks a device as lost; the first reason stays.
    pub fn lose(&self, index: usize, fault: Fault) {
        self.lost.lock()[index].get_or_insert(fault);
    }

    pub fn event_created(&self, event: RawEvent, index: usize) {
        self.events.lock().insert(event, index);
    }

    pub fn event_destroyed(&self, event: RawEvent) {
        self.events.lock().remove(&event);
    }

    pub fn event_alive(&self, event: RawEvent) -> DriverResult {
        let owner = self.events.lock().get(&event).copied();
        owner.map_or(Ok(()), |owner| self.alive(owner))
    }

    pub fn allocated(&self, address: Address, owned: Owned) {
        self.memory.lock().insert(address, owned);
    }

    pub fn freed(&self, address: Address) -> Option<Owned> {
        self.memory.lock().remove(&address)
    }

    /// The device that owns this memory; `None` for host memory.
    pub fn owner(&self, address: Address) -> Option<usize> {
        self.memory(address).map(|owned| owned.device)
    }

    /// The injected lie about copies that begin at these addresses, if any.
    pub fn lie(&self, dst: Address, src: Address) -> Option<Injected> {
        [dst, src].into_iter().find_map(|at| self.memory(at)?.lie)
    }

    fn memory(&self, address: Address) -> Option<Owned> {
        let memory = self.memory.lock();
        let (start, owned) = memory.range(..=address).next_back()?;
        (address < start + owned.bytes as u64).then_some(*owned)
    }
}

/// The fault that a device reports for an injected one.
pub(super) fn fault(injected: Injected) -> Option<Fault> {
    let (kind, code, name, detail) = match injected {
        Injected::OutOfMemory => (FaultKind::OutOfMemory, 2, "CUDA_ERROR_OUT_OF_MEMORY", "injected by a fault plan"),
        Injected::Error => (FaultKind::Other, 999, "CUDA_ERROR_UNKNOWN", "injected by a fault plan"),
        Injected::LaunchFailed => (FaultKind::DeviceLost, 719, "CUDA_ERROR_LAUNCH_FAILED", "injected by a fault plan"),
        Injected::DeviceLost => {
            let detail = "the GPU has fallen off the bus, says a fault plan";
            (FaultKind::DeviceLost, 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", detail)
        }
        Injected::Slow { .. } | Injected::Stuck | Injected::Drop | Injected::Corrupt => return None,
    };
    Some(Fault { kind, code, name: name.to_owned(), detail: detail.to_owned(), report: None })
}

#[cfg(test)]
#[path = "../../tests/unit/faulty/common_tests.rs"]
mod tests;
