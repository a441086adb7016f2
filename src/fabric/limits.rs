//! The limits between the algorithms: up to which size each one is the fastest, and how many blocks its kernels have.
//!
//! `collective/choose.rs` and the algorithms read them. They come from a [`table`] for machines that were measured
//! with care; else `builder/measure.rs` measures the devices when the pool is built; else, and for all that was not
//! measured, they are the defaults, which were best on H200s. Software GPUs have the defaults: their results must not
//! depend on time.
//!
//! Invariant: **no measured number decides over bits.** An LL kernel and a kernel with barriers add up in one order,
//! whatever their blocks. A ring adds up in another order, so the size from which on there is a ring comes from the
//! table or is the default, and one call gives the same bits in every run.

pub(crate) mod table;
#[cfg(test)]
mod tests;
pub(crate) mod traffic;

use super::layout::{BLOCKS, LL_BYTES, RING_BLOCKS, eager_bytes, inbox_bytes, ll_bytes_per_peer};
use crate::memory::handle::DeviceHandle;
use std::{fmt, str::FromStr, sync::Arc};

/// Where a pool's collectives have their limits from: up to which size they go as packets, how many blocks kernels
/// have. What is measured is GPUs that have access to each other's memory; others have the defaults. For
/// [`Builder::tune`](crate::Builder::tune).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tune {
    /// A table, where the crate has one for these GPUs; else they are measured.
    #[default]
    Auto,
    /// The defaults, whatever the machine.
    Off,
    /// A table, where the crate has one for these GPUs; else the defaults.
    Table,
    /// GPUs are measured when the pool is built, for up to 100 ms, even where there is a table.
    Measure,
}

impl FromStr for Tune {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Tune::Auto),
            "off" => Ok(Tune::Off),
            "table" => Ok(Tune::Table),
            "measure" => Ok(Tune::Measure),
            _ => Err(format!("{name:?} is none of auto, off, table and measure")),
        }
    }
}

/// The limits for one number of members. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Largest message per peer of the LL algorithm, where packets have room for it.
    pub ll: usize,
    /// Most blocks of an LL kernel.
    pub ll_blocks: u32,
    /// Largest message per peer of a sum of floats that goes in one trip, where the receivers' inboxes have room.
    pub inbox: usize,
    /// The same limit for all-reduce and reduce, as `eager_whole`.
    pub inbox_whole: usize,
    /// Most blocks of such a kernel.
    pub inbox_blocks: u32,
    /// Largest buffer of a sum of floats that goes through slots, piece by piece.
    pub slots: usize,
    /// Smallest all-reduce that goes through slots in a graph, where copy engines do not go.
    pub slots_held: usize,
    /// Most blocks of such a kernel.
    pub slots_blocks: u32,
    /// Smallest buffer of an `all_reduce_norm` whose members read each other's rows where they are, instead of sending
    /// them through slots.
    pub norm_pull: usize,
    /// Largest message per peer of the eager algorithm, where its receivers have room for it.
    pub eager: usize,
    /// The same limit for all-reduce, reduce and broadcast: each peer gets the whole buffer, so the total traffic is
    /// larger than with reduce-scatter.
    pub eager_whole: usize,
    /// An eager kernel has one block for this many bytes, and at most `blocks`.
    pub eager_per_block: usize,
    /// Smallest sum for a ring kernel.
    pub ring: usize,
    /// Most blocks of a ring kernel.
    pub ring_blocks: u32,
    /// Smallest sum that is exchanged by copy engines.
    pub exchange_ce: usize,
    /// The same limit for reduce-scatter. It sends half as much, and nothing while the last sums are made.
    pub exchange_ce_parts: usize,
    /// Smallest all-reduce that is exchanged by kernels.
    pub exchange: usize,
    /// Most blocks of such a kernel.
    pub exchange_blocks: u32,
    /// Smallest buffer that copy engines move, where nothing is added up.
    pub ce: usize,
    /// Smallest sum that is exchanged by copy engines when it overlaps with other work. Copy engines may be slower, but
    /// leave the multiprocessors to that work.
    pub overlapped: usize,
    /// Most blocks of a kernel that overlaps with other work.
    pub overlapped_blocks: u32,
    /// A fused kernel has one block for this many bytes.
    pub per_block: usize,
    /// Most blocks of a fused kernel. More do not make a link faster, and leave less to other work.
    pub blocks: u32,
    /// A part of at least this many bytes is large.
    pub large: usize,
    /// Most blocks of a fused kernel that adds up large parts.
    pub large_blocks: u32,
    /// Most blocks of a fused kernel that relays large parts of a broadcast.
    pub relay_blocks: u32,
    /// All-gather parts of at least this many bytes have up to `allgather_blocks` blocks.
    pub allgather: usize,
    /// Most blocks of an all-gather kernel with parts of `allgather` bytes.
    pub allgather_blocks: u32,
}

