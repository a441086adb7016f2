//! The backing `vmm`: one window of virtual addresses, in which memory is mapped where it is missing.
//!
//! [`holes`] decides where; this file makes the driver calls. Invariant: the units never overlap, and lie in the
//! window.

use super::{
    Backing, FreeAround, Mapping, Mappings, Moved, Region,
    holes::{self, Hole},
};
use crate::{
    driver::{Address, DriverResult, FaultKind, fault},
    memory::DeviceHandle,
};
use std::{ops::Range, sync::Arc};

const REGION: u32 = 0;
/// As a multiple of the device's memory. Growing where the fewest bytes are missing, and moving, need few bytes but
/// many addresses: up to five times the peak use, in simulations of RMM's `random_allocations`.
const ROOM: u64 = 8;
/// Largest device memory that a window is made for.
const MOST: u64 = 1 << 47;
/// Smallest window: small software GPUs need room for holes, too.
const SMALLEST: u64 = 1 << 30;

pub(super) struct Vmm {
    pub region: Arc<Region>,
    pub granularity: u64,
    reserved: u64,
    driver_calls: u64,
}

impl Vmm {
    pub fn open(handle: &Arc<DeviceHandle>) -> DriverResult<Self> {
        let granularity = handle.driver.vm_granularity().ok_or_else(|| fault::unsupported("no virtual memory"))? as u64;
        // No address space is larger, even if the device reports a larger one.
        let total = handle.driver.info().total_memory.min(MOST).next_multiple_of(granularity).max(granularity);
        let mut bytes = (ROOM * total).max(SMALLEST).next_multiple_of(granularity);
        let mut driver_calls = 1;
        let start = loop {
            match handle.driver.vm_reserve(bytes) {
                Ok(start) => break start,
                Err(fault) if bytes == total || fault.kind == FaultKind::DeviceLost => return Err(fault),
                Err(_) => bytes = (bytes / 2).next_multiple_of(granularity).max(total),
            }
            driver_calls += 1;
        };
        Ok(Vmm { region: Region::window(handle, start..start + bytes), granularity, reserved: 0, driver_calls })
    }

    fn holes(&self, free: FreeAround) -> Vec<Hole> {
        let with_free_around = |range: Range<Address>| {
            let (before, after) = (free(REGION, range.start).0, free(REGION, range.end).1);
            Hole { range, before, after }
        };
        self.region.holes().into_iter().map(with_free_around).collect()
    }

    fn mapping(&self, address: Address, bytes: u64) -> Mapping {
        Mapping { region: REGION, keep_alive: self.region.clone(), address, bytes }
    }

    fn map(&mut self, address: Address, bytes: u64) -> DriverResult<Mapping> {
        self.driver_calls += 1;
        // SAFETY: a hole of the window, which no code uses.
        unsafe { self.region.handle.driver.vm_map(address, bytes as usize)? };
        self.region.add(address, bytes);
        self.reserved += bytes;
        Ok(self.mapping(address, bytes))
    }
}

impl Backing for Vmm {
    fn name(&self) -> &'static str {
        "vmm"
    }

    fn grow(&mut self, bytes: u64, unit: u64, budget: u64, free: FreeAround) -> DriverResult<Mappings> {
        let unit = unit.max(1).next_multiple_of(self.granularity);
        // The driver limits the memory. The window has room for all of it, but maybe not in one piece.
        let Some(place) = holes::to_fill(&self.holes(free), bytes, self.granularity) else {
            return Err(fault::no_memory(format!("no hole in the window takes {bytes} bytes")));
        };
        let missing = place.end - place.start;
        fail_if!(missing > budget, fault::no_memory(format!("{missing} bytes are missing, {budget} are allowed")));
        let mut mapped = Mappings::new();
        let mut at = place.start;
        while at < place.end {
            match self.map(at, unit.min(place.end - at)) {
                Ok(mapping) => {
                    at += mapping.bytes;
                    mapped.push(mapping);
                }
                Err(fault) => {
                    for Mapping { address, bytes, .. } in mapped {
                        // SAFETY: mapped just now; no other code knows of it.
                        let undone = unsafe { self.unmap(REGION, address..address + bytes) };
                        let _ = undone.map_err(|fault| self.region.handle.not_returned(fault));
                    }
                    return Err(fault);
                }
            }
        }
        Ok(mapped)
    }

    fn units_in(&self, region: u32, range: Range<Address>) -> Vec<Range<Address>> {
        if region == REGION { self.region.units_in(range) } else { Vec::new() }
    }

    unsafe fn unmap(&mut self, _: u32, unit: Range<Address>) -> DriverResult {
        self.driver_calls += 1;
        // SAFETY: the caller's promise.
        let (gone, result) = unsafe { self.region.unmap(&unit) };
        if gone {
            self.reserved -= unit.end - unit.start;
        }
        result
    }

    unsafe fn move_units(&mut self, from: &[(u32, Range<Address>)], bytes: u64, free: FreeAround) -> Moved {
        let units: Vec<_> = from.iter().map(|(_, unit)| unit.clone()).collect();
        let mut moved = Moved::default();
        let Some((mut at, units)) = holes::to_move(&self.holes(free), bytes, &units) else { return moved };
        for unit in units {
            self.driver_calls += 1;
            // SAFETY: the caller's promise for the unit; the new address is in a hole.
            if let Err(fault) = unsafe { self.region.move_unit(&unit, at) } {
                moved.fault = Some(fault);
                break;
            }
            let bytes = unit.end - unit.start;
            moved.to.push(self.mapping(at, bytes));
            moved.from.push((REGION, unit));
            at += bytes;
        }
        moved
    }

    fn is_window(&self) -> bool {
        true
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn driver_calls(&self) -> u64 {
        self.driver_calls
    }
}
