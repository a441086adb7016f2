//! The device kernels of the collectives: their names, the layout of their arguments, and their host kernels for
//! software GPUs.
//!
//! The algorithms launch them. The device code is in `kernels/{combine,push,eager,inbox,staged,ring,exchange}.cu`;
//! `kernels/meet.cuh` says how the kernels of several devices wait for each other. [`host_kernels`] do not wait for
//! each other: events order them. Those of [`stepped`] do, step by step.
//!
//! Invariant: a device kernel and its host kernel compute the same bits, whatever the launch dimensions and the
//! alignment. Elements are folded in rank order, half types in `f32` with one rounding at the end, and integers wrap.
//! Only the bits of a NaN may differ.

mod exchange;
mod host_kernels;
mod inbox;
mod lane;
mod ring;
mod staged;
pub(crate) mod stepped;
#[cfg(test)]
mod tests;

use crate::{
    Module,
    driver::{Address, HostKernel, KernelArg, ValueBytes},
    fabric::{
        layout::{DeviceBarrier, MOST, Route},
        types::{DType, ReduceOp},
    },
    kernel::builtin,
};
use smallvec::SmallVec;

pub(crate) use exchange::{EXCHANGE_SLOTS, Exchange, Pieces, Trade};
pub(crate) use inbox::{Parcels, inbox, slots};
pub(crate) use ring::{Cut, Ring, Round};
pub(crate) use staged::{Moves, Role, Stage, Staged};

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

/// The kernel that adds up or moves. Launched with [`Combine::args`].
pub(crate) fn combine(dtype: DType) -> Entry {
    let ((name, host), ..) = names(dtype);
    Entry { module: &builtin::COMBINE, name, host: Some(host) }
}

/// A kernel that takes part in a barrier and touches no memory, with its arguments.
pub(crate) fn counting(meet: DeviceBarrier) -> (Entry, Arguments) {
    let none = Combine { n: 0, op: ReduceOp::Sum, factors: &[], sources: &[], destinations: &[], meet };
    (combine(DType::U8), none.args(false))
}

/// `n` elements in the host's memory, folded by the calling thread: the bits are the kernels'. `factors` are those of
/// all sources where `op` is `Scaled`, else none. `Avg` divides by `members`: each source may be the sum of several.
///
/// # Safety
/// All parts have so many elements and are aligned for them; nobody writes the sources meanwhile, nor touches the
/// destination, which may be one of the sources.
pub unsafe fn fold_on_host(
    dtype: DType,
    op: ReduceOp,
    n: usize,
    sources: &[*mut u8],
    destination: *mut u8,
    factors: &[f64],
    members: usize,
) {
    macro_rules! fold {
        ($($D:ident $T:ty),+) => {
            // SAFETY: the promise of the caller.
            unsafe { match dtype {
                $(DType::$D => host_kernels::on_host::<$T>(n, code(op), sources, destination, factors, members),)+
            } }
        };
    }
    fold!(F32 f32, F64 f64, F16 half::f16, BF16 half::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64)
}

/// The kernel that copies several pairs of parts. Launched with [`Pairs::args`].
pub(crate) fn pairs() -> Entry {
    Entry { module: &builtin::COMBINE, name: "pairs", host: Some(host_kernels::pairs) }
}

/// The LL kernel. Launched with [`Push::args`]. It has no host kernel: software GPUs gain nothing by it.
pub(crate) fn push(dtype: DType) -> Entry {
    Entry { module: &builtin::PUSH, name: names(dtype).1, host: None }
}

/// The eager kernel: plain data into slots at the receivers. Launched with [`Push::args`], too.
pub(crate) fn eager(dtype: DType) -> Entry {
    Entry { module: &builtin::EAGER, name: names(dtype).2, host: None }
}

/// The kernel of `shm`. Launched with [`Staged::args`]. It has no host kernel: software GPUs use `combine` and `pairs`.
pub(crate) fn staged(dtype: DType) -> Entry {
    Entry { module: &builtin::STAGED, name: names(dtype).3, host: None }
}

/// The kernel of `exchange`. Launched with [`Trade::args`]. It has no host kernel: software GPUs add up by `combine`.
pub(crate) fn exchange(dtype: DType) -> Entry {
    Entry { module: &builtin::EXCHANGE, name: exchange::name(dtype), host: None }
}