impl Limits {
    /// The limits that were best on H200s (`benches/results`; the ring on 8 of them only as a prototype), for any
    /// number of members.
    pub(crate) fn default_of(members: usize) -> Limits {
        let others = members.saturating_sub(1).max(1);
        Limits {
            ll: (LL_BYTES / others).min(ll_bytes_per_peer(members)),
            ll_blocks: BLOCKS,
            inbox: inbox_bytes(others + 1),
            // More than two: a model, not measured.
            inbox_whole: match members {
                0..=2 => inbox_bytes(others + 1),
                _ => inbox_bytes(members).min(traffic::most_in_one_trip(members)),
            },
            inbox_blocks: BLOCKS,
            // From a prototype on two H200s, in graphs: 4 MB in 16.6 us, by one kernel with barriers 17.3; 16 MB in
            // 56.8 and 54.3.
            // More than two: up to where the model is faster than what was measured of other ways (`traffic_tests`).
            slots: if members > 4 { 16 << 20 } else { 8 << 20 },
            // On two H200s, in graphs: 256 MB in 779 us, by one kernel with barriers 796; 1 GB in 3036 and 3167; 64 MB
            // in 209 and 203.
            slots_held: if members == 2 { 128 << 20 } else { usize::MAX },
            slots_blocks: BLOCKS,
            // Two H200s, bf16 rows of 4096, in graphs: 2 MB take 11.0 us in one trip and 12.8 by reads; 8 MB take 38.9
            // through slots and 31.7 by reads. More than two: an estimate, neither measured nor from the model.
            norm_pull: if members == 2 { 2 << 20 } else { 16 << 20 },
            eager: eager_bytes(members),
            // All-reduces on 4 H200s: 256 KB take 9.5 us eagerly and 10.1 otherwise, 512 KB take 11.6 and 10.8.
            eager_whole: eager_bytes(members).min((1 << 20) / others),
            // A pack of 16 bytes for each thread, so that all are on their way at once.
            eager_per_block: 512 * 16,
            // 32 MB on 4 H200s: 156 us, slices with barriers 173. For fewer bytes the hops cost more than the stores
            // gain. Between two, every byte crosses the link once with each algorithm.
            ring: if members > 2 { 32 << 20 } else { usize::MAX },
            ring_blocks: RING_BLOCKS as u32,
            // (A ring of copies was nowhere faster: 1 GB on 4 H200s in 5008 us, by kernels 4536.)
            // Best between two H200s. Four add up 64 MB in 428 us by copies, and in 298 by a ring of kernels.
            exchange_ce: if members == 2 { 64 << 20 } else { usize::MAX },
            exchange_ce_parts: if members == 2 { 512 << 20 } else { usize::MAX },
            // On 4 H200s: 16 MB in 85 us, by a ring 89; 8 MB in 49, by slices with barriers 51; 256 MB of half types in
            // 1213, by slices 1349. (A reduce-scatter gains nothing: 256 MB took 682 us, and 656 by slices.)
            exchange: if members > 2 { 8 << 20 } else { usize::MAX },
            exchange_blocks: BLOCKS,
            ce: if members == 2 { 128 << 20 } else { usize::MAX },
            overlapped: if members == 2 { 8 << 20 } else { usize::MAX },
            overlapped_blocks: 16,
            per_block: 16 << 10,
            blocks: 64,
            // A kernel that reads from several peers and writes to several is faster with few blocks. On 4 H200s, parts
            // of 2 MB: all-reduce 50 us with 16 blocks, 52 with 64; reduce-scatter 30 and 33; broadcast 40 with 32
            // blocks and 41 with 64, and parts of 21 MB 209 and 238.
            large: if members > 2 { 2 << 20 } else { 8 << 20 },
            large_blocks: if members > 2 { 16 } else { 64 },
            relay_blocks: if members > 2 { 32 } else { 64 },
            allgather: 8 << 20,
            allgather_blocks: 64,
        }
    }

    /// The limits for a collective that overlaps with other work. Two kinds keep theirs: kernels of one trip, which are
    /// over in microseconds, and kernels that go through the host's memory, whose delays few blocks do not cover.
    pub(crate) fn overlapping(self) -> Limits {
        let few = |most: u32| most.min(self.overlapped_blocks);
        Limits {
            exchange_ce: self.exchange_ce.min(self.overlapped),
            blocks: few(self.blocks),
            large_blocks: few(self.large_blocks),
            ring_blocks: few(self.ring_blocks),
            exchange_blocks: few(self.exchange_blocks),
            slots_blocks: few(self.slots_blocks),
            allgather_blocks: few(self.allgather_blocks),
            ..self
        }
    }

