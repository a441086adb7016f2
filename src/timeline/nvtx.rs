//! Ranges for NVIDIA's tools, in the rows of host threads: where the timeline has slices, whether or not it is written.
//!
//! cudarc opens NVIDIA's library when the first range begins. Without it or the feature `nvtx`, a range is nothing.

#[cfg(feature = "nvtx")]
mod found {
    use once_cell::sync::Lazy;

    pub(crate) type Range = Option<cudarc::nvtx::Range>;

    static FOUND: Lazy<bool> = Lazy::new(|| {
        // SAFETY: looking for a library runs its initialisers; it is NVIDIA's, found by its name as the driver is.
        unsafe { cudarc::nvtx::sys::is_culib_present() }
    });

    pub(crate) fn range(name: &'static str) -> Range {
        FOUND.then(|| cudarc::nvtx::scoped_range(name))
    }
}

#[cfg(not(feature = "nvtx"))]
mod found {
    #[derive(Clone, Copy)]
    pub(crate) struct Range;

    #[inline(always)]
    pub(crate) fn range(_name: &'static str) -> Range {
        Range
    }
}

pub(crate) use found::{Range, range};
