//! Mappings of a software GPU that other processes have, too: memory with a descriptor (memfd).

use super::{Pages, Shared, Windows, fault, not_mapped};
use crate::driver::{Address, DriverResult};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

impl Windows {
    pub fn export(&mut self, address: Address, bytes: usize) -> DriverResult<OwnedFd> {
        fail_if!(!self.is_mapping(address, bytes) || self.shared(address).is_some(), not_mapped(address, bytes));
        let memory = Pages::shareable(bytes).map_err(|why| fault::unsupported(format!("no shared memory: {why}")))?;
        self.share(address, bytes, memory.as_fd(), Shared::Exported)?;
        Ok(memory)
    }

    /// It is that process's device that has less memory by it.
    pub fn import(&mut self, address: Address, bytes: usize, memory: BorrowedFd<'_>) -> DriverResult {
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
