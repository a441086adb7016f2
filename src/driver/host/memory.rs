//! Memory: one window of addresses per device, and the host memory that all devices can access.
//!
//! A device address is no host address: it is translated when an operation runs. It lies in the device's window, 8 TiB
//! wide and far outside the addresses of the operating system, which no other device uses while this one lives, nor for
//! long afterwards. The upper half of a window is for addresses that are reserved first and mapped later (`window`).
//! Page-locked and managed memory keep their host addresses. A gap follows each allocation.

use super::{Block, Shared, Windows, block::ALIGN, fault, not_mapped, timing::Side};
use crate::driver::{Address, DriverResult, Fault};
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

const BASE: u64 = 1 << 62;
const WINDOW_BITS: u32 = 43;
/// For the allocations.
const WINDOW: u64 = 1 << (WINDOW_BITS - 1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Device(usize),
    Host,
}

pub(super) struct Resolved<'a> {
    pub home: Home,
    pub block: &'a Arc<Block>,
    pub offset: usize,
}

pub(super) struct Memory {
    first_window: u64,
    dry: bool,
    devices: Vec<Space>,
    host: BTreeMap<Address, (Arc<Block>, HostKind)>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        NUMBERS.lock().give(self.first_window, self.devices.len() as u64);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostKind {
    Pinned,
    Managed,
}

struct Space {
    capacity: u64,
    used: u64,
    /// Relative to the window.
    cursor: u64,
    blocks: BTreeMap<Address, Arc<Block>>,
    windows: Windows,
}

static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { next: 1, end: 1 << 20, free: BTreeMap::new() });

/// Returned numbers are reused only when there are no new ones, so that a stale address finds nothing for long.
struct Numbers {
    next: u64,
    end: u64,
    /// The length of each run by its first number. Adjacent runs are merged.
    free: BTreeMap<u64, u64>,
}

impl Numbers {
    fn take(&mut self, n: u64) -> Option<u64> {
        if n <= self.end - self.next {
            self.next += n;
            return Some(self.next - n);
        }
        let (&first, &length) = self.free.iter().find(|(_, length)| **length >= n)?;
        self.free.remove(&first);
        if length > n {
            self.free.insert(first + n, length - n);
        }
        Some(first)
    }

    fn give(&mut self, mut first: u64, mut n: u64) {
        if n == 0 {
            return;
        }
        if let Some(after) = self.free.remove(&(first + n)) {
            n += after;
        }
        if let Some((&start, &length)) = self.free.range(..first).next_back()
            && start + length == first
        {
            (first, n) = (start, n + length);
        }
        self.free.insert(first, n);
    }
}

fn window_of(number: u64) -> Address {
    BASE + (number << WINDOW_BITS)
}

impl Memory {
    pub fn new(capacities: impl ExactSizeIterator<Item = u64>, dry: bool) -> DriverResult<Self> {
        let count = capacities.len() as u64;
        let first_window = NUMBERS.lock().take(count);
        let first_window = first_window.ok_or_else(|| {
            fault::exhausted(format!("there are no addresses for {count} more software GPUs in this process"))
        })?;
        let space = |(device, capacity)| {
            let upper = window_of(first_window + device as u64) + WINDOW;
            let windows = Windows::new(upper..upper + WINDOW);
            Space { capacity, used: 0, cursor: 0, blocks: BTreeMap::new(), windows }
        };
        let devices = capacities.enumerate().map(space).collect();
        Ok(Memory { first_window, dry, devices, host: BTreeMap::new() })
    }

    /// A number that no other live machine has.
    pub fn first_window(&self) -> u64 {
        self.first_window
    }

    /// `(free, total)`.
    pub fn info(&self, device: usize) -> (u64, u64) {
        let space = &self.devices[device];
        (space.capacity - space.used, space.capacity)
    }