/// The kernel of `ring`. Launched with [`Round::args`]. It has no host kernel: software GPUs go round by copies.
pub(crate) fn ring(dtype: DType) -> Entry {
    let name = if dtype == DType::F64 { "ring_f64" } else { "ring_f32" };
    Entry { module: &builtin::RING, name, host: None }
}

/// A range of some device's memory.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The first byte.
    pub address: Address,
    /// How many there are.
    pub bytes: usize,
}

impl Part {
    /// Nothing.
    pub const NONE: Part = Part { address: 0, bytes: 0 };

    pub(super) fn slice(self, write: bool) -> KernelArg {
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
    pub meet: DeviceBarrier,
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
        args.push(eight_of(self.factors, 0));
        args.push(eight_of(self.factors, 1));
        push_parts(&mut args, self.sources, self.destinations, software);
        // Where a GPU has no more.
        (2..self.factors.len().div_ceil(8)).for_each(|eight| args.push(eight_of(self.factors, eight)));
        args
    }
}

/// `pairs[k].1` = `pairs[k].0`, byte for byte; each pair's parts are equally long and do not overlap unless they are
/// the same. The grid has `pairs.len() * blocks_per_pair` blocks.
pub(crate) struct Pairs<'a> {
    pub pairs: &'a [(Part, Part)],
    pub blocks_per_pair: u32,
    pub meet: DeviceBarrier,
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

/// Every sender's `n` elements for every receiver: by [`push`] at most 8 bytes for each of a place's packets, by
/// [`eager`] at most the bytes of a slot, by [`inbox`](inbox()) at most those of a room; software GPUs only by that.
/// Every member launches the same grid. `n` is not 0 and there are at least two members.
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
    pub meet: DeviceBarrier,
}

impl Push<'_> {
    pub fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0);
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(self.n as u64));
        args.push(value(code(self.op)));
        args.push(value(self.route));
        args.push(eight_of(self.factors, 0));
        args.push(eight_of(self.factors, 1));
        args.push(self.source.slice(false));
        args.push(self.destination.slice(true));
        args
    }
}

/// As `kernels/fold.cuh` counts them.
pub(crate) fn code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => host_kernels::SUM,
        ReduceOp::Prod => host_kernels::PROD,
        ReduceOp::Min => host_kernels::MIN,
        ReduceOp::Max => host_kernels::MAX,
        ReduceOp::Avg => host_kernels::AVG,
        ReduceOp::Scaled(_) => host_kernels::SCALED,
    }
}

pub(super) fn value<T: bytemuck::Pod>(x: T) -> KernelArg {
    KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&x)))
}

/// The `eight`-th eight of the factors.
fn eight_of(factors: &[f64], eight: usize) -> KernelArg {
    value::<[f64; 8]>(std::array::from_fn(|k| factors.get(8 * eight + k).copied().unwrap_or(0.0)))
}

/// The lower and the upper half of values by rank.
pub(crate) fn eights(all: &[u64; MOST]) -> [KernelArg; 2] {
    let (low, high) = all.split_at(8);
    [low, high].map(|eight| value(<[u64; 8]>::try_from(eight).expect("half of them")))
}

/// Sources, then destinations, each in [`MOST`] places or as many as it takes. In the launch of a software GPU a range
/// may appear only once (the host kernel holds it exclusively), so a source that is a destination is named by its
/// number.
fn push_parts(args: &mut Arguments, sources: &[Part], destinations: &[Part], software: bool) {
    debug_assert!(software || sources.len().max(destinations.len()) <= MOST, "a GPU's kernel has {MOST} places");
    let same = |source: &Part| destinations.iter().position(|d| software && d.address == source.address && d.bytes > 0);
    let unused = |used: usize| (used..MOST).map(|_| value(0_u64));
    args.extend(sources.iter().map(|source| same(source).map_or(source.slice(false), |j| value(j as u64))));
    args.extend(unused(sources.len()));
    args.extend(destinations.iter().map(|destination| destination.slice(true)));
    args.extend(unused(destinations.len()));
}
