//! Numbers that [`choose`](super::choose) and the [algorithms](super::algorithm) go by: up to which size one way is
//! faster than another, and how many blocks a kernel is worth.
//!
//! They come from a [`table`] for machines that were measured with care; else from the devices themselves, when the
//! pool is built ([`measure`]: pushes against barriers, and numbers of blocks); else, and for all that was not reached,
//! from the defaults, which are what was best on H200s. Software GPUs have the defaults: what they do must not depend
//! on time.
//!
//! **Nothing that is measured decides over bits.** A push and a kernel with barriers add up in the same order, whatever
//! their blocks. Around a ring the order is another one, so from which size on there is one comes from the table or is
//! the default, and the same call gives the same bits in every run.

mod measure;
mod table;
#[cfg(test)]
mod tests;

use super::{
    Algorithm,
    kernels::{
        BLOCKS, RING_BLOCKS,
        signals::{PUSHED, eager, most_pushed},
    },
};
use crate::{GpuPool, thread::worker::Shared};
use std::{fmt, str::FromStr, time::Duration};

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

/// How long measuring may take. What would take longer is not begun.
const BUDGET: Duration = Duration::from_millis(100);

/// For a number of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes from one member to another up to which they are pushed, where packets have room for them,
    pub push: usize,
    /// and the most blocks that push.
    pub push_blocks: u32,
    /// Bytes from one member to another up to which more goes eagerly, where there is room for it at the receivers,
    pub eager: usize,
    /// of sums that are not scattered, and broadcasts, which carry more in all than by parts,
    pub eager_whole: usize,
    /// and that a block is worth starting for then; there are at most `blocks`.
    pub eager_per_block: usize,
    /// Bytes from which on a sum goes round a ring, each member by one kernel,
    pub ring_kernel: usize,
    /// of at most so many blocks.
    pub ring_blocks: u32,
    /// Bytes from which on sums are exchanged by copy engines,
    pub exchange: usize,
    /// sums that stay where they are made (half as much is sent, and nothing while the last are made),
    pub exchange_parts: usize,
    /// Bytes from which on sums that everybody gets are exchanged by kernels,
    pub exchange_kernel: usize,
    /// of at most so many blocks,
    pub exchange_blocks: u32,
    /// and from which on what is only moved is copied by them.
    pub copies: usize,
    /// Bytes from which on copy engines add up what nobody waits for yet: they may be slower, but leave the
    /// multiprocessors to the work beside,
    pub beside: usize,
    /// and the most blocks of a kernel that does it.
    pub beside_blocks: u32,
    /// Bytes that a block is worth starting for,
    pub per_block: usize,
    /// and the most blocks of a kernel: more do not make a link faster, and leave less to other work.
    pub blocks: u32,
    /// Bytes of a part from which on it is large,
    pub large: usize,
    /// and the most blocks of a kernel that adds up such parts,
    pub large_blocks: u32,
    /// or hands such parts of a broadcast on.
    pub handed_on_blocks: u32,
    /// Bytes of each part of an all-gather from which on a kernel
    pub gathered: usize,
    /// has up to so many blocks.
    pub gathered_blocks: u32,
}

