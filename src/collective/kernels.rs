//! The device kernels of the collectives: how they are named, and how their arguments are laid out.
//!
//! The device halves are `kernels/combine.cu`, `kernels/push.cu`, `kernels/eager.cu`, `kernels/staged.cu`,
//! `kernels/ring.cu` and `kernels/exchange.cu`; `kernels/meet.cuh` says how the kernels of several devices wait for
//! each other. The host kernels for software GPUs are in [`host kernel`]. They do not meet, since events order them.
//!
//! Device and host kernel compute the same bits, whatever the launch dimensions and alignment: elements are folded in rank
//! order, half types in `f32` with one rounding at the end, integers wrapping. Only which NaN a NaN is may differ.

mod exchange;
mod host_kernels;
mod lane;
mod ring;
mod staged;
#[cfg(test)]
mod tests;

use super::{DType, ReduceOp};
use crate::{
    Module,
    driver::{Address, HostKernel, KernelArg, ValueBytes},
    kernel::builtin,
};
use smallvec::SmallVec;

pub(crate) use exchange::{EXCHANGE_SLOTS, Exchange, Pieces, Trade};
pub(crate) use ring::{Cut, RING_BLOCKS, Ring, Round};
pub(crate) use staged::{Moves, Role, STAGED_BLOCKS, STAGED_COUNTS, STAGED_SLOTS, Stage, Staged};

/// Devices that a kernel on a GPU can name.
pub(crate) const MOST: usize = 16;
/// Blocks of a kernel that meets, at most.
pub(crate) const BLOCKS: u32 = 128;
/// Blocks of a push, at most, that waits for its peers while the next kernel is on the device.
pub(crate) const FEW: u32 = 32;
/// Threads of a block, at most. A block of a kernel that meets has more than [`MOST`].
pub(crate) const THREADS: u32 = 512;
/// The signals of a device (`kernels/meet.cuh`): a header with addresses and epochs, the flags of barriers, and, for
/// each other device, the packets of pushes and the rooms of what is sent eagerly.
pub(crate) mod signals {
    use super::{BLOCKS, MOST};

    /// What a device alone writes, with the addresses.
    pub(crate) const HEADER: usize = 256;
    const FLAGS: usize = 2 * BLOCKS as usize * MOST * 4 + 3 * BLOCKS as usize * MOST * 8;

    /// Packets of each sender and parity in a pool of so many devices, which each send up to `pushed` bytes: as many as
    /// are worth pushing to all the others.
    const fn packets(devices: usize, pushed: usize) -> usize {
        let (most, cap) = (pushed / (8 * (devices - 1)), most_pushed(devices) / 8);
        if most < cap { most / 512 * 512 } else { cap }
    }

    /// Bytes that a device sends up to which an all-reduce is pushed: all it has to everyone, with as many bytes of
    /// flags. On 2 and 4 H200s that was faster than slices with barriers at every size that fits (`benches/results`).
    pub(crate) const PUSHED: usize = 768 << 10;

    /// The same to one other device: more goes eagerly, 512 KB between two H200s in 7.2 us for 9.0; 256 KB on 4 in 9.5
    /// for 10.2.
    pub(crate) const fn most_pushed(devices: usize) -> usize {
        if devices > 2 { 128 << 10 } else { 256 << 10 }
    }

    /// The same where packets cross the host's memory: what there is room for. How much is worth it is less
    /// ([`choose`](super::super::choose)).
    pub(crate) const PUSHED_THROUGH_HOST: usize = 112 << 10;

    /// Bytes that a device sends another up to which they go eagerly, into a room there. The rooms of many get smaller:
    /// with all else a device's signals are to stay within 8 MB.
    pub(crate) const fn eager(devices: usize) -> usize {
        if devices > 4 { (2 << 20) / (devices - 1) } else { 1 << 20 }
    }

