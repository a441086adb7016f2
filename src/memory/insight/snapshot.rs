//! [`MemorySnapshot`]: a device's memory pool as a value.

use super::{CallSite, Holder, classes::MemoryClasses, site::holders, units::Micros};
use crate::memory::stats::MemoryStats;

/// The contents of a device's memory pool and, with recording on, its history. `Display` writes the counters, and the
/// ten call sites that hold most. With the feature `insight` (a default feature) `memory_viz` writes it for PyTorch's
/// memory viewer, and serde as any data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct MemorySnapshot {
    /// The device's ordinal in the pool.
    pub device: usize,
    /// Time of the snapshot, in microseconds since the pool was built.
    pub taken_at: u64,
    /// Whether recording was on. Without it there are no call sites and no events.
    pub recorded: bool,
    /// The pool's counters.
    pub stats: MemoryStats,
    /// Memory from the driver.
    pub chunks: Vec<ChunkInfo>,
    /// The parts of the chunks.
    pub blocks: Vec<BlockInfo>,
    /// The recent past, oldest first.
    pub events: Vec<MemoryEvent>,
    /// Number of older events that were dropped.
    pub dropped_events: u64,
}

/// A piece of memory that the driver gave in one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ChunkInfo {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

/// A piece of a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct BlockInfo {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// Bytes that the holder asked for; 0 if the block is not live, or unknown.
    pub requested: u64,
    /// Whether it is in use.
    pub state: BlockState,
    /// The block size of its slab. None for a large block.
    pub class: Option<u64>,
    /// The stream that it was last handed out for.
    pub stream: Option<u64>,
    /// The call that asked for it.
    pub site: Option<CallSite>,
    /// When it was handed out, in microseconds since the pool was built.
    pub since: Option<u64>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum BlockState {
    /// A buffer holds it.
    Live,
    /// Free, and no queued work uses it.
    #[default]
    Free,
    /// Freed, but queued work still uses it.
    Pending,
}

/// Something that happened in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MemoryEvent {
    /// When the device's own thread did or learned it, in microseconds since the pool was built.
    pub micros: u64,
    /// The event.
    pub kind: EventKind,
    /// Address; 0 for events without one.
    pub address: u64,
    /// Size.
    pub bytes: u64,
    /// Bytes that the block's holder asked for; 0 for chunks.
    pub requested: u64,
    /// The stream that the block was handed out for; 0 for chunks.
    pub stream: u64,
    /// The call that asked for the memory; for a free, too, the call that had allocated it.
    pub site: Option<CallSite>,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EventKind {
    /// A block was handed out.
    Allocated,
    /// A block was dropped on the device's own thread.
    Freed,
    /// A block was dropped on another thread, and the device's own thread has learned of it.
    FreedRemotely,
    /// A chunk came from the driver.
    Mapped,
    /// A chunk went back to the driver.
    Unmapped,
    /// A request for `bytes` was refused.
    OutOfMemory,
    /// A trim has given back `bytes`.
    Trimmed,
}

impl MemorySnapshot {
    /// Live blocks by call site, the most bytes first.
    pub fn holders(&self) -> Vec<Holder> {
        let live = self.blocks.iter().filter(|block| block.state == BlockState::Live);
        holders(live.map(|block| (block.site.clone(), block.bytes)))
    }

    /// Blocks by size class.
    pub fn classes(&self) -> MemoryClasses {
        MemoryClasses::of(&self.blocks)
    }
}

display_as!(MemorySnapshot, |self, f| {
    write!(f, "device {}, {} after the pool was built\n{}", self.device, Micros(self.taken_at), self.stats)?;
    let holders = if self.recorded { self.holders() } else { Vec::new() };
    for holder in holders.iter().take(10) {
        write!(f, "\n  {holder}")?;
    }
    if holders.len() > 10 {
        write!(f, "\n  ... and {} more call sites", holders.len() - 10)?;
    }
    Ok(())
});

#[cfg(test)]
#[path = "../../../tests/unit/memory/insight/snapshot_tests.rs"]
pub(crate) mod tests;