    /// The limits with at most so many blocks. All blocks of a kernel that waits for its peers' must be on the device
    /// at once, and one multiprocessor has room for at least one of them.
    pub(crate) fn capped(self, multiprocessors: u32) -> Limits {
        let most = multiprocessors.clamp(1, BLOCKS);
        let cap = |blocks: u32| blocks.clamp(1, most);
        Limits {
            ll_blocks: cap(self.ll_blocks),
            inbox_blocks: cap(self.inbox_blocks),
            slots_blocks: cap(self.slots_blocks),
            ring_blocks: cap(self.ring_blocks),
            exchange_blocks: cap(self.exchange_blocks),
            overlapped_blocks: cap(self.overlapped_blocks),
            blocks: cap(self.blocks),
            large_blocks: cap(self.large_blocks),
            relay_blocks: cap(self.relay_blocks),
            allgather_blocks: cap(self.allgather_blocks),
            ..self
        }
    }
}

/// Multiprocessors of the smallest device. Devices that share a GPU have its multiprocessors in equal parts: then
/// kernels of all of them fit on the GPU at once, one block on a multiprocessor. A software GPU counts as large, since
/// its kernels wait for no others.
pub(crate) fn multiprocessors(handles: &[Arc<DeviceHandle>]) -> u32 {
    let hardware = handles.iter().filter(|handle| handle.driver.info().compute_capability != (0, 0));
    part(hardware.map(|handle| (handle.driver.info().multiprocessors, handle.sharers)))
}

fn part(devices: impl Iterator<Item = (u32, usize)>) -> u32 {
    devices.map(|(multiprocessors, sharers)| multiprocessors / sharers as u32).min().unwrap_or(u32::MAX)
}

/// A pool's limits.
#[derive(Clone, Debug)]
pub(crate) struct Tuned {
    /// By the number of members.
    limits: Vec<Limits>,
    /// Where they come from, in words.
    pub origin: String,
}

impl Tuned {
    /// The limits of a pool of these devices, for any number of members.
    pub(crate) fn new(handles: &[Arc<DeviceHandle>], origin: impl Into<String>, of: impl Fn(usize) -> Limits) -> Tuned {
        let least = multiprocessors(handles);
        Tuned { limits: (0..=handles.len()).map(|members| of(members).capped(least)).collect(), origin: origin.into() }
    }

    /// The limits for so many members.
    pub(crate) fn of(&self, members: usize) -> &Limits {
        &self.limits[members]
    }

    /// The limits for so many members, in words.
    pub(crate) fn describe(&self, members: usize) -> String {
        // They end with the limits of inboxes, which were measured between two devices only.
        let model = if members > 2 { " (by a model, not measured)" } else { "" };
        format!("{}: {}{model}", self.origin, self.of(members))
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits {
            ll,
            inbox_whole,
            slots,
            slots_held,
            eager,
            eager_whole,
            ring,
            exchange_ce,
            exchange,
            ce,
            overlapped,
            per_block,
            blocks,
            large,
            large_blocks,
            ..
        } = *self;
        write!(f, "pushed up to {}, ", Bytes(ll))?;
        if eager_whole > ll {
            write!(f, "sent eagerly up to {}, ", Bytes(eager_whole))?;
        }
        if eager > eager_whole {
            write!(f, "by parts up to {}, ", Bytes(eager))?;
        }
        let [per_block, large] = [per_block, large].map(Bytes);
        let from = [
            ("sums exchanged by copies", exchange_ce),
            ("sums exchanged by kernels", exchange),
            ("beside other work", overlapped),
            ("moved by copies", ce),
            ("a ring of kernels", ring),
        ];
        for (what, bytes) in from.into_iter().filter(|(_, bytes)| *bytes < usize::MAX) {
            write!(f, "{what} from {} on, ", Bytes(bytes))?;
        }
        write!(f, "a block for {per_block}, at most {blocks}")?;
        if large_blocks != blocks {
            write!(f, ", {large_blocks} for sums in parts of {large}")?;
        }
        if inbox_whole > 0 {
            write!(f, "; sums of floats as data that are flags up to {}", Bytes(inbox_whole))?;
        }
        if slots > inbox_whole {
            write!(f, ", in pieces up to {}", Bytes(slots))?;
        }
        if slots_held < usize::MAX {
            write!(f, " and in graphs from {} on", Bytes(slots_held))?;
        }
        Ok(())
    }
}

struct Bytes(usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => write!(f, "{} MB", bytes >> 20),
            bytes if bytes >= 1 << 10 => write!(f, "{} KB", bytes >> 10),
            bytes => write!(f, "{bytes} B"),
        }
    }
}
