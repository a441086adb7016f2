//! Virtual memory of the process for the windows of software GPUs. A host kernel gets slices, so adjacent mappings must
//! be contiguous in the process: each window has one reserved range, and memory is committed piece by piece. On
//! operating systems without this (or where it is untested), software GPUs have no virtual memory management.

/// Every mapping is a multiple of this many bytes, as on most GPUs. It is a multiple of every page size.
pub(super) const GRANULARITY: usize = 2 << 20;

pub(super) const SUPPORTED: bool = cfg!(all(any(target_os = "linux", target_os = "macos"), not(miri)));

#[cfg(all(any(target_os = "linux", target_os = "macos"), not(miri)))]
mod system {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    use std::ptr::{self, NonNull};
    #[cfg(target_os = "linux")]
    use {
        rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create},
        std::{
            io,
            os::fd::{BorrowedFd, OwnedFd},
        },
    };

    pub fn physical() -> Option<u64> {
        // By libc: rustix counts the computer's pages on Linux only. SAFETY: `sysconf` only reads.
        let (pages, bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        u64::try_from(pages).ok()?.checked_mul(u64::try_from(bytes).ok()?)
    }

    /// Its drop releases the addresses.
    pub struct Pages {
        first: NonNull<u8>,
        bytes: usize,
    }

    const NOTHING: ProtFlags = ProtFlags::empty();
    /// `NORESERVE`, since a window is larger than the memory that is ever mapped into it.
    const FRESH: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

    impl Pages {
        pub fn reserve(bytes: usize) -> Option<Pages> {
            // SAFETY: maps new addresses, which no other code uses.
            let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, NOTHING, FRESH) };
            Some(Pages { first: NonNull::new(at.ok()?.cast())?, bytes })
        }

        pub fn first(&self) -> NonNull<u8> {
            self.first
        }

        pub fn commit(&self, offset: usize, bytes: usize) -> bool {
            debug_assert!(offset + bytes <= self.bytes);
            let at = self.first.as_ptr().wrapping_add(offset);
            // SAFETY: within the range, which only this value uses.
            unsafe { mprotect(at.cast(), bytes, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok()
        }

        pub fn decommit(&self, offset: usize, bytes: usize) {
            debug_assert!(offset + bytes <= self.bytes);
            let at = self.first.as_ptr().wrapping_add(offset);
            // If it fails (the system's table of ranges is full), the pages stay committed, which does no harm. SAFETY:
            // within the range, which only this value uses; the caller promises that no reference into it exists.
            let _ = unsafe { mmap_anonymous(at.cast(), bytes, NOTHING, FRESH | MapFlags::FIXED) };
        }
    }

    #[cfg(target_os = "linux")]
    impl Pages {
        pub fn shareable(bytes: usize) -> io::Result<OwnedFd> {
            let memory = memfd_create(c"gpu-pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&memory, bytes as u64)?;
            // Else its receiver could shorten it, which would kill the others at their next access (SIGBUS).
            fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(memory)
        }

        pub fn is_shareable(memory: BorrowedFd<'_>, bytes: usize) -> bool {
            let sealed = fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
            sealed && fstat(memory).is_ok_and(|stat| usize::try_from(stat.st_size) == Ok(bytes))
        }

        /// Puts this memory into a part of the range, instead of what is there.
        pub fn share(&self, offset: usize, bytes: usize, memory: BorrowedFd<'_>) -> io::Result<()> {
            debug_assert!(offset + bytes <= self.bytes);
            let at = self.first.as_ptr().wrapping_add(offset);
            let (rights, how) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            // SAFETY: within the range, which only this value uses; the caller promises: no reference into it exists.
            unsafe { rustix::mm::mmap(at.cast(), bytes, rights, how, memory, 0)? };
            Ok(())
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: only this value uses the range, and it is being dropped.
            let _ = unsafe { munmap(self.first.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(not(all(any(target_os = "linux", target_os = "macos"), not(miri))))]
mod system {
    use std::ptr::NonNull;

    pub fn physical() -> Option<u64> {
        None
    }

    /// Cannot be constructed: this system reserves no ranges.
    pub enum Pages {}

    impl Pages {
        pub fn reserve(_: usize) -> Option<Pages> {
            None
        }

        pub fn first(&self) -> NonNull<u8> {
            match *self {}
        }

        pub fn commit(&self, _: usize, _: usize) -> bool {
            match *self {}
        }

        pub fn decommit(&self, _: usize, _: usize) {
            match *self {}
        }
    }
}

pub(super) use system::{Pages, physical};

#[cfg(all(test, any(target_os = "linux", target_os = "macos"), not(miri)))]
#[path = "../../../tests/unit/driver/host/pages_tests.rs"]
mod tests;
