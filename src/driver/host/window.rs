//! Virtual memory of one device: windows of reserved addresses, and the mappings in them.

use super::{Block, Pages, fault, pages::GRANULARITY};
use crate::driver::{Address, DriverResult, Fault};
#[cfg(all(target_os = "linux", not(miri)))]
use std::os::fd::BorrowedFd;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

pub(super) struct Windows {
    space: Range<Address>,
    cursor: Address,
    by_address: BTreeMap<Address, Window>,
}

struct Window {
    bytes: u64,
    /// With or without memory. Running operations keep it alive.
    block: Arc<Block>,
    /// Bytes by first address.
    mapped: BTreeMap<Address, usize>,
    shared: BTreeMap<Address, Shared>,
}

/// Which process has allocated a shared mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shared {
    #[cfg_attr(not(all(target_os = "linux", not(miri))), allow(dead_code, reason = "memory is exported only there"))]
    Exported,
    Imported,
}

impl Windows {
    pub fn new(space: Range<Address>) -> Self {
        Windows { cursor: space.start, space, by_address: BTreeMap::new() }
    }

    pub fn are_at(&self, address: Address) -> bool {
        self.space.contains(&address)
    }

    pub fn reserve(&mut self, bytes: u64, dry: bool) -> DriverResult<Address> {
        check_multiple("bytes", bytes)?;
        fail_if!(bytes == 0, fault::invalid("0 bytes asked for"));
        let none = || fault::out_of_memory(bytes, 0);
        let at = self.find(bytes).ok_or_else(none)?;
        let length = usize::try_from(bytes).map_err(|_| none())?;
        let nothing = || if dry { Block::nothing(at, length) } else { None };
        let block = Pages::reserve(length).map(|pages| Block::reserved(pages, length)).or_else(nothing);
        let block = block.ok_or_else(none)?;
        self.cursor = at + bytes;
        self.by_address.insert(at, Window { bytes, block, mapped: BTreeMap::new(), shared: BTreeMap::new() });
        Ok(at)
    }

    fn find(&self, bytes: u64) -> Option<Address> {
        [self.cursor, self.space.start].into_iter().find_map(|from| {
            let mut at = from;
            let before = self.by_address.range(..from).next_back();
            for (start, window) in before.into_iter().chain(self.by_address.range(from..)) {
                if *start >= at && start - at >= bytes {
                    break;
                }
                // A gap of one unit between windows, so that an address past the end of a window finds nothing.
                at = at.max(start + window.bytes + GRANULARITY as u64);
            }
            (at.checked_add(bytes)? <= self.space.end).then_some(at)
        })
    }

    pub fn release(&mut self, address: Address, bytes: u64) -> DriverResult {
        match self.by_address.get(&address) {
            Some(window) if window.bytes == bytes && window.mapped.is_empty() => {
                self.by_address.remove(&address);
                Ok(())
            }
            Some(window) if window.bytes == bytes => {
                Err(fault::invalid(format!("something is mapped in the window at {address:#x}")))
            }
            _ => Err(fault::invalid(format!("no window of {bytes} bytes was reserved at {address:#x}"))),
        }
    }

    fn around(&mut self, address: Address, bytes: usize) -> DriverResult<(Address, &mut Window)> {
        let found = self.by_address.range_mut(..=address).next_back();
        let found = found.map(|(start, window)| (*start, window));
        found
            .filter(|(start, window)| {
                let end = (address - start).checked_add(bytes as u64);
                end.is_some_and(|end| end <= window.bytes)
            })
            .ok_or_else(|| fault::invalid(format!("no window was reserved for {bytes} bytes at {address:#x}")))
    }

    pub fn check_free(&mut self, address: Address, bytes: usize) -> DriverResult {
        check_multiple("address", address)?;
        check_multiple("bytes", bytes as u64)?;
        fail_if!(bytes == 0, fault::invalid("0 bytes asked for"));
        let (_, window) = self.around(address, bytes)?;
        match window.mapped.range(..address + bytes as u64).next_back() {
            Some((start, have)) if start + *have as u64 > address => {
                Err(fault::invalid(format!("something is mapped at {:#x} already", (*start).max(address))))
            }
            _ => Ok(()),
        }
    }

    pub fn map(&mut self, address: Address, bytes: usize) -> DriverResult<(Arc<Block>, usize)> {
        self.check_free(address, bytes)?;
        let (start, window) = self.around(address, bytes)?;
        let offset = (address - start) as usize;
        fail_if!(!window.block.commit(offset, bytes), fault::out_of_memory(bytes as u64, 0));
        window.mapped.insert(address, bytes);
        Ok((window.block.clone(), offset))
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    pub fn share(&mut self, address: Address, bytes: usize, memory: BorrowedFd<'_>, how: Shared) -> DriverResult {
        let (start, window) = self.around(address, bytes)?;
        let Some(pages) = window.block.pages() else {
            return Err(fault::unsupported("a dry machine has no memory to share"));
        };
        pages
            .share((address - start) as usize, bytes, memory)
            .map_err(|why| fault::unsupported(format!("shared memory could not be mapped: {why}")))?;
        window.shared.insert(address, how);
        Ok(())
    }

    /// `busy`: whether a running operation uses the memory; then it stays committed until another mapping replaces it.
    /// Returns how it was shared.
    pub fn unmap(
        &mut self,
        address: Address,
        bytes: usize,
        busy: impl FnOnce(*mut u8) -> bool,
    ) -> DriverResult<Option<Shared>> {
        let (start, window) = self.around(address, bytes)?;
        fail_if!(window.mapped.get(&address) != Some(&bytes), not_mapped(address, bytes));
        window.mapped.remove(&address);
        let offset = (address - start) as usize;
        let shared = window.shared.remove(&address);
        // What is shared goes in any case: a later mapping must not be another process's memory.
        if shared.is_some() || !busy(window.block.at(offset)) {
            window.block.decommit(offset, bytes);
        }
        Ok(shared)
    }

    pub fn shared(&self, address: Address) -> Option<Shared> {
        self.by_address.range(..=address).next_back()?.1.shared.get(&address).copied()
    }

    pub fn is_mapping(&self, address: Address, bytes: usize) -> bool {
        let window = self.by_address.range(..=address).next_back();
        window.is_some_and(|(_, window)| window.mapped.get(&address) == Some(&bytes))
    }

    pub fn resolve(&self, address: Address, bytes: usize) -> Option<(&Arc<Block>, usize)> {
        let (start, window) = self.by_address.range(..=address).next_back()?;
        let end = address.checked_add(bytes as u64)?;
        let (first, _) = window.mapped.range(..=address).next_back()?;
        let mut covered = *first;
        for (at, bytes) in window.mapped.range(first..) {
            if *at != covered || covered >= end {
                break;
            }
            covered += *bytes as u64;
        }
        (end <= covered).then_some((&window.block, (address - start) as usize))
    }
}

pub(super) fn not_mapped(address: Address, bytes: usize) -> Fault {
    fault::invalid(format!("{bytes} bytes at {address:#x} are not what was mapped there"))
}

fn check_multiple(what: &str, n: u64) -> DriverResult {
    let wrong = || format!("{what}: {n:#x} is not a multiple of the granularity, {GRANULARITY:#x}");
    fail_if!(!n.is_multiple_of(GRANULARITY as u64), fault::invalid(wrong()));
    Ok(())
}

#[cfg(all(test, any(target_os = "linux", target_os = "macos"), not(miri)))]
#[path = "../../../tests/unit/driver/host/window_tests.rs"]
mod tests;