    /// What each sender and parity has places for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Places {
        pub packets: usize,
        /// Bytes of the room; 0: none.
        pub room: usize,
    }

    impl Places {
        /// In a pool of devices that know each other's memory.
        pub(crate) const fn direct(devices: usize) -> Places {
            let each = eager(devices);
            Places { packets: packets(devices, PUSHED), room: each - each % (16 << 10) }
        }

        /// In the host's memory: packets alone.
        pub(crate) const fn through_host(devices: usize) -> Places {
            Places { packets: packets(devices, PUSHED_THROUGH_HOST), room: 0 }
        }

        /// All of a device's signals, in a pool of so many.
        pub(crate) const fn bytes(self, devices: usize) -> usize {
            HEADER + FLAGS + self.rooms(devices) + (devices - 1) * 2 * self.room
        }

        /// Bytes from the first packet to the first room: a device has no place for itself.
        pub(crate) const fn rooms(self, devices: usize) -> usize {
            (devices - 1) * 2 * self.packets * 16
        }
    }

    /// How it begins; all else is zero.
    pub(crate) fn header(peers: &[u64], abort: u64, report: u64, places: Places) -> Vec<u64> {
        let mut words = vec![0; HEADER / 8];
        words[..peers.len()].copy_from_slice(peers);
        words[MOST] = abort;
        words[MOST + 1] = report;
        // Behind the epochs, and the ticket that is the word's lower half.
        words[MOST + 2 + MOST / 2] = (places.packets as u64) << 32;
        words[MOST + 3 + MOST / 2] = (places.rooms(peers.len()) as u64) << 32 | places.room as u64;
        words
    }

    /// The last meeting with each device, in a header.
    pub(crate) fn count_up_to(header: &mut [u64], epoch: u32) {
        header[MOST + 2..][..MOST / 2].fill(u64::from(epoch) << 32 | u64::from(epoch));
    }
}

/// What a kernel that has given up leaves in its device's report word: the place of the gang, and whom it waited for.
pub(crate) fn reported(report: u64) -> Option<(u64, usize)> {
    (report & 0x80 != 0).then_some((report >> 8, (report & 0x7f) as usize))
}

/// The meeting that a kernel is part of, as `kernels/meet.cuh` has it.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Meet {
    /// The device's own signals; 0: no meeting, events order the kernel.
    pub signals: Address,
    /// The members' ordinals in rank order, 4 bits each; see [`members`](Self::members).
    pub members: u64,
    /// The gang's place: an abort word of `place` or more means that it has failed; 0 in a graph, where the place is a
    /// word beside that.
    pub place: u64,
    /// Nanoseconds of waiting in one place after which the kernel gives up; 0: never.
    pub deadline: u64,
    /// Members.
    pub count: u32,
    /// The device's own rank.
    pub me: u32,
    /// Nothing yet.
    pub spare: u64,
}

impl Meet {
    /// No meeting.
    pub(crate) const NONE: Meet = Meet { signals: 0, members: 0, place: 0, deadline: 0, count: 0, me: 0, spare: 0 };

    /// Whether these can be packed.
    pub(crate) fn can_name(ordinals: &[usize]) -> bool {
        ordinals.len() <= MOST && ordinals.iter().all(|&ordinal| ordinal < MOST)
    }

    /// Ordinals in rank order, packed.
    pub(crate) fn members(ordinals: impl IntoIterator<Item = usize>) -> u64 {
        ordinals.into_iter().enumerate().fold(0, |all, (rank, ordinal)| {
            assert!(rank < MOST && ordinal < MOST, "a kernel can meet {MOST} devices");
            all | (ordinal as u64) << (4 * rank)
        })
    }
}

/// A device function with its host kernel.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub module: &'static Module,
    pub name: &'static str,
    pub host: Option<HostKernel>,
}

/// `f!(dtype, combine)` is the name of the function and the host kernel for that type.
macro_rules! by_type {
    ($dtype:expr, $($D:ident $T:ty, $combine:literal, $push:literal, $eager:literal, $staged:literal;)+) => {
        match $dtype {
            $(DType::$D => (($combine, host_kernels::combine::<$T> as HostKernel), $push, $eager, $staged),)+
        }
    };
}

