//! The backing memory of software GPUs: one [`Block`] per allocation or reserved window.
//!
//! `memory` and `window` make blocks; running operations hold them, so the bytes outlive their table entry.

use super::Pages;
use crate::driver::Address;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ops::RangeInclusive,
    ptr::{self, NonNull},
    sync::Arc,
};

/// Alignment of device allocations (CUDA's for allocations from 64 KiB on) and of page-locked memory.
pub(super) const ALIGN: usize = 4096;

/// Fills the first [`POISON_LIMIT`] bytes of fresh device memory in debug builds, so that a program does not rely on
/// zeros. The rest stays untouched, so that a large chunk is not committed.
const POISON: u8 = 0xCB;
const POISON_LIMIT: usize = 1 << 20;

/// Sizes for which an allocation has pages of its own: the allocator keeps freed memory of these sizes, once for each
/// thread, so a process that makes pool after pool would grow by hundreds of megabytes.
const OWN_PAGES: RangeInclusive<usize> = 1 << 20..=64 << 20;

/// Backing memory of one allocation or window. It lives until its table entry and the last running operation are gone.
pub(super) struct Block {
    raw: Raw,
    first: NonNull<u8>,
    bytes: usize,
}

enum Raw {
    Allocated(NonNull<u8>, Layout),
    /// Pages of its own: all of them have memory, or, in a window, its mapped parts.
    Reserved(Pages),
    Borrowed,
    Nothing,
}

// SAFETY: a block is plain memory. `access` orders the accesses of operations; the driver's users order operations and
// host accesses.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Zeroed memory, committed lazily. Aligned by hand: with a small alignment the allocator takes untouched pages.
    pub fn zeroed(bytes: usize) -> Option<Arc<Block>> {
        let own = || Pages::reserve(bytes).filter(|pages| pages.commit(0, bytes));
        if let Some(pages) = OWN_PAGES.contains(&bytes).then(own).flatten() {
            return Some(Block::reserved(pages, bytes));
        }
        let layout = Layout::from_size_align(bytes.checked_add(ALIGN)?, 16).ok()?;
        // SAFETY: the size is not zero.
        let raw = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let pad = raw.as_ptr().align_offset(ALIGN);
        // SAFETY: `pad < ALIGN`, and the allocation is `ALIGN` larger than asked for.
        let first = unsafe { raw.add(pad) };
        Some(Arc::new(Block { raw: Raw::Allocated(raw, layout), first, bytes }))
    }

    /// Addresses without memory, for sizes of a dry machine that this computer refuses to allocate. They lie in the
    /// device's window, so no other code uses them.
    pub fn nothing(address: Address, bytes: usize) -> Option<Arc<Block>> {
        let first = NonNull::new(ptr::without_provenance_mut(address as usize))?;
        Some(Arc::new(Block { raw: Raw::Nothing, first, bytes }))
    }

    /// Host memory of other code, which lives as long as the block.
    pub fn borrowed(first: *mut u8, bytes: usize) -> Option<Arc<Block>> {
        Some(Arc::new(Block { raw: Raw::Borrowed, first: NonNull::new(first)?, bytes }))
    }

    pub fn is_borrowed(&self) -> bool {
        matches!(self.raw, Raw::Borrowed)
    }

    pub fn reserved(pages: Pages, bytes: usize) -> Arc<Block> {
        Arc::new(Block { first: pages.first(), raw: Raw::Reserved(pages), bytes })
    }

    /// False if there is not enough memory.
    pub fn commit(&self, offset: usize, bytes: usize) -> bool {
        if let Raw::Reserved(pages) = &self.raw { pages.commit(offset, bytes) } else { true }
    }

    /// No operation uses it.
    pub fn decommit(&self, offset: usize, bytes: usize) {
        if let Raw::Reserved(pages) = &self.raw {
            pages.decommit(offset, bytes);
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    pub fn pages(&self) -> Option<&Pages> {
        if let Raw::Reserved(pages) = &self.raw { Some(pages) } else { None }
    }

    pub fn is_real(&self) -> bool {
        !matches!(self.raw, Raw::Nothing)
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.first.as_ptr().wrapping_add(offset)
    }

    pub fn poison(&self, offset: usize, bytes: usize) {
        // SAFETY: the range has memory, and no operation uses it yet.
        unsafe { self.at(offset).write_bytes(POISON, bytes.min(POISON_LIMIT)) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Raw::Allocated(raw, layout) = self.raw {
            // SAFETY: it came from `alloc_zeroed` with this layout.
            unsafe { dealloc(raw.as_ptr(), layout) }
        }
    }
}
