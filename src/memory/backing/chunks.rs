//! The backings `malloc`, `pinned` and `managed`: single allocations of the driver; each one is a region.

use super::{Backing, ChunkKind, FreeAround, Mapping, Mappings, Moved, Region};
use crate::{
    driver::{Address, DriverResult, FaultKind, fault},
    memory::{DeviceHandle, heap::GRAIN},
};
use smallvec::smallvec;
use std::{ops::Range, sync::Arc};

pub(super) struct Chunks {
    handle: Arc<DeviceHandle>,
    kind: ChunkKind,
    regions: Vec<Option<Arc<Region>>>,
    spare: Vec<u32>,
    reserved: u64,
    driver_calls: u64,
}

impl Chunks {
    pub fn new(handle: &Arc<DeviceHandle>, kind: ChunkKind) -> Self {
        Chunks { handle: handle.clone(), kind, regions: Vec::new(), spare: Vec::new(), reserved: 0, driver_calls: 0 }
    }

    fn allocate(&mut self, bytes: u64) -> DriverResult<Address> {
        self.driver_calls += 1;
        let size = usize::try_from(bytes)
            .map_err(|_| fault::invalid(format!("{bytes} bytes are more than any memory has")))?;
        let driver = &self.handle.driver;
        match self.kind {
            ChunkKind::Device => {
                let address = driver.mem_alloc(size)?;
                // Below 64 KiB the driver may give less alignment than the heap needs.
                if !address.is_multiple_of(GRAIN) {
                    // SAFETY: nothing else has seen the memory.
                    unsafe { driver.mem_free(address)? };
                    return Err(fault::no_memory(format!("{bytes} bytes came at {address:#x}, which is not aligned")));
                }
                Ok(address)
            }
            ChunkKind::Pinned => driver.host_alloc(size).map(|ptr| ptr as Address),
            ChunkKind::Managed => driver.managed_alloc(size).map(|ptr| ptr as Address),
        }
    }
}

impl Backing for Chunks {
    fn name(&self) -> &'static str {
        match self.kind {
            ChunkKind::Device => "malloc",
            ChunkKind::Pinned => "pinned",
            ChunkKind::Managed => "managed",
        }
    }

    fn grow(&mut self, bytes: u64, unit: u64, budget: u64, _: FreeAround) -> DriverResult<Mappings> {
        fail_if!(bytes > budget, fault::no_memory(format!("{bytes} bytes are asked for, {budget} are allowed")));
        let mut size = bytes.max(unit).min(budget);
        let address = match self.allocate(size) {
            Err(fault) if fault.kind == FaultKind::OutOfMemory && size > bytes => {
                size = bytes;
                self.allocate(size)?
            }
            result => result?,
        };
        self.reserved += size;
        let keep_alive = Region::chunk(&self.handle, self.kind, address, size);
        let region = self.spare.pop().unwrap_or_else(|| {
            self.regions.push(None);
            self.regions.len() as u32 - 1
        });
        self.regions[region as usize] = Some(keep_alive.clone());
        Ok(smallvec![Mapping { region, keep_alive, address, bytes: size }])
    }

    fn units_in(&self, region: u32, range: Range<Address>) -> Vec<Range<Address>> {
        let found = self.regions.get(region as usize).and_then(Option::as_ref);
        found.map_or_else(Vec::new, |region| region.units_in(range))
    }

    unsafe fn unmap(&mut self, region: u32, unit: Range<Address>) -> DriverResult {
        let Some(found) = self.regions.get(region as usize).and_then(Option::as_ref) else {
            return Err(fault::invalid(format!("there is no region {region}")));
        };
        self.driver_calls += 1;
        // SAFETY: the caller's promise.
        let (gone, result) = unsafe { found.unmap(&unit) };
        if gone {
            self.reserved -= unit.end - unit.start;
            self.regions[region as usize] = None;
            self.spare.push(region);
        }
        result
    }

    unsafe fn move_units(&mut self, _: &[(u32, Range<Address>)], _: u64, _: FreeAround) -> Moved {
        Moved { fault: Some(fault::unsupported("allocations do not move")), ..Moved::default() }
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn driver_calls(&self) -> u64 {
        self.driver_calls
    }
}