impl Limits {
    /// What was best on H200s (`benches/results`; the ring on 8 of them, `prototypes/README.md`), for any number of
    /// members.
    pub(crate) fn default_of(members: usize) -> Limits {
        let others = members.saturating_sub(1).max(1);
        Limits {
            push: (PUSHED / others).min(most_pushed(members)),
            push_blocks: BLOCKS,
            eager: eager(members),
            // All-reduces on 4 H200s: 256 KB in 9.5 us for 10.1, 512 KB in 11.6 for 10.8.
            eager_whole: eager(members).min((1 << 20) / others),
            // A pack of 16 bytes for each thread, so that all are on their way at once.
            eager_per_block: 512 * 16,
            // 32 MB on 4: 156 us, slices with barriers 173. For fewer bytes its hops cost more than its stores gain.
            // Between two every byte crosses once in any way.
            ring_kernel: if members > 2 { 32 << 20 } else { usize::MAX },
            ring_blocks: RING_BLOCKS as u32,
            // (A ring of copies was nowhere faster: 1 GB on 4 in 5008 us, by kernels 4536.)
            // Between two H200s; 4 add up 64 MB in 428 us by copies, and in 298 by a ring of kernels.
            exchange: if members == 2 { 64 << 20 } else { usize::MAX },
            exchange_parts: if members == 2 { 512 << 20 } else { usize::MAX },
            // On 4: 16 MB in 85 us, around a ring 89; 8 MB in 49, slices with barriers 51; 256 MB of half types in
            // 1213, slices 1349. (Sums that stay where they are made gain nothing: 256 MB were scattered in 682 us so,
            // and in 656 by slices.)
            exchange_kernel: if members > 2 { 8 << 20 } else { usize::MAX },
            exchange_blocks: BLOCKS,
            copies: if members == 2 { 128 << 20 } else { usize::MAX },
            beside: if members == 2 { 8 << 20 } else { usize::MAX },
            beside_blocks: 16,
            per_block: 16 << 10,
            blocks: 64,
            // Reading from several while writing to several, few are faster: parts of 2 MB were added up on 4 H200s in
            // 50 us by 16, and in 52 by 64, and scattered in 30 and 33; handed on in 40 (by 32) and 41, of 21 MB in 209
            // and 238.
            large: if members > 2 { 2 << 20 } else { 8 << 20 },
            large_blocks: if members > 2 { 16 } else { 64 },
            handed_on_blocks: if members > 2 { 32 } else { 64 },
            gathered: 8 << 20,
            gathered_blocks: 64,
        }
    }

    /// For what goes on beside other work. Not what is pushed, which is over in microseconds, nor what goes through the
    /// host's memory, whose delays few blocks do not cover.
    pub(super) fn beside(self) -> Limits {
        let [blocks, large_blocks, ring_blocks, exchange_blocks] =
            [self.blocks, self.large_blocks, self.ring_blocks, self.exchange_blocks]
                .map(|most| most.min(self.beside_blocks));
        let exchange = self.exchange.min(self.beside);
        Limits { exchange, blocks, large_blocks, ring_blocks, exchange_blocks, ..self }
    }

    /// With at most so many blocks: a kernel that meets its peers' must be on its device as a whole, and one
    /// multiprocessor has room for at least one of its blocks.
    fn capped(self, multiprocessors: u32) -> Limits {
        let most = multiprocessors.clamp(1, BLOCKS);
        let cap = |blocks: u32| blocks.clamp(1, most);
        Limits {
            push_blocks: cap(self.push_blocks),
            ring_blocks: cap(self.ring_blocks),
            exchange_blocks: cap(self.exchange_blocks),
            beside_blocks: cap(self.beside_blocks),
            blocks: cap(self.blocks),
            large_blocks: cap(self.large_blocks),
            handed_on_blocks: cap(self.handed_on_blocks),
            gathered_blocks: cap(self.gathered_blocks),
            ..self
        }
    }
}

/// What measuring has found, of all devices of a pool together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Measured {
    /// `Limits::push`, unless it was not reached.
    push: Option<usize>,
    /// `Limits::large_blocks`, likewise.
    large_blocks: Option<u32>,
    /// Whether barriers were faster than packets from some size on: then they are for all that is larger, since rooms
    /// are not measured.
    barriers: bool,
}

impl Measured {
    /// The limits of some of a pool's devices. They push as much in all as all of them do, as by default.
    fn limits(self, devices: usize, members: usize) -> Limits {
        let default = Limits::default_of(members);
        let push = self.push.map_or(default.push, |bytes| bytes * (devices - 1) / members.saturating_sub(1).max(1));
        // For two, which have one link each, it is another question than for more.
        let blocks = self.large_blocks.filter(|_| (members > 2) == (devices > 2));
        let large_blocks = blocks.unwrap_or(default.large_blocks);
        let [eager, eager_whole] =
            [default.eager, default.eager_whole].map(|most| if self.barriers { 0 } else { most });
        Limits { push, eager, eager_whole, large_blocks, ..default }
    }
}

