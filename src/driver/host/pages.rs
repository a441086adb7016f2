//! Address space of the operating system: reserved at once, with memory behind it piece by piece.
//!
//! Mappings that lie side by side must be one piece of memory to a kernel's host kernel, which is handed slices. So what
//! a software GPU maps lies in one range of the process's own addresses, reserved with the window. Where the system
//! cannot do that (or we have not tried it) software GPUs have no virtual memory management.

/// Bytes that mappings are multiples of, as on most GPUs; a multiple of every page size.
pub(super) const GRANULARITY: usize = 2 << 20;

/// Whether ranges can be reserved.
pub(super) const SUPPORTED: bool = cfg!(all(any(target_os = "linux", target_os = "macos"), not(miri)));

#[cfg(all(any(target_os = "linux", target_os = "macos"), not(miri)))]
mod system {
    use std::ptr::{self, NonNull};

    /// Bytes of memory that the computer has.
    pub fn physical() -> Option<u64> {
        // SAFETY: asks, and changes nothing.
        let (pages, bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        u64::try_from(pages).ok()?.checked_mul(u64::try_from(bytes).ok()?)
    }

    /// A range of addresses; given back when dropped.
    pub struct Pages {
        first: NonNull<u8>,
        bytes: usize,
    }

    const NOTHING: libc::c_int = libc::PROT_NONE;
    /// Not promised by the system: a window is larger than the memory that is mapped into it at any time.
    const FRESH: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;

    impl Pages {
        pub fn reserve(bytes: usize) -> Option<Pages> {
            // SAFETY: asks for addresses that nobody has.
            let at = unsafe { libc::mmap(ptr::null_mut(), bytes, NOTHING, FRESH, -1, 0) };
            if at == libc::MAP_FAILED {
                return None;
            }
            Some(Pages { first: NonNull::new(at.cast())?, bytes })
        }

        pub fn first(&self) -> NonNull<u8> {
            self.first
        }

        pub fn commit(&self, offset: usize, bytes: usize) -> bool {
            debug_assert!(offset + bytes <= self.bytes);
            let at = self.first.as_ptr().wrapping_add(offset);
            // SAFETY: within the range, which is ours alone.
            unsafe { libc::mprotect(at.cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) == 0 }
        }

        pub fn decommit(&self, offset: usize, bytes: usize) {
            debug_assert!(offset + bytes <= self.bytes);
            let at = self.first.as_ptr().wrapping_add(offset);
            // If it fails (no room for one more range in the system's table) the pages stay, which harms nothing.
            // SAFETY: within the range, which is ours alone, and nobody has a reference into it, says the caller.
            unsafe { libc::mmap(at.cast(), bytes, NOTHING, FRESH | libc::MAP_FIXED, -1, 0) };
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the range is ours alone, and its last user is gone.
            unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(not(all(any(target_os = "linux", target_os = "macos"), not(miri))))]
mod system {
    use std::ptr::NonNull;

    /// Not known.
    pub fn physical() -> Option<u64> {
        None
    }

    /// There are none.
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
mod tests {
    use super::*;

    #[test]
    fn memory_comes_and_goes_within_a_range() {
        let pages = Pages::reserve(8 * GRANULARITY).unwrap();
        assert!(pages.commit(GRANULARITY, 2 * GRANULARITY));
        // SAFETY: committed above, and nobody else's.
        let all =
            |from: usize, n: usize| unsafe { std::slice::from_raw_parts_mut(pages.first().as_ptr().add(from), n) };
        all(GRANULARITY, 2 * GRANULARITY).fill(7);
        pages.decommit(2 * GRANULARITY, GRANULARITY);
        assert!(all(GRANULARITY, GRANULARITY).iter().all(|&byte| byte == 7), "its neighbour's end harms nothing");
        assert!(pages.commit(2 * GRANULARITY, GRANULARITY));
        assert!(all(2 * GRANULARITY, GRANULARITY).iter().all(|&byte| byte == 0), "it had really gone");
    }

    /// More than this computer has, since nothing is behind it.
    #[test]
    fn addresses_cost_nothing() {
        let pages: Vec<_> = (0..4).map(|_| Pages::reserve(1 << 40).unwrap()).collect();
        assert!(pages[3].commit((1 << 40) - GRANULARITY, GRANULARITY));
    }
}