fn names(dtype: DType) -> ((&'static str, HostKernel), &'static str, &'static str, &'static str) {
    by_type! { dtype,
        F32 f32, "combine_f32", "push_f32", "eager_f32", "staged_f32";
        F64 f64, "combine_f64", "push_f64", "eager_f64", "staged_f64";
        F16 half::f16, "combine_f16", "push_f16", "eager_f16", "staged_f16";
        BF16 half::bf16, "combine_bf16", "push_bf16", "eager_bf16", "staged_bf16";
        I8 i8, "combine_i8", "push_i8", "eager_i8", "staged_i8";
        U8 u8, "combine_u8", "push_u8", "eager_u8", "staged_u8";
        I32 i32, "combine_i32", "push_i32", "eager_i32", "staged_i32";
        U32 u32, "combine_u32", "push_u32", "eager_u32", "staged_u32";
        I64 i64, "combine_i64", "push_i64", "eager_i64", "staged_i64";
        U64 u64, "combine_u64", "push_u64", "eager_u64", "staged_u64";
    }
}

/// Launched with [`Combine::args`].
pub(crate) fn combine(dtype: DType) -> Entry {
    let ((name, host), ..) = names(dtype);
    Entry { module: &builtin::COMBINE, name, host: Some(host) }
}

/// `n` elements in the host's memory, folded by the calling thread: the bits are the kernels'. `factors` are those of
/// all sources where `op` is `Scaled`, else none.
///
/// # Safety
/// All parts have so many elements and are aligned for them; nobody writes the sources meanwhile, nor touches the
/// destination, which may be one of the sources.
pub(crate) unsafe fn fold_on_host(
    dtype: DType,
    op: ReduceOp,
    n: usize,
    sources: &[*mut u8],
    destination: *mut u8,
    factors: &[f64],
) {
    macro_rules! fold {
        ($($D:ident $T:ty),+) => {
            // SAFETY: the promise of the caller.
            unsafe { match dtype {
                $(DType::$D => host_kernels::on_host::<$T>(n, code(op), sources, destination, factors),)+
            } }
        };
    }
    fold!(F32 f32, F64 f64, F16 half::f16, BF16 half::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64)
}

/// Launched with [`Pairs::args`].
pub(crate) fn pairs() -> Entry {
    Entry { module: &builtin::COMBINE, name: "pairs", host: Some(host_kernels::pairs) }
}

/// Launched with [`Push::args`]. Without a host kernel: software GPUs have nothing to gain from it.
pub(crate) fn push(dtype: DType) -> Entry {
    Entry { module: &builtin::PUSH, name: names(dtype).1, host: None }
}

/// The same of more, through rooms at the receivers: launched with [`Push::args`], too.
pub(crate) fn eager(dtype: DType) -> Entry {
    Entry { module: &builtin::EAGER, name: names(dtype).2, host: None }
}

/// Launched with [`Staged::args`]. Without a host kernel: software GPUs do the same by `combine` and `pairs`.
pub(crate) fn staged(dtype: DType) -> Entry {
    Entry { module: &builtin::STAGED, name: names(dtype).3, host: None }
}

/// Launched with [`Trade::args`]. Without a host kernel: software GPUs add up by `combine`.
pub(crate) fn exchange(dtype: DType) -> Entry {
    Entry { module: &builtin::EXCHANGE, name: exchange::name(dtype), host: None }
}

/// Launched with [`Round::args`]. Without a host kernel: software GPUs go round by copies.
pub(crate) fn ring(dtype: DType) -> Entry {
    let name = if dtype == DType::F64 { "ring_f64" } else { "ring_f32" };
    Entry { module: &builtin::RING, name, host: None }
}

/// A range of some device's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub address: Address,
    pub bytes: usize,
}

impl Part {
    fn slice(self, write: bool) -> KernelArg {
        KernelArg::Slice { address: self.address, bytes: self.bytes, write }
    }
}

/// The arguments of a launch.
pub(crate) type Arguments = SmallVec<[KernelArg; 40]>;

/// `destinations[j][i]` = fold over `k` of `sources[k][i]`, for `i < n`.
///
/// A source may be the same memory as a destination, element for element; any other overlap of the two is wrong. GPUs
/// take up to [`MOST`] of each, software GPUs any number. One source is copied as it is, whatever the operation but
/// `Scaled`.
pub(crate) struct Combine<'a> {
    /// Elements of every part.
    pub n: usize,
    pub op: ReduceOp,
    /// One for each source when `op` is `Scaled` (whose own factor is not looked at), else empty.
    pub factors: &'a [f64],
    pub sources: &'a [Part],
    pub destinations: &'a [Part],
    pub meet: Meet,
}

impl Combine<'_> {
    /// For a GPU, or for a software GPU.
    pub fn args(&self, software: bool) -> Arguments {
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(self.n as u64));
        args.push(value(code(self.op)));
        args.push(value(self.sources.len() as u32));
        args.push(value(self.destinations.len() as u32));
        push_factors(&mut args, self.factors, 0);
        push_factors(&mut args, self.factors, 1);
        push_parts(&mut args, self.sources, self.destinations, software);
        // Where a GPU has no more.
        (2..self.factors.len().div_ceil(8)).for_each(|eight| push_factors(&mut args, self.factors, eight));
        args
    }
}