/// Of the smallest device, where several that share a GPU have its multiprocessors in equal parts: then kernels of all
/// of them fit on it at once, a block on each. A software GPU's kernels wait for nobody, so it counts as large.
pub(super) fn multiprocessors(shared: &Shared) -> u32 {
    let hardware = shared.handles.iter().filter(|handle| handle.driver.info().compute_capability != (0, 0));
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
    /// Where they are from.
    pub origin: String,
}

impl Tuned {
    /// Fills them in for any number of members.
    fn new(shared: &Shared, origin: impl Into<String>, of: impl Fn(usize) -> Limits) -> Tuned {
        let least = multiprocessors(shared);
        Tuned {
            limits: (0..=shared.devices()).map(|members| of(members).capped(least)).collect(),
            origin: origin.into(),
        }
    }

    pub(crate) fn of(&self, members: usize) -> &Limits {
        &self.limits[members]
    }

    /// In words, for so many members.
    pub(crate) fn describe(&self, members: usize) -> String {
        format!("{}: {}", self.origin, self.of(members))
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits {
            push,
            eager,
            eager_whole,
            ring_kernel,
            exchange,
            exchange_kernel,
            copies,
            beside,
            per_block,
            blocks,
            large,
            large_blocks,
            ..
        } = *self;
        write!(f, "pushed up to {}, ", Bytes(push))?;
        if eager_whole > push {
            write!(f, "sent eagerly up to {}, ", Bytes(eager_whole))?;
        }
        if eager > eager_whole {
            write!(f, "by parts up to {}, ", Bytes(eager))?;
        }
        let [per_block, large] = [per_block, large].map(Bytes);
        let from = [
            ("sums exchanged by copies", exchange),
            ("sums exchanged by kernels", exchange_kernel),
            ("beside other work", beside),
            ("moved by copies", copies),
            ("a ring of kernels", ring_kernel),
        ];
        for (what, bytes) in from.into_iter().filter(|(_, bytes)| *bytes < usize::MAX) {
            write!(f, "{what} from {} on, ", Bytes(bytes))?;
        }
        write!(f, "a block for {per_block}, at most {blocks}")?;
        if large_blocks != blocks {
            write!(f, ", {large_blocks} for sums in parts of {large}")?;
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

/// Decides on the limits of a pool whose peers and signals are known. It never fails: what cannot be measured has its
/// default.
pub(crate) fn tune(pool: &GpuPool, wish: Tune) -> Tuned {
    let shared = &pool.shared;
    let n = shared.devices();
    let default = |why: &str| Tuned::new(shared, why, Limits::default_of);
    let everyone: Vec<usize> = (0..n).collect();
    let software = shared.handles[0].driver.info().compute_capability == (0, 0);
    if wish == Tune::Off || software || n < 2 || !shared.are_direct(&everyone) {
        return default("default");
    }
    if shared.handles.iter().any(|handle| handle.sharers > 1) {
        return default("default, since devices share a GPU");
    }
    let name = &shared.handles[0].driver.info().name;
    let alike = shared.handles.iter().all(|handle| handle.driver.info().name == *name);
    if wish != Tune::Measure
        && alike
        && let Some(rows) = table::of(name)
    {
        return Tuned::new(shared, format!("table for {name}"), |members| table::between(rows, members));
    }
    let meets = shared.signals.get().is_some() && matches!(shared.algorithm, Algorithm::Auto | Algorithm::Direct);
    if wish == Tune::Table || !meets {
        return default("default");
    }
    match measure::measure(pool, BUDGET, measure::LARGE).map(|found| found[0]) {
        Ok(Measured { push: None, large_blocks: None, .. }) => default("default, since measuring took too long"),
        Ok(measured) => Tuned::new(shared, "measured when the pool was built", |members| measured.limits(n, members)),
        Err(error) => {
            event!(warn, %error, "the collectives could not be measured; they go by defaults");
            default("default, since measuring failed")
        }
    }
}
