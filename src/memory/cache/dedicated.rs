//! Blocks in chunks of their own: memory that other processes have, too, and memory of other code.
//!
//! Such a block is not pooled: it goes back to the driver when its last handle is gone and its last uses have
//! completed. It comes home like every other block, since after a failed scope freed memory may still be in use.

use super::Cache;
use crate::{
    driver::Address,
    error::Result,
    memory::{Block, BlockRef, History, Origin, Region, backing::ChunkKind},
};
use std::sync::Arc;

#[derive(Default)]
pub(super) struct DedicatedChunks {
    out: usize,
    /// Blocks that have come home before their last uses had completed.
    #[allow(clippy::vec_box, reason = "blocks come as boxes")]
    leaving: Vec<Box<Block>>,
}

impl DedicatedChunks {
    fn let_go(&mut self) {
        self.leaving.extract_if(.., |block| block.hazards.history().all_completed()).for_each(|block| block.release());
    }

    /// Memory that is still in use is leaked.
    pub(super) fn end(&mut self) {
        self.leaving.drain(..).for_each(|block| block.release());
    }
}

impl Cache {
    pub(super) fn leave(&mut self, block: Box<Block>) {
        self.dedicated.out = self.dedicated.out.saturating_sub(1);
        if block.region().adopted {
            self.stats.adopted -= block.size() as u64;
        }
        self.dedicated.leaving.push(block);
        self.dedicated.let_go();
    }

    /// Memory of other code, which keeps `keep` until its last use is over.
    ///
    /// # Safety
    /// `bytes` bytes of this device's memory that stay live as long as `keep`, and that nothing else uses.
    #[track_caller]
    pub(crate) unsafe fn adopt(
        &mut self,
        op: &'static str,
        (address, bytes): (Address, usize),
        keep: impl Send + 'static,
    ) -> Result<BlockRef> {
        // A program may adopt the memory of each step.
        self.let_go();
        // SAFETY: the caller's promise; the region ends the adoption before it drops `keep`.
        let at = unsafe { self.handle.driver.adopt(address, bytes) };
        let at = at.map_err(|fault| self.handle.refused(op, fault))?;
        let region = Region::adopted(&self.handle, at, bytes as u64, keep);
        self.stats.adopted += bytes as u64;
        Ok(self.whole(region, (at, bytes), History::default(), true))
    }

    fn whole(&mut self, region: Arc<Region>, at: (Address, usize), history: History, written: bool) -> BlockRef {
        let (handle, owner) = (&self.handle, Some(&self.owner));
        if let Some(watch) = handle.watch() {
            watch.checker.allocated(at.0, at.1, Some(watch.device), written);
        }
        let block = Block::new_free(handle, ChunkKind::Device, owner, &region, Origin::Region, at, history);
        self.dedicated.out += 1;
        BlockRef::activate(block)
    }

    pub(crate) fn let_go(&mut self) {
        if self.dedicated.out > 0 {
            self.collect();
        }
        self.dedicated.let_go();
    }
}

#[cfg(target_os = "linux")]
mod make {
    use super::*;
    use crate::{
        driver::{FaultKind, fault},
        error::Error,
        memory::hazard::Lending,
    };
    use std::os::fd::{BorrowedFd, OwnedFd};

    struct Window {
        region: Arc<Region>,
        at: Address,
        bytes: usize,
    }

    impl Cache {
        /// At least `bytes` bytes with a descriptor, by which other processes map them. The contents are undefined.
        #[track_caller]
        pub(crate) fn exportable(
            &mut self,
            op: &'static str,
            bytes: usize,
            lending: &Arc<Lending>,
        ) -> Result<(BlockRef, OwnedFd)> {
            self.let_go();
            let driver = self.handle.driver.clone();
            let Window { region, at, bytes } = self.window(op, bytes)?;
            // SAFETY: fresh addresses, which no other code has.
            let map = || unsafe { driver.vm_map(at, bytes) };
            let mapped = map().or_else(|fault| match fault.kind {
                FaultKind::OutOfMemory => {
                    self.trim(&|| false);
                    map()
                }
                _ => Err(fault),
            });
            self.handle.check_alloc(op, bytes, mapped)?;
            region.add(at, bytes as u64);
            // SAFETY: mapped just now; no other code knows of it.
            let memory = self.handle.check(op, unsafe { driver.vm_export(at, bytes) })?;
            Ok((self.whole(region, (at, bytes), History::lent_by(lending), false), memory))
        }

        /// The memory of another process, `bytes` bytes with that process's contents.
        #[track_caller]
        pub(crate) fn import(
            &mut self,
            op: &'static str,
            bytes: usize,
            memory: BorrowedFd<'_>,
            lending: &Arc<Lending>,
        ) -> Result<BlockRef> {
            self.let_go();
            let Window { region, at, bytes } = self.window(op, bytes)?;
            // SAFETY: fresh addresses, which no other code has. The exporter has waited for its uses, and begins others
            // only when the memory has come back.
            self.handle.check_alloc(op, bytes, unsafe { self.handle.driver.vm_import(at, bytes, memory) })?;
            region.add(at, bytes as u64);
            Ok(self.whole(region, (at, bytes), History::lent_by(lending), true))
        }

        #[track_caller]
        fn window(&self, op: &'static str, bytes: usize) -> Result<Window> {
            let (handle, driver) = (&self.handle, &self.handle.driver);
            let unsupported = || fault::unsupported("this device has no virtual memory management");
            let unit = handle.check(op, driver.vm_granularity().ok_or_else(unsupported))?;
            let bytes = bytes.checked_next_multiple_of(unit).filter(|bytes| isize::try_from(*bytes).is_ok());
            let Some(bytes) = bytes else {
                return Err(Error::invalid(op, "more bytes than any memory has"));
            };
            let at = handle.check_alloc(op, bytes, driver.vm_reserve(bytes as u64))?;
            Ok(Window { region: Region::window(handle, at..at + bytes as u64), at, bytes })
        }
    }
}
