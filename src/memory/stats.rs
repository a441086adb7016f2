//! A memory pool's counters: those for users, and the words in which the owner publishes them to other threads.

use super::Bytes;
use std::fmt;

/// Counters of a device's memory pool, from [`Device::stats`](crate::Device::stats). The `Display` form is for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes in live buffers, rounded up to their classes.
    pub in_use: u64,
    /// Maximum of `in_use` so far.
    pub peak: u64,
    /// Bytes that live buffers asked for. The difference to `in_use` is lost to rounding.
    pub requested: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Maximum of `reserved` so far.
    pub peak_reserved: u64,
    /// Bytes of freed memory that queued work still uses: no other stream gets them without a wait. Always 0 in
    /// [`GpuPool::memory_stats`](crate::GpuPool::memory_stats), because counting them means looking at every block.
    pub pending: u64,
    /// Allocations served.
    pub allocations: u64,
    /// Buffers that were dropped on a thread other than the device's own.
    pub remote_frees: u64,
    /// Allocations that got memory which another stream has used last.
    pub steals: u64,
    /// Steals for which the new stream has to wait. The other steals found memory that was idle or already ordered.
    pub waits: u64,
    /// Allocations that no free list served: the pool had to merge, map, flush or wait. Constant in the steady state.
    pub ladder: u64,
    /// Slabs: pieces of memory that are cut into blocks of one size.
    pub slabs: u64,
    /// Driver calls made for allocations. Constant in the steady state.
    pub driver_calls: u64,
    /// Bytes of other code's memory in live buffers, from [`Device::adopt`](crate::Device::adopt). Counted only here.
    pub adopted: u64,
}

macro_rules! as_words {
    ($($field:ident)+) => {
        /// Number of words that [`MemoryStats::to_words`] returns.
        pub(super) const MIRRORED: usize = [$(stringify!($field)),+].len();

        impl MemoryStats {
            pub(super) fn to_words(self) -> [u64; MIRRORED] {
                let MemoryStats { $($field),+ } = self;
                [$($field),+]
            }

            pub(crate) fn from_words(words: [u64; MIRRORED]) -> Self {
                let [$($field),+] = words;
                MemoryStats { $($field),+ }
            }
        }
    };
}
as_words! {
    in_use peak requested reserved peak_reserved pending allocations remote_frees steals waits ladder slabs driver_calls
    adopted
}

impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allocations, remote_frees, steals, waits, ladder, slabs, driver_calls, .. } = self;
        writeln!(
            f,
            "in use       {:>10}, asked for {}, at most {}",
            Bytes(self.in_use),
            Bytes(self.requested),
            Bytes(self.peak)
        )?;
        let at_most = Bytes(self.peak_reserved);
        writeln!(f, "reserved     {:>10}, at most {at_most}; slabs: {slabs}", Bytes(self.reserved))?;
        writeln!(f, "pending      {:>10} freed, but still used by queued work", Bytes(self.pending))?;
        writeln!(f, "allocations  {allocations:>10}, beyond the own lists: {ladder}; driver calls: {driver_calls}")?;
        writeln!(f, "other stream {steals:>10} allocations, with a wait: {waits}")?;
        write!(f, "other thread {remote_frees:>10} frees")?;
        if self.adopted > 0 { write!(f, "\nadopted      {:>10} of other code", Bytes(self.adopted)) } else { Ok(()) }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/memory/stats_tests.rs"]
mod tests;