    pub fn alloc(&mut self, device: usize, bytes: usize) -> DriverResult<Address> {
        let window = window_of(self.first_window + device as u64);
        let space = &mut self.devices[device];
        let (asked, free) = (bytes as u64, space.capacity - space.used);
        fail_if!(asked > free, fault::out_of_memory(asked, free));
        let none = || fault::out_of_memory(asked, free);
        let offset = space.find(window, asked).ok_or_else(none)?;
        let nothing = || if self.dry { Block::nothing(window + offset, bytes) } else { None };
        let block = Block::zeroed(bytes).or_else(nothing).ok_or_else(none)?;
        if cfg!(debug_assertions) && !self.dry {
            block.poison(0, bytes);
        }
        space.cursor = offset + footprint(asked).ok_or_else(none)?;
        space.used += asked;
        space.blocks.insert(window + offset, block);
        Ok(window + offset)
    }

    /// Operations that run on it keep the bytes alive.
    pub fn free(&mut self, device: usize, address: Address) -> DriverResult {
        let bytes = self.remove(device, address, false)?;
        self.devices[device].used -= bytes as u64;
        Ok(())
    }

    /// It is that code that has less memory by it.
    pub fn adopt(&mut self, device: usize, address: Address, bytes: usize) -> DriverResult<Address> {
        if address >= BASE {
            return Err(fault::invalid(format!("{address:#x} is an address of a software GPU, not of the host")));
        }
        let first = std::ptr::with_exposed_provenance_mut(address as usize);
        let block = Block::borrowed(first, bytes).ok_or_else(|| fault::invalid("a null pointer"))?;
        let window = window_of(self.first_window + device as u64);
        let space = &mut self.devices[device];
        let none = || fault::exhausted(format!("there are no addresses for {bytes} more bytes"));
        // The address has the pointer's remainder by 256: so both have the same alignment, up to 256.
        let (shift, bytes) = (address % 256, bytes as u64);
        let offset = space.find(window, bytes.checked_add(shift).ok_or_else(none)?).ok_or_else(none)?;
        space.cursor = offset + footprint(bytes + shift).ok_or_else(none)?;
        space.blocks.insert(window + offset + shift, block);
        Ok(window + offset + shift)
    }

    pub fn disown(&mut self, device: usize, address: Address) -> DriverResult {
        self.remove(device, address, true).map(drop)
    }

    /// Returns its size.
    fn remove(&mut self, device: usize, address: Address, adopted: bool) -> DriverResult<usize> {
        let blocks = &mut self.devices[device].blocks;
        match blocks.get(&address).filter(|block| block.is_borrowed() == adopted).map(|block| block.len()) {
            Some(bytes) => Ok((blocks.remove(&address), bytes).1),
            None => {
                let what = if adopted { "adopted memory" } else { "a live allocation" };
                Err(fault::invalid(format!("{address:#x} is not the start of {what} of device {device}")))
            }
        }
    }

    pub fn reserve(&mut self, device: usize, bytes: u64) -> DriverResult<Address> {
        self.devices[device].windows.reserve(bytes, self.dry)
    }

    pub fn map(&mut self, device: usize, address: Address, bytes: usize) -> DriverResult {
        let space = &mut self.devices[device];
        space.windows.check_free(address, bytes)?;
        let (asked, free) = (bytes as u64, space.capacity - space.used);
        fail_if!(asked > free, fault::out_of_memory(asked, free));
        let (block, offset) = space.windows.map(address, bytes)?;
        if cfg!(debug_assertions) && !self.dry {
            block.poison(offset, bytes);
        }
        space.used += asked;
        Ok(())
    }

    /// `busy`: whether a running operation uses the memory; then the bytes stay.
    pub fn unmap(
        &mut self,
        device: usize,
        address: Address,
        bytes: usize,
        busy: impl FnOnce(*mut u8) -> bool,
    ) -> DriverResult {
        let space = &mut self.devices[device];
        if space.windows.unmap(address, bytes, busy)? != Some(Shared::Imported) {
            space.used -= bytes as u64;
        }
        Ok(())
    }