/// `pairs[k].1` = `pairs[k].0`, byte for byte; each pair's parts are equally long and do not overlap unless they are
/// the same. The grid has `pairs.len() * blocks_per_pair` blocks.
pub(crate) struct Pairs<'a> {
    pub pairs: &'a [(Part, Part)],
    pub blocks_per_pair: u32,
    pub meet: Meet,
}

impl Pairs<'_> {
    /// For a GPU, or for a software GPU.
    pub fn args(&self, software: bool) -> Arguments {
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(self.pairs.len() as u32));
        args.push(value(self.blocks_per_pair));
        let bytes = |k: usize| self.pairs.get(k).map_or(0, |pair| pair.0.bytes as u64);
        args.push(value::<[u64; 8]>(std::array::from_fn(bytes)));
        args.push(value::<[u64; 8]>(std::array::from_fn(|k| bytes(8 + k))));
        let (sources, destinations): (SmallVec<[Part; MOST]>, SmallVec<[Part; MOST]>) =
            self.pairs.iter().copied().unzip();
        push_parts(&mut args, &sources, &destinations, software);
        args
    }
}

/// Who sends to whom in a push, as bits by rank, and where what one sends begins: `Route` in `kernels/route.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Route {
    pub senders: u16,
    pub receivers: u16,
    /// 1: receivers add up what arrives (then all are senders), 0: they put it in its place.
    pub folds: u32,
    /// What a sender has for rank `b` is `b * out` elements after the source's begin.
    pub out: u64,
    /// What a receiver has of rank `a` goes `a * into` elements after the destination's begin.
    pub into: u64,
}

/// Every sender's `n` elements for every receiver: by [`push`] at most 8 bytes for each of a place's packets, by
/// [`eager`] at most what a room has; on GPUs only. Every member launches the same grid. `n` is not 0 and there are at
/// least two members.
pub(crate) struct Push<'a> {
    pub n: usize,
    pub op: ReduceOp,
    pub route: Route,
    /// One for each member when `op` is `Scaled`, else empty.
    pub factors: &'a [f64],
    /// This device's own memory.
    pub source: Part,
    /// This device's own memory; may be the source, part for part.
    pub destination: Part,
    pub meet: Meet,
}

impl Push<'_> {
    pub fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0);
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(self.n as u64));
        args.push(value(code(self.op)));
        args.push(value(self.route));
        push_factors(&mut args, self.factors, 0);
        push_factors(&mut args, self.factors, 1);
        args.push(self.source.slice(false));
        args.push(self.destination.slice(true));
        args
    }
}

/// As `kernels/fold.cuh` counts them.
fn code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => host_kernels::SUM,
        ReduceOp::Prod => host_kernels::PROD,
        ReduceOp::Min => host_kernels::MIN,
        ReduceOp::Max => host_kernels::MAX,
        ReduceOp::Avg => host_kernels::AVG,
        ReduceOp::Scaled(_) => host_kernels::SCALED,
    }
}

fn value<T: bytemuck::Pod>(x: T) -> KernelArg {
    KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&x)))
}

/// The `eight`-th eight of the factors.
fn push_factors(args: &mut Arguments, factors: &[f64], eight: usize) {
    args.push(value::<[f64; 8]>(std::array::from_fn(|k| factors.get(8 * eight + k).copied().unwrap_or(0.0))));
}

/// Sources, then destinations, each in [`MOST`] places or as many as it takes. In the launch of a software GPU a range
/// may appear only once (the host kernel holds it exclusively), so a source that is a destination is named by its number.
fn push_parts(args: &mut Arguments, sources: &[Part], destinations: &[Part], software: bool) {
    debug_assert!(software || sources.len().max(destinations.len()) <= MOST, "a GPU's kernel has {MOST} places");
    let same = |source: &Part| destinations.iter().position(|d| software && d.address == source.address && d.bytes > 0);
    let unused = |used: usize| (used..MOST).map(|_| value(0_u64));
    args.extend(sources.iter().map(|source| same(source).map_or(source.slice(false), |j| value(j as u64))));
    args.extend(unused(sources.len()));
    args.extend(destinations.iter().map(|destination| destination.slice(true)));
    args.extend(unused(destinations.len()));
}
