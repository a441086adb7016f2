//! Mappings of a software GPU that other processes have, too: memory with a descriptor (memfd).

use super::{Memory, Pages, Shared, Windows, fault, not_mapped};
use crate::driver::{Address, DriverResult};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

impl Memory {
    pub fn export(&mut self, device: usize, address: Address, bytes: usize) -> DriverResult<OwnedFd> {
        self.windows(device).export(address, bytes)
    }

    /// It is that process's device that has less memory by it.
    pub fn import(&mut self, device: usize, address: Address, bytes: usize, memory: BorrowedFd<'_>) -> DriverResult {
        self.windows(device).import(address, bytes, memory)
    }
}

impl Windows {
    fn export(&mut self, address: Address, bytes: usize) -> DriverResult<OwnedFd> {
        fail_if!(!self.is_mapping(address, bytes) || self.shared(address).is_some(), not_mapped(address, bytes));
        let memory = Pages::shareable(bytes).map_err(|why| fault::unsupported(format!("no shared memory: {why}")))?;
        self.share(address, bytes, memory.as_fd(), Shared::Exported)?;
        Ok(memory)
    }

    fn import(&mut self, address: Address, bytes: usize, memory: BorrowedFd<'_>) -> DriverResult {
        self.check_free(address, bytes)?;
        if !Pages::is_shareable(memory, bytes) {
            return Err(fault::invalid(format!("the descriptor is not of {bytes} bytes of a software GPU")));
        }
        self.map(address, bytes)?;
        self.share(address, bytes, memory, Shared::Imported).inspect_err(|_| {
            let _ = self.unmap(address, bytes, |_| false);
        })
    }
}
