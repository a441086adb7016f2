//! [`MemorySnapshot`]: a device's memory pool as a value. The cache makes it; users print it, export it, or read its
//! fields.

use super::{
    classes::MemoryClasses,
    site::{CallSite, Holder, holders},
    units::Micros,
};
use crate::memory::stats::MemoryStats;
use std::fmt;

/// The contents of a device's memory pool and, with recording on, its history. It prints with `Display`. With the
/// feature `insight` (a default feature) `memory_viz` writes it for PyTorch's memory viewer, and serde as any data.
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

/// The counters, and the ten call sites that hold most.
impl fmt::Display for MemorySnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}, {} after the pool was built\n{}", self.device, Micros(self.taken_at), self.stats)?;
        let holders = if self.recorded { self.holders() } else { Vec::new() };
        for holder in holders.iter().take(10) {
            write!(f, "\n  {holder}")?;
        }
        if holders.len() > 10 {
            write!(f, "\n  ... and {} more call sites", holders.len() - 10)?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{super::site::site, *};

    /// A short history: two chunks, one of them given back; a block from before the recording, one that came and went,
    /// one that was freed and is pending, one that stays; a refused request.
    pub(crate) fn example() -> MemorySnapshot {
        use EventKind::*;
        const MIB: u64 = 1 << 20;
        let event = |micros, kind, address, bytes, who: Option<CallSite>| {
            let requested = if who.is_some() { bytes - 1 } else { 0 };
            MemoryEvent { micros, kind, address, bytes, requested, stream: 2, site: who }
        };
        let block = |address, bytes, state, site| BlockInfo { address, bytes, state, site, ..BlockInfo::default() };
        let (a, b) = (site("upload", 10), site("Vec<f32>::zeros & co \"quoted\"", 20));
        MemorySnapshot {
            device: 1,
            taken_at: 5000,
            recorded: true,
            stats: MemoryStats { in_use: 5 * MIB, reserved: 8 * MIB, peak_reserved: 40 * MIB, ..Default::default() },
            chunks: vec![ChunkInfo { address: 64 * MIB, bytes: 8 * MIB }],
            blocks: vec![
                block(64 * MIB, MIB, BlockState::Live, None),
                block(65 * MIB, 4 * MIB, BlockState::Live, Some(b.clone())),
                block(69 * MIB, 2 * MIB, BlockState::Pending, None),
                block(71 * MIB, MIB, BlockState::Free, None),
            ],
            events: vec![
                event(100, Mapped, 256 * MIB, 32 * MIB, None),
                event(200, Allocated, 256 * MIB, 16 * MIB, Some(a.clone())),
                event(900, Allocated, 65 * MIB, 4 * MIB, Some(b.clone())),
                event(1000, FreedRemotely, 256 * MIB, 16 * MIB, Some(a.clone())),
                event(1100, Unmapped, 256 * MIB, 32 * MIB, None),
                event(1200, Trimmed, 0, 32 * MIB, None),
                event(1300, OutOfMemory, 0, 1 << 40, Some(a.clone())),
                event(1400, Freed, 69 * MIB, 2 * MIB, Some(a)),
            ],
            dropped_events: 3,
        }
    }

    #[test]
    fn in_words() {
        let text = example().to_string();
        assert!(text.starts_with("device 1, 5.00 ms after the pool was built\nin use          5.0 MiB"), "{text}");
        let holders = "\n     4.0 MiB in 1 block      Vec<f32>::zeros & co \"quoted\" at src/train.rs:20:9\
                       \n     1.0 MiB in 1 block      call site not recorded";
        assert!(text.ends_with(holders), "{text}");
    }
}