    /// The contents become undefined, so they are not copied.
    pub fn remap(
        &mut self,
        device: usize,
        [from, to]: [Address; 2],
        bytes: usize,
        busy: impl FnOnce(*mut u8) -> bool,
    ) -> DriverResult {
        let windows = &mut self.devices[device].windows;
        fail_if!(!windows.is_mapping(from, bytes), not_mapped(from, bytes));
        if windows.shared(from).is_some() {
            return Err(fault::invalid(format!("the mapping at {from:#x} is for other processes, and does not move")));
        }
        let (block, offset) = windows.map(to, bytes)?;
        if cfg!(debug_assertions) && !self.dry {
            block.poison(offset, bytes);
        }
        windows.unmap(from, bytes, busy).map(drop)
    }

    pub(super) fn windows(&mut self, device: usize) -> &mut Windows {
        &mut self.devices[device].windows
    }

    pub fn host_insert(&mut self, block: Arc<Block>, kind: HostKind) -> *mut u8 {
        let first = block.at(0);
        self.host.insert(first as Address, (block, kind));
        first
    }

    pub fn host_remove(&mut self, ptr: *mut u8, kind: HostKind) -> DriverResult {
        let address = ptr as Address;
        if self.host.get(&address).is_none_or(|(_, have)| *have != kind) {
            return Err(fault::invalid(format!("{address:#x} is not the start of live {kind:?} memory")));
        }
        self.host.remove(&address);
        Ok(())
    }

    /// Translates a range, which must lie inside one live allocation or inside adjacent mappings.
    pub fn resolve(&self, address: Address, bytes: usize) -> DriverResult<Resolved<'_>> {
        let found = if address < BASE {
            self.host.range(..=address).next_back().map(|(start, (block, _))| (Home::Host, start, block))
        } else {
            let window = (address - BASE) >> WINDOW_BITS;
            let device = window.wrapping_sub(self.first_window) as usize;
            let Some(space) = self.devices.get(device) else {
                return Err(fault::peer_not_enabled(format!("{address:#x} is no address of this machine")));
            };
            if space.windows.are_at(address) {
                let found = space.windows.resolve(address, bytes);
                let home = Home::Device(device);
                return found
                    .map(|(block, offset)| Resolved { home, block, offset })
                    .ok_or_else(|| missing(address, bytes));
            }
            space.blocks.range(..=address).next_back().map(|(start, block)| (Home::Device(device), start, block))
        };
        if let Some((home, start, block)) = found {
            let offset = (address - start) as usize;
            if offset <= block.len() && bytes <= block.len() - offset {
                return Ok(Resolved { home, block, offset });
            }
        }
        Err(missing(address, bytes))
    }

    /// The location of an address; an unknown address counts as host memory.
    pub fn side(&self, address: Address) -> Side {
        match self.resolve(address, 0) {
            Ok(Resolved { home: Home::Device(device), .. }) => Side::Device(device),
            _ => Side::Host,
        }
    }

    pub fn check_host(&self, address: Address, bytes: usize) -> DriverResult {
        match self.resolve(address, bytes) {
            _ if bytes == 0 => Ok(()),
            Ok(Resolved { home: Home::Host, .. }) => Ok(()),
            _ => Err(fault::invalid(format!("{bytes} bytes at {address:#x} are not page-locked host memory"))),
        }
    }
}

fn missing(address: Address, bytes: usize) -> Fault {
    fault::invalid(format!("no live allocation covers {bytes} bytes at {address:#x}"))
}

/// Bytes of addresses that an allocation takes: whole units of `ALIGN`, and one more as a gap.
fn footprint(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(ALIGN as u64)?.checked_add(ALIGN as u64)
}

impl Space {
    /// The first hole at or after the cursor, or else after the start of the window.
    fn find(&self, window: u64, bytes: u64) -> Option<u64> {
        let need = footprint(bytes).filter(|need| *need <= WINDOW)?;
        [self.cursor, 0].into_iter().find_map(|from| {
            let mut at = window + from;
            for (start, block) in self.blocks.range(at..) {
                if start - at >= need {
                    break;
                }
                at = (start + footprint(block.len() as u64)?).next_multiple_of(ALIGN as u64);
            }
            (at + need <= window + WINDOW).then_some(at - window)
        })
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/host/memory_tests.rs"]
mod tests;
